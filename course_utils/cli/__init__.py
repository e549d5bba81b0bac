"""The command line: `python3 -m course_utils COMMAND`."""
