"""The modules that run in jails when work is graded: standard library only.

`hidden_cases.program` bundles them into the text of one program, since a jail does not contain them.
"""
