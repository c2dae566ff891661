"""Runs: execute, resume, fork, try side by side and grade.

`nano-coder run` calls `attempt_task`, or for --tries `run_tries` and `best_of`; where the winner fails its
check, --escalate calls `escalate_run`.
"""
