"""Runs: execute, resume, fork, replay and grade."""
