"""Run by a notebook's kernel before its first cell, which may lack the import of the one above it."""

import course_utils

del course_utils
