"""Runs and tasks in the formats of other projects, and clients of their environments: a folder a project."""
