"""Tasks mined from Python packages that have tests: what is read, traced, broken on purpose and admitted."""
