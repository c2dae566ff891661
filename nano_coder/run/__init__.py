"""Runs: execute a task, resume, fork, replay, and grade what a run left."""
