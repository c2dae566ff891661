"""The launcher: the trusted program that builds jails, apart from the agent and its secrets.

It starts with an empty environment, imports the standard library only, and is imported as a top-level
package, so that none of the agent's modules, and none of its secrets, are in the memory that jails are
forked from. Whatever it needs is imported before the root is exchanged: afterwards no module can be found.
"""
