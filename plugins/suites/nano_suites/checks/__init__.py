"""Kinds of checks that the tasks of suites are graded by (`nano.checks`)."""
