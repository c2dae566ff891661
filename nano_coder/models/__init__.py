"""Models: from a name to a policy, local or behind an endpoint, scripted or replayed."""
