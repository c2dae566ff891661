"""Clients of the environments of others, which `--env SCHEME:TARGET` names."""
