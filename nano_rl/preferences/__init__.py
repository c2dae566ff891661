"""Pairs of which one is preferred, and what is trained on them: DPO and reward models."""
