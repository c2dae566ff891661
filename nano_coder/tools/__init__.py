"""The tools an agent acts with, by name: entry points of `nano.tools`, one noun a file."""
