"""The explorer's page: a folder that any static host can serve, with the course's own formulas in it and Python to run
them. It needs no other network, and no Sphinx.
"""

import ast
import io
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from ..interactive.course_files import ROOT
from ..recording.notebooks import BuildError

Imports = Callable[[str, Path], list[tuple[str, bool]]]
"""`imports` within one package; each module is read once."""

PAGE = Path("docs", "explorer")
ENTRY = "course_utils.interactive.explorer_page"
ARCHIVE = "course_utils.zip"
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive: the same sources make the same bytes."""


def make(out: Path, root: Path = ROOT) -> Path:
    """Put the page, its runtime and an archive of the modules that it needs into `out`; returns `out`.

    Raises BuildError if one of those modules needs more than the standard library.
    """
    content = archive(root)
    shutil.copytree(root / PAGE, out, dirs_exist_ok=True)
    (out / ARCHIVE).write_bytes(content)
    return out


def archive(root: Path = ROOT) -> bytes:
    """A zip of the modules that the page's entry leads to, the same bytes for the same sources.

    They are stored, not packed: packing differs between machines, and servers pack what they send.
    """
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_STORED) as target:
        for path in sorted(needed(root).values()):
            name = zipfile.ZipInfo(path.relative_to(root).as_posix(), LONG_AGO)
            name.create_system = 3  # or Windows writes another byte
            target.writestr(name, path.read_bytes())
    return kept.getvalue()


def needed(root: Path = ROOT, entry: str = ENTRY) -> dict[str, Path]:
    """The modules that `entry` leads to by its imports, those within functions too: name to file.

    Raises BuildError if `entry` cannot be imported without what is neither the course's nor of the standard library,
    torch above all. What only a function imports, and what has such a need, stays outside: the page never gets there.
    """
    read = cache(partial(imports, offered=_offered(root)))
    found, lacking = _imported_with(root, entry, read)
    if lacking:
        raise BuildError(f"the explorer's page cannot have {entry}: {lacking[0]}")
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        for imported, _ in read(name, found[name]):
            if _top(imported) == "course_utils" and imported not in found:
                more, lacking = _imported_with(root, imported, read)
                if not lacking:
                    waiting += [one for one in more if one not in found]
                    found |= more
    return found


def _imported_with(root: Path, name: str, read: Imports) -> tuple[dict[str, Path], list[str]]:
    """The modules that importing `name` imports, itself among them, and what they need that a browser lacks."""
    found: dict[str, Path] = {}
    lacking: list[str] = []
    waiting = [*_packages(name), name]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found[one] = _file(root, one)
        for imported, at_once in read(one, found[one]):
            if at_once and _top(imported) == "course_utils":
                waiting += [*_packages(imported), imported]
            elif at_once and _top(imported) not in sys.stdlib_module_names:
                lacking.append(f"{one} imports {imported}")
    return found, lacking


def imports(name: str, path: Path, offered: dict[str, str]) -> list[tuple[str, bool]]:
    """The modules that a module imports, by full name, and whether with the module itself or within a function.

    `offered` says where the names that the package itself offers are defined.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[tuple[str, bool]] = []
    for node, at_once in _run_at_run_time(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(package, node)
            found += [(_home(base, alias.name, path, offered), at_once) for alias in node.names]
    return found


def _run_at_run_time(tree: ast.AST) -> list[tuple[ast.AST, bool]]:
    """Every node but those under `if TYPE_CHECKING:`, and whether it is outside all functions."""
    nodes: list[tuple[ast.AST, bool]] = [(tree, True)]
    for node, at_once in nodes:
        inner: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            inner = list(node.orelse)
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        nodes += [(one, at_once and not function) for one in inner]
    return nodes


def _absolute(package: str, node: ast.ImportFrom) -> str:
    """What follows `from`, without leading dots."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _home(base: str, name: str, importer: Path, offered: dict[str, str]) -> str:
    """The module that `from base import name` leads to: a module of that name, or the one that holds it."""
    if base == "course_utils" and name in offered:
        return f"course_utils.{offered[name]}"
    root = next(folder for folder in importer.parents if folder.name == "course_utils").parent
    inner = root.joinpath(*base.split("."), name)
    return f"{base}.{name}" if inner.with_suffix(".py").exists() or inner.is_dir() else base


def _offered(root: Path) -> dict[str, str]:
    """The names that the package fetches when they are first asked for, and their modules."""
    tree = ast.parse((root / "course_utils" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return ast.literal_eval(node.value)
    raise BuildError("course_utils/__init__.py has no _HOME any more: explorer_page reads it")


def _top(name: str) -> str:
    return name.partition(".")[0]


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _file(root: Path, name: str) -> Path:
    path = root.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    raise BuildError(f"the explorer's page needs {name}, which is not there")
