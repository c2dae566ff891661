"""The modules that run in jails when test files are graded: standard library only.

`jail_program.program` bundles them into the text of one program, since a jail does not contain them.
"""
