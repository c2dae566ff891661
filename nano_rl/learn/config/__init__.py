"""Settings of one update: the objective, the optimizer, the critic and the guards. Imports no torch."""
