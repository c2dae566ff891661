"""The commands of `nano-coder`: each parses, calls one function, prints."""
