"""Verdicts: answers are computed in a jail and compared outside it."""

from nano_coder.grading.trajectory import grade_trajectory

__all__ = ["grade_trajectory"]
