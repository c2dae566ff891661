"""The launcher: the trusted program that creates jails, in a process apart from the agent and its secrets.

It starts with an empty environment, uses the standard library only, and is imported as a top-level package,
so that neither modules nor secrets of the agent are in the memory that jails are forked from. Everything is
imported before the root is exchanged: afterwards no module can be found.
"""
