"""Runs: execute, resume, fork, try side by side and grade."""
