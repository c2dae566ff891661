"""Checkpoints: written, evaluated, promoted, traced back to where they come from."""
