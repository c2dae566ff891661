"""Runs: execute, resume, fork and grade."""
