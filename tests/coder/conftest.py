"""Fixtures of the tests of the runtime."""

from tiny_fixtures import model, one_thread, tiny_folder

__all__ = ["model", "one_thread", "tiny_folder"]
