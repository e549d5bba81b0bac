"""Teach a class: copy the course without solutions, and grade a folder of notebooks."""
