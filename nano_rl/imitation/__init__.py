"""Imitation: where demonstrations come from, their rows, and the training on them."""
