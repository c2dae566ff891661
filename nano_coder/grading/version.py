"""Name and version of the grader, stamped on every verdict."""

GRADER = "nano-grader 3"
