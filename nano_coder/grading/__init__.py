"""Verdicts: answers are computed in a jail and compared outside it."""

from nano_coder.grading.delivery import grade_folder
from nano_coder.grading.trajectory import grade_trajectory

__all__ = ["grade_folder", "grade_trajectory"]
