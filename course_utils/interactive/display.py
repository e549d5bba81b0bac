"""Show a result: drawn in a notebook, printed in a terminal."""

import sys
from typing import Any


def running_shell() -> Any:
    """IPython's shell where this runs in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def show(thing: object) -> None:
    """Draw in a notebook, print in a terminal."""
    if running_shell() is None:
        print(thing)
    else:
        sys.modules["IPython"].display.display(thing)
