"""The order of the package's folders and their lines, read from the source.

`python tests/house.py` prints the imports by folder, from the top floor down, and the lines of each folder.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "course_utils"

FLOORS = (
    "cli",
    "authoring",
    "teaching",
    "evidence",
    "lessons",
    "interactive",
    "figures",
    "watching",
    "measuring",
    "allocator",
    "planning",
    "estimating",
    "networks",
    "ranks",
)
"""The folders, from the top down: each imports from those below it alone."""

NOUNS = (
    "run",
    "models",
    "model_files",
    "gpus",
    "breakdown",
    "measurement",
    "units",
    "palette",
    "terminal",
    "errors",
    "pace",
    "fence",
)
"""The modules below all folders."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name within it: "run", "estimating.formula", "estimating", ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Modules that a module imports, at its top and within functions: ours as in `modules`, others by their
    full name.

    A name that the package itself offers counts as the module that defines it.
    """
    path = modules()[name]
    found = set()
    folder = ["course_utils", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {_defining(source, alias.name) for alias in node.names}
    return frozenset(name.removeprefix("course_utils.") for name in found)


def _defining(source: str, name: str) -> str:
    """The module that `from source import name` leads to, by its full name."""
    if source == "course_utils" and name in _offered():
        return f"course_utils.{_offered()[name]}"
    inner = f"{source}.{name}".removeprefix("course_utils.")
    return f"course_utils.{inner}" if source.startswith("course_utils") and inner in modules() else source


@cache
def _offered() -> dict[str, str]:
    tree = ast.parse(modules()[""].read_text(encoding="utf-8"))
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
    }
    offered: dict[str, str] = ast.literal_eval(assigned["_OFFERED"])
    return {name: module for module, names in offered.items() for name in names.split()}


def ours(name: str) -> set[str]:
    """The modules of the package that a module imports."""
    return {other for other in imports(name) if other in modules() and other != "course_utils"} - {name}


def place(name: str) -> str:
    """A module's folder, or its own name for one that lies in none."""
    return name.partition(".")[0]


def floor(name: str) -> int:
    """0 is the top floor."""
    return FLOORS.index(place(name)) if place(name) in FLOORS else len(FLOORS)


def circles() -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for name in modules():
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = ours(waiting.pop()) - seen
            seen |= new
            waiting += new
        reached[name] = seen
    groups = {
        frozenset({other for other in reached[n] if n in reached[other]})
        for n in modules()
        if n in reached[n]
    }
    return sorted(sorted(group) for group in groups)


def lines() -> Counter[str]:
    """Lines by folder, the nouns by their own names."""
    counted: Counter[str] = Counter()
    for name, path in modules().items():
        counted[place(name) or "__init__"] += len(path.read_text(encoding="utf-8").splitlines())
    return counted


def arrows() -> dict[str, set[str]]:
    """Which folders and nouns each folder and noun imports from."""
    found: dict[str, set[str]] = {}
    for name in modules():
        found.setdefault(place(name), set()).update(map(place, ours(name)))
    return {name: others - {name} for name, others in found.items()}


def main() -> None:
    """Print the house from the top floor down."""
    counted = lines()
    leading = arrows()
    for name in ("__main__", *FLOORS, *NOUNS):
        order = sorted(leading[name], key=(*FLOORS, *NOUNS, "").index)
        print(f"{name:12} {counted[name]:6,} lines -> {', '.join(filter(None, order))}")
    print(
        f"{'together':12} {sum(counted.values()):6,} lines in {len(modules())} modules; circles:"
        f" {circles() or 'none'}"
    )


if __name__ == "__main__":
    main()
