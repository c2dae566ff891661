"""Grading: from what an agent left to a verdict. Answers are computed in a jail and compared outside it."""

from nano_coder.grading.submission import grade_folder, grade_trajectory

__all__ = ["grade_folder", "grade_trajectory"]
