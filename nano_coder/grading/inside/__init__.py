"""What runs in jails when test files are graded: standard library only, and nothing of the rest of nano.

`bundle.program` turns these modules into the text of one program, since a jail does not show them.
"""
