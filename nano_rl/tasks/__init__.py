"""Procedural tasks: one program generator, many views, splits by family."""

from nano_rl.tasks.make import make_tasks, read_tasks, write_tasks

__all__ = ["make_tasks", "read_tasks", "write_tasks"]
