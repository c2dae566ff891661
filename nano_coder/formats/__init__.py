"""Runs in other programs' formats: a file a format, each a `RunFormat` that reads, writes or both."""
