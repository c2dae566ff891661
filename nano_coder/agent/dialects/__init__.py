"""Dialects: how a model writes an action; one file each, parse and render as inverses."""
