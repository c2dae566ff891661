"""Programs of tools that run in the jail: standard library only, sent as text."""
