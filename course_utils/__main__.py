"""The front door: `python3 -m course_utils lab`, `test`, `doctor` and the rest.

This file has to run on any Python that a machine may have, so that one too old gets a clear message: no
annotations, no f-strings, nothing imported from the course before the check.
"""

import sys

OLDEST = (3, 11)
GATES = ("watch", "fit", "oom")  # their exit code 1 is an answer, as in cli/learn.py
CANDIDATES = ("python3.14", "python3.13", "python3.12", "python3.11")


def refusal(version, arguments, find):
    """The message for the user of a Python as old as `version`, or "" if it is new enough.

    `arguments` are those of the command line; `find` looks up a program by name and returns its path or None.
    """
    if tuple(version[:2]) >= OLDEST:
        return ""
    old = "Python %d.%d is too old for this course" % (version[0], version[1])
    for candidate in CANDIDATES:
        if find(candidate):
            command = " ".join([candidate, "-m course_utils"] + arguments)
            return "%s, but a newer one is here: run `%s`." % (old, command)
    advice = "install Python 3.11 or newer (python.org has it for every system)"
    return old + ": " + advice + ", then run the same command with that one."


def find_program(name):
    """The path of a program, or None; Python 2 has no `shutil.which` and finds nothing."""
    import shutil

    return getattr(shutil, "which", lambda _: None)(name)


if __name__ == "__main__":
    REFUSAL = refusal(sys.version_info, sys.argv[1:], find_program)
    if REFUSAL:
        sys.stderr.write(REFUSAL + "\n")
        sys.exit(2 if sys.argv[1:2] and sys.argv[1] in GATES else 1)

    from .cli.main import main

    sys.exit(main(sys.argv[1:]))
