"""Graders of Python tests: hidden ones on a solution, and the agent's own on mutants (`nano.checks`)."""
