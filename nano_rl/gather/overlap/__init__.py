"""Rollouts of the next step in a process of their own, while the trainer learns from the last."""
