"""Verification: whether a logged run may train a policy gradient, by its columns, tokens and log-probs."""
