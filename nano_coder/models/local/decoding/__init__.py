"""Decoding: how rows of tokens advance over one live model. Imports torch; loaded by the engine alone."""
