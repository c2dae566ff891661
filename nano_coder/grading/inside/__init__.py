"""What runs inside jails when test files are graded. Standard library only; no module imports the rest of nano.

`bundle.program` turns these modules into the text of one program, since a jail does not show them.
"""
