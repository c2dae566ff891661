"""The commands of `nano-rl`: each parses, calls one function, prints."""
