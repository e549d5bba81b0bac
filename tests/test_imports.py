"""Which part of the house may lean on which, read from the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "course_utils"

CLOSED_FORMS = {
    "units",
    "nearest",
    "breakdown",
    "explanation",
    "measurement",
    "measuring_errors",
    "models",
    "model_files",
    "gpus",
    "run",
    "estimating",
    "fitting",
    "allocator",
    "allocator_settings",
    "allocator_replay",
    "snapshots",
}
"""These answer without torch: they run before anything is installed, and in a browser."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name within it: "run", "estimating.peak", "estimating"."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """What a file imports, at its top and within functions, as absolute names."""
    names: set[str] = set()
    folder = ["course_utils", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names |= {source} if node.module else {f"{source}.{alias.name}" for alias in node.names}
    return names


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str) -> str:
    """ "run" for "course_utils.run", "" for what is not of the package."""
    return name.split(".")[1] if name.startswith("course_utils.") else ""


def those_of(*parts: str) -> dict[str, Path]:
    found = {name: path for name, path in modules().items() if top(name) in parts}
    assert {top(name) for name in found} == set(parts)
    return found


def test_imports_are_read_as_python_reads_them():
    assert "course_utils.run" in imports(PACKAGE / "estimating" / "peak.py")
    assert "course_utils.estimating.states" in imports(PACKAGE / "estimating" / "peak.py")
    assert "course_utils.measuring.live" in imports(PACKAGE / "measuring" / "__init__.py")  # within a function


@pytest.mark.parametrize(("name", "path"), those_of(*CLOSED_FORMS).items(), ids=str)
def test_closed_forms_need_the_standard_library_alone(name, path):
    for imported in imports(path):
        own = within(imported)
        assert own in CLOSED_FORMS if own else top(imported) in sys.stdlib_module_names, f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("name", "path"), those_of("measuring", "networks", "distributed", "ranks", "rank_functions").items(), ids=str
)
def test_measuring_runs_on_a_machine_with_torch_alone(name, path):
    ours = {"measuring", "networks", "distributed", "ranks", "rank_functions", "live_meter", "notebook_files"}
    allowed = CLOSED_FORMS | ours
    for imported in imports(path):
        own = within(imported)
        assert own in allowed if own else top(imported) in {"torch", *sys.stdlib_module_names}, (
            f"{name} imports {imported}"
        )


def test_nothing_but_notebooks_and_their_makers_imports_the_widgets():
    users = {top(name) for name, path in modules().items() if "widgets" in {within(item) for item in imports(path)}}
    assert users <= {"widgets", "dashboard_widget", "authoring", "lessons"}


def test_only_measuring_lessons_and_authoring_know_how_things_are_measured():
    users = {top(name) for name, path in modules().items() if "measuring" in {within(i) for i in imports(path)}}
    assert not users & CLOSED_FORMS


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_estimating_never_loads_torch():
    code = (
        "import sys, course_utils as c; c.estimate(c.TrainingRun('gpt2-xl', micro_batch=32));"
        "print({'torch', 'numpy', 'matplotlib', 'ipywidgets', 'IPython'} & set(sys.modules))"
    )
    assert python(code).strip() == "set()"


def test_the_explorers_core_loads_nothing_but_the_standard_library():
    """So that a page can run it in a browser."""
    code = (
        "import sys; before = set(sys.modules); from course_utils.interactive.explorer import *;"
        "dashboard({}); next_changes({}); best_plan({});"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    assert python(code).strip() == "{'course_utils'}"


def test_measuring_loads_no_notebook_libraries():
    code = (
        "import sys, course_utils as c; c.measure(c.TrainingRun('tiny-gpt', seq_len=16), 'simulated', 1);"
        "print({'matplotlib', 'ipywidgets', 'IPython'} & set(sys.modules))"
    )
    assert python(code).strip() == "set()"


def test_what_the_package_offers_is_there():
    code = "import course_utils as c; print([n for n in c.__all__ if getattr(c, n) is None], dir(c) == c.__all__)"
    assert python(code).strip() == "[] True"


def test_what_is_worked_with_in_notebooks_is_offered():
    offered = ("memory_map", "memory_map_page", "read_snapshot", "save_snapshot", "compare_with_gpu")
    errors = ("StepError", "GpuOutOfMemory", "SimulationUnavailable")
    code = f"import course_utils as c; print([callable(getattr(c, name)) for name in {offered + errors}])"
    assert python(code).strip() == str([True] * 8)


def test_no_module_hides_what_the_package_offers():
    import course_utils

    files = {top(name) for name in modules()}
    assert not files & set(course_utils.__all__), "once the module is imported, its name would stand for the module"


def test_an_unknown_name_lists_what_there_is():
    code = "import course_utils\ntry: course_utils.estimat\nexcept AttributeError as error: print(error)"
    said = python(code)
    assert "has no 'estimat'" in said and "estimate" in said
