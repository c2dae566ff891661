"""The sandbox: isolation for every program that a model runs."""
