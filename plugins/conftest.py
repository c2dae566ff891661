"""Fixtures of the core's tests, for those of plug-ins."""

from tiny_fixtures import model, one_thread, tiny_folder

__all__ = ["model", "one_thread", "tiny_folder"]
