"""Runs in other programs' formats: a file a format, each with `write`, `read` or both."""
