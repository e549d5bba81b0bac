"""The wheel, installed outside the repository: with nothing else, and in an environment with the rest.

The second sees this environment's packages, but not its editable installation of the course.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from needs import need
from servers import running

from course_utils import fence
from course_utils.cli.main import COMMANDS
from course_utils.interactive.course_files import ROOT

need("hatchling", "pip")

NOT_SHIPPED = (
    "notebooks/src",
    "solutions/src",
    "docs/explorer/",
    "docs/skeletons",
    "__pycache__",
    ".edited-",
    "/_live",
)
EXERCISES = [
    anchor
    for path in (ROOT / "exercises").glob("*.ipynb")
    for anchor in re.findall(r"id=..exercise-\d+", path.read_text(encoding="utf-8"))
]
TRIED = {
    "start",
    "lab",
    "test",
    "doctor",
    "estimate",
    "compare",
    "fit",
    "watch",
    "oom",
    "progress",
    "find",
    "demos",
    "release",
    "grade",
    "nbgrader",
    "colab",
    "links",
    "record",
    "evidence",
    "lint",
    "build",
    "site",
    "new-lesson",
    "check-torch",
}


class Installed(NamedTuple):
    """A fresh environment with the wheel, and a folder that the course knows nothing of."""

    python: Path
    folder: Path

    def python_says(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
        """What this environment's Python prints; both streams if something else than 0 is expected."""
        done = subprocess.run(
            [str(self.python), *words],
            cwd=folder or self.folder,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr if code else done.stdout

    def course(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
        return self.python_says("-m", "course_utils", *words, folder=folder, code=code)

    def variables(self) -> dict[str, str]:
        """This process's environment without the course of the repository."""
        kept = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COURSE_SOURCE")
        }
        return kept | {"COURSE_HOME": str(self.folder / "home"), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it from the repository, with no network."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, out: Path) -> Path:
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=600)
    return next(out.glob("*.whl"))


def install(wheel: Path, folder: Path, packages: str = "") -> Installed:
    venv.create(folder / "environment", with_pip=False, symlinks=os.name != "nt")
    python = folder / "environment" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    # a clone there is no reason
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=600, env=alone)  # for pip to install nothing
    if packages:
        (next((folder / "environment").glob("[lL]ib*/**/site-packages")) / "others.pth").write_text(packages)
    (folder / "elsewhere").mkdir()
    return Installed(python, folder / "elsewhere")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("full"), sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def started(full: Installed) -> Path:
    """A started course, in a folder whose name has a space and a letter that is not ASCII."""
    folder = full.folder / "my cöurse"
    assert "where-did-the-memory-go lab" in full.course("start", str(folder))
    return folder


def test_the_wheel_holds_the_course_and_not_its_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("notebooks", "exercises", "solutions"):
        expected = {f"course_utils/course/{folder}/{path.name}" for path in (ROOT / folder).glob("*.ipynb")}
        assert expected == {
            name for name in names if name.startswith(f"course_utils/course/{folder}/") and "ipynb" in name
        }
    assert not [name for name in names if any(part in name for part in NOT_SHIPPED)]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "course_utils",
        "where_did_the_memory_go",
    }


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build_wheel(next(path for path in tmp_path.iterdir() if path.is_dir()), tmp_path)
    one = zipfile.ZipFile(wheel)
    other = zipfile.ZipFile(again)
    assert {file.filename: file.CRC for file in one.infolist()} == {
        file.filename: file.CRC for file in other.infolist()
    }


# With the wheel and nothing else


def test_alone_it_estimates_fits_searches_and_reports(bare: Installed) -> None:
    assert "optimizer states" in bare.course("estimate", "gpt2")
    assert "fits: TrainingRun(" in bare.course("fit", "gpt2", "--gpu", "T4-16GB", "--global-batch", "8")
    assert "docs/glossary.md" in bare.course("find", "reserved", "memory")
    assert "lesson 06: Recomputation" in bare.course(
        "oom", "CUDA out of memory. Tried to allocate 20.00 MiB."
    )
    assert re.search(rf"^0 of {len(EXERCISES)} exercises passed", bare.course("progress"), re.MULTILINE)
    assert 'pip install "where-did-the-memory-go[lab]"' in bare.course("doctor")
    assert "recorded" in bare.course("doctor") and not [*bare.folder.iterdir()], "nothing is written"


@pytest.mark.parametrize(("command", "extra"), [("lab", "lab"), ("test", "test"), ("compare gpt2", "torch")])
def test_alone_it_says_what_else_to_install(bare: Installed, command: str, extra: str) -> None:
    """With uv's pip: the fixture's environment has none of its own, as those that uv makes."""
    said = bare.course(*command.split(), code=1)
    assert f'`uv pip install "where-did-the-memory-go[{extra}]"`.' in said and len(said.splitlines()) == 1
    assert not (bare.folder / ".venv").exists()


# With all that the extras bring


def test_every_command_is_tried_here() -> None:
    assert set(COMMANDS) == TRIED


def test_the_course_that_runs_is_the_wheels(full: Installed) -> None:
    where = full.python_says("-c", "import course_utils, torch; print(course_utils.__file__)")
    assert Path(where.strip()).is_relative_to(full.python.parents[1]), "not the one that is being tested here"


@pytest.mark.parametrize("command", ["lab", "test"])
def test_what_needs_a_folder_says_so_elsewhere(full: Installed, command: str) -> None:
    assert f"start FOLDER`, then run `{command}` in that folder.\n" in full.course(command, code=1)


@pytest.mark.parametrize(
    "command", ["lint", "build", "site", "new-lesson 15 mine", "check-torch 2.15.0", "test --lesson 02"]
)
def test_what_needs_the_repository_says_so(full: Installed, started: Path, command: str) -> None:
    said = full.course(*command.split(), folder=started, code=1)
    assert "needs a clone of the course's repository" in said and len(said.splitlines()) == 1


def test_a_course_starts_in_a_new_folder_and_never_over_another(
    full: Installed, started: Path, tmp_path: Path
) -> None:
    assert (started / "exercises" / "02_adam.ipynb").read_bytes() == (
        ROOT / "exercises/02_adam.ipynb"
    ).read_bytes()
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    assert "is not empty" in full.course("start", str(tmp_path), code=1)
    assert [*tmp_path.iterdir()] == [mine] and mine.read_text() == "mine"
    assert not {"pyproject.toml", "environment.yml", ".binder", "course_utils"} & {
        path.name for path in started.iterdir()
    }


def test_from_any_folder_of_a_started_course_its_own_files_are_read(full: Installed, started: Path) -> None:
    own = started / "notebooks" / "15_mine.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 15 · Mine\n\n## Zyxomma")]), own)
    assert "15_mine.ipynb" in full.course("find", "zyxomma", folder=started / "docs")
    own.unlink()


def test_commands_that_compute_work_there(full: Installed, started: Path) -> None:
    assert "every tensor at the peak" in full.course("compare", "gpt2", "--seq-len", "64", folder=started)
    assert "Every demo passed." in full.course("demos", "--check", folder=started)
    assert "Saved in" in full.course("evidence", "--table", "gpu-times", folder=started)
    assert (started / "build" / "evidence").is_dir(), "in the course's folder"
    assert "live: notebooks/02_adam.ipynb" in full.course("record", "--list", folder=started)
    script = started / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert "parameters" in full.course("watch", "train.py", folder=started)


def test_commands_of_teachers_work_there(full: Installed, started: Path, tmp_path: Path) -> None:
    assert "02_adam" in full.course("links", "--repository", "https://example.org/course.git", folder=started)
    assert "14 assignments" in full.course("nbgrader", str(tmp_path / "nbgrader"), folder=started)
    full.course("colab", str(tmp_path / "colab"), folder=started)
    names = set(zipfile.ZipFile(tmp_path / "colab" / "course.zip").namelist())
    assert {"course_utils/cli/start.py", "pyproject.toml", "exercises/02_adam.ipynb"} <= names
    assert not [name for name in names if "solutions" in name or "course_utils/course" in name]
    full.course("release", str(tmp_path / "release"), folder=started)
    released = sorted(
        path.relative_to(tmp_path / "release").as_posix() for path in (tmp_path / "release").rglob("*")
    )
    assert set(released) == {name.rstrip("/") for name in names} - {""}
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "18_who_is_right.ipynb").write_bytes(
        (started / "exercises/18_who_is_right.ipynb").read_bytes()
    )
    graded = "grade", str(tmp_path / "class"), "--out", str(tmp_path / "grades")
    options = () if fence.version() else ("--unfenced",)
    assert "0 of 3" in full.course(*graded, *options, folder=started)


@pytest.mark.skipif(not fence.version(), reason="there is no Landlock")
def test_a_graded_notebook_sees_no_solutions_of_the_folder_or_the_wheel(
    full: Installed, started: Path, tmp_path: Path
) -> None:
    package = full.python_says("-c", "import course_utils; print(course_utils.__path__[0])").strip()
    solutions = [root / "solutions" / "02_adam.ipynb" for root in (started, Path(package, "course"))]
    assert all(path.exists() for path in solutions)
    looks = """
raised = []
for path in PATHS:
    try: open(path)
    except OSError as error: raised.append(error.strerror)
raise NotSolved(raised)
""".replace("PATHS", str([*map(str, solutions)]))
    looking = json.loads((started / "exercises" / "18_who_is_right.ipynb").read_text(encoding="utf-8"))
    for cell in looking["cells"]:
        if "".join(cell["source"]).startswith("check.referee("):
            cell["source"] = f"def referee(*_):{looks.replace(chr(10), chr(10) + '    ')}"
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "looks.ipynb").write_text(json.dumps(looking), encoding="utf-8")
    full.course("grade", str(tmp_path / "class"), "--out", str(tmp_path / "grades"), folder=started)
    assert str(["Permission denied"] * 2) in (tmp_path / "grades" / "grades.csv").read_text(encoding="utf-8")


def test_a_notebook_is_tested_there_apart_from_the_learner(full: Installed, started: Path) -> None:
    """Its outputs are compared; no guess of the learner's is seen, and the torch version may differ."""
    code = (
        "from course_utils.interactive.guesses import stored_guesses; "
        "print(stored_guesses(), 'torch 2.13.0+cpu')"
    )
    right = new_output("stream", name="stdout", text="{} torch 2.11.0\n")
    cell = new_code_cell(code, id="one", execution_count=1, outputs=[right])
    nbformat.write(new_notebook(cells=[cell]), started / "notebooks" / "98_right.ipynb")
    cell.outputs = [new_output("stream", name="stdout", text="{'guess': 1}\n")]
    nbformat.write(new_notebook(cells=[cell]), started / "notebooks" / "99_wrong.ipynb")
    lock = (
        "from course_utils.interactive.guesses import lock_guess, stored_guesses; lock_guess('mine', 1, 'GB')"
    )
    assert "mine" in full.python_says("-c", f"{lock}; print(stored_guesses())")
    said = full.course(
        "test", "-n", "0", "notebooks/98_right.ipynb", "notebooks/99_wrong.ipynb", folder=started, code=1
    )
    assert "1 failed, 1 passed" in said and "99_wrong.ipynb::Cell 0" in said
    for name in ("98_right", "99_wrong"):
        (started / "notebooks" / f"{name}.ipynb").unlink()


def test_jupyterlab_opens_the_started_course(full: Installed, started: Path) -> None:
    command = [str(full.python), "-m", "course_utils", "lab"]
    with running(command, started, full.variables()) as server:
        address = f"{server.address}/api/contents/notebooks?content=1&token={server.token}"
        with urllib.request.urlopen(address, timeout=300) as answer:
            names = {item["name"] for item in json.load(answer)["content"]}
    assert names == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
