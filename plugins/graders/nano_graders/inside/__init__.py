"""The modules that run in jails when test files are graded: standard library only.

`hidden_cases.program` bundles them with those of `nano_coder.grading.inside`, since a jail contains none.
"""
