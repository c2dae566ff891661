"""One command, or many, in the sandbox; and proof of what the sandbox holds."""
