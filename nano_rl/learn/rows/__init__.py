"""Rows: the rollouts of a task as a group, its token rows as samples, samples as padded micro-batches."""
