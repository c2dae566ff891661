"""Grading: from what an agent left to a verdict. Answers are computed in a jail and compared outside it."""

GRADER = "nano-grader 4"
