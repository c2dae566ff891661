"""Tasks: task files, the supplies that make tasks, and whether a task is fit to train on."""
