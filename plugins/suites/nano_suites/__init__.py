"""Suites: the content of generated tasks; each module or folder holds one `SUITE`."""
