"""Models: from a name to a policy: local, behind an endpoint or scripted."""
