"""Checks of exercises: one module a lesson, one function an exercise.

In an exercise: `from course_utils.checks import lesson_01 as check`, then `check.states(answer)`.
"""

from .feedback import CheckFailed, NotSolved

__all__ = ["CheckFailed", "NotSolved"]
