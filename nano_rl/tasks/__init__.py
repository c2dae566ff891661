"""Procedural coding tasks: typed programs, their mutants, and the task views over them."""

from nano_rl.tasks.make import make_tasks, read_tasks, write_tasks

__all__ = ["make_tasks", "read_tasks", "write_tasks"]
