"""Procedural coding tasks: typed programs, their mutants, and the task views over them."""

from nano_rl.tasks.make import draw_tasks, make_tasks, read_tasks, write_tasks

__all__ = ["draw_tasks", "make_tasks", "read_tasks", "write_tasks"]
