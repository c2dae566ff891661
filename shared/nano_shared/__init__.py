"""The contract between the agent runtime and the trainer. Imports no torch."""

__version__ = "0.1.0"
