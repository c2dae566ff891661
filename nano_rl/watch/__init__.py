"""Watching a training: time by phase, success by level, the live view, and where its numbers go."""
