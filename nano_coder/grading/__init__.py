"""Verdicts: answers are computed in a jail and compared outside it."""

from nano_coder.grading.answer import same, same_answer
from nano_coder.grading.command import grade_command
from nano_coder.grading.grade import GRADER, grade

__all__ = ["GRADER", "grade", "grade_command", "same", "same_answer"]
