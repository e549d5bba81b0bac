"""For those who teach a class: a copy of the course without solutions, and the grading of a folder of notebooks."""
