"""A plugin for `test --lesson`: leaves out a grammar of web addresses that nbformat loads and no notebook
needs.

jsonschema goes without where it is not installed. Building it takes a second or two, in each of pytest's
processes.
"""

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules.setdefault("rfc3987_syntax", None)  # importing it raises ImportError then
