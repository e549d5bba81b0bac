"""What a test needs from the extra `author`. Where only `lab` and `test` are installed, it is skipped and
says why.

Nothing is skipped in the course's own environment, and where COURSE_REQUIRE_BROWSER=1 asks for every test.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from course_utils.cli.environment import FOLDER, remembered


def all_are_required(prefix: str = sys.prefix) -> bool:
    """True in the environment that set-up made for tests, and where the browser is required."""
    own = Path(prefix).resolve() == FOLDER.resolve() and remembered().get("extra") in ("author", "scripts")
    return own or os.environ.get("COURSE_REQUIRE_BROWSER") == "1"


def need(*packages: str) -> None:
    """Skip a test or a module, or fail where all are required, if one of the packages is not installed."""
    for name in packages:
        if find_spec(name) is None:
            lacking(name)


def lacking(name: str | None) -> NoReturn:
    reason = f"{name} is not installed: it comes with the extra `author`"
    if all_are_required():
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
