"""The wheel, installed outside the repository: with nothing else, and in an environment with the rest.

The second sees this environment's packages, but not its editable installation of the course.
"""

import json
import os
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

from course_utils.interactive.course_files import ROOT

need("hatchling", "pip")

NOT_SHIPPED = (
    "notebooks/src",
    "solutions/src",
    "docs/explorer/",
    "docs/skeletons",
    "__pycache__",
    ".edited-",
)


class Installed(NamedTuple):
    """A fresh environment with the wheel, and a folder that the course knows nothing of."""

    python: Path
    folder: Path

    def course(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
        """What a command prints; both streams if another exit code than 0 is expected."""
        return self.python_says("-m", "course_utils", *words, folder=folder, code=code)

    def python_says(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
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

    def packages(self) -> Path:
        return next((self.python.parents[1]).glob("[lL]ib*/**/site-packages"))

    def variables(self) -> dict[str, str]:
        """This process's environment without the course of the repository; its lines are long."""
        kept = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COURSE_SOURCE")
        }
        return kept | {"COURSE_HOME": str(self.folder / "home"), "COLUMNS": "1000"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it from the repository, with no network."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, out: Path) -> Path:
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=600)
    return next(out.glob("*.whl"))


def environment(folder: Path, *packages: Path) -> Installed:
    """A fresh environment that finds what lies in these folders too."""
    venv.create(folder / "environment", with_pip=False, symlinks=os.name != "nt")
    python = folder / "environment" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (folder / "elsewhere").mkdir()
    found = Installed(python, folder / "elsewhere")
    (found.packages() / "others.pth").write_text("\n".join(map(str, packages)))
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return the environment where pip has installed the wheel, and nothing else."""
    made = environment(tmp_path_factory.mktemp("bare"))
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", str(made.python), "install", *options, str(wheel)]
    # a clone on PYTHONPATH is no reason for pip to install nothing
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=600, env=alone)
    return made


@pytest.fixture(scope="module")
def full(bare: Installed, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """That finds the installed wheel, and this environment's packages."""
    others = Path(sysconfig.get_path("purelib"))
    return environment(tmp_path_factory.mktemp("full"), bare.packages(), others)


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
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"course_utils", "where_did_the_memory_go"}


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build_wheel(next(path for path in tmp_path.iterdir() if path.is_dir()), tmp_path)
    one, other = (
        {file.filename: file.CRC for file in zipfile.ZipFile(path).infolist()} for path in (wheel, again)
    )
    assert one == other


def test_alone_it_estimates_fits_searches_and_says_what_else_to_install(bare: Installed) -> None:
    assert "optimizer states" in bare.course("estimate", "gpt2")
    said = bare.course("fit", "gpt2", "--gpu", "T4-16GB", "--global-batch", "8")
    assert "fits: TrainingRun(" in said and "Estimate only, no verdict: that needs torch." in said
    assert "docs/glossary.md" in bare.course("find", "reserved", "memory")
    message = "CUDA out of memory. Tried to allocate 20.00 MiB."
    assert "lesson 06: Recomputation" in bare.course("oom", message)
    assert "exercises passed" in bare.course("progress")
    assert 'pip install "where-did-the-memory-go[lab]"' in bare.course("doctor")
    for command, extra in {"lab": "lab", "test": "test", "compare gpt2": "torch"}.items():
        said = bare.course(*command.split(), code=1)  # with uv's pip: this environment has none of its own
        assert f'`uv pip install "where-did-the-memory-go[{extra}]"`.' in said and said.count("\n") == 1
    assert not [*bare.folder.iterdir()], "nothing is written"


def test_what_needs_a_folder_or_the_repository_says_so(
    bare: Installed, full: Installed, started: Path
) -> None:
    where = full.python_says("-c", "import course_utils, torch; print(course_utils.__file__)")
    assert Path(where.strip()).is_relative_to(bare.packages()), "not the one that is being tested here"
    assert "start FOLDER`, then run `lab` in that folder.\n" in full.course("lab", code=1)
    for command in ("lint", "check-torch 2.15.0", "test --rest"):
        said = full.course(*command.split(), folder=started, code=1)
        assert "needs a clone of the course's repository" in said and said.count("\n") == 1


def test_from_any_folder_of_a_started_course_its_own_files_are_read(full: Installed, started: Path) -> None:
    own = started / "notebooks" / "15_mine.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 15 · Mine\n\n## Zyxomma")]), own)
    assert "15_mine.ipynb" in full.course("find", "zyxomma", folder=started / "docs")
    own.unlink()


def test_commands_that_compute_work_there(full: Installed, started: Path) -> None:
    said = full.course("compare", "tiny-gpt", "--seq-len", "64", folder=started)
    assert "tensors to blocks of 512 bytes" in said
    assert "Saved in" in full.course("evidence", "--table", "gpu-times", folder=started)
    assert (started / "build" / "evidence").is_dir(), "in the course's folder"
    assert "live: notebooks/02_adam.ipynb" in full.course("record", "--list", folder=started)


def test_commands_of_teachers_work_there(full: Installed, started: Path, tmp_path: Path) -> None:
    assert "assignments" in full.course("nbgrader", str(tmp_path / "nbgrader"), folder=started)
    full.course("colab", str(tmp_path / "colab"), folder=started)
    names = set(zipfile.ZipFile(tmp_path / "colab" / "course.zip").namelist())
    assert {"course_utils/cli/start.py", "pyproject.toml", "exercises/02_adam.ipynb"} <= names
    assert not [name for name in names if "solutions" in name or "course_utils/course" in name]


def test_a_notebook_is_tested_there_apart_from_the_learner(full: Installed, started: Path) -> None:
    """Its outputs are compared; no guess of the learner's is seen, and the torch version may differ."""
    code = (
        "from course_utils.interactive.guesses import stored_guesses; "
        "print(stored_guesses(), 'torch 2.13.0+cpu')"
    )
    cells = []
    for name, stored in (("right", "{} torch 2.11.0\n"), ("wrong", "{'guess': 1}\n")):
        output = new_output("stream", name="stdout", text=stored)
        cells.append(new_code_cell(code, id=name, execution_count=1, outputs=[output]))
    notebook = started / "notebooks" / "99_mine.ipynb"
    nbformat.write(new_notebook(cells=cells), notebook)
    lock = (
        "from course_utils.interactive.guesses import lock_guess, stored_guesses; lock_guess('mine', 1, 'GB')"
    )
    assert "mine" in full.python_says("-c", f"{lock}; print(stored_guesses())")
    said = full.course("test", "-n", "0", "notebooks/99_mine.ipynb", folder=started, code=1)
    assert "1 failed, 1 passed" in said and "99_mine.ipynb::Cell 1" in said
    assert "CPU seconds of notebooks: " in said
    notebook.unlink()


def test_jupyterlab_opens_the_first_lesson_of_the_started_course_without_news(
    full: Installed, started: Path
) -> None:
    command = [str(full.python), "-m", "course_utils", "lab"]
    with running(command, started, full.variables()) as server:

        def answer(path: str) -> urllib.request.addinfourl:
            mark = "&" if "?" in path else "?"
            return urllib.request.urlopen(f"{server.address}/{path}{mark}token={server.token}", timeout=300)

        with answer("") as page:
            assert page.url.split("?")[0].endswith("/lab/tree/notebooks/00_start_here.ipynb")
        with answer("api/contents/notebooks?content=1") as listing:
            names = {item["name"] for item in json.load(listing)["content"]}
        with answer("lab/api/settings/@jupyterlab/apputils-extension:notification") as settings:
            properties = json.load(settings)["schema"]["properties"]
    assert names == {"train", *(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))}
    assert properties["fetchNews"]["default"] == "false"
    assert properties["checkForUpdates"]["default"] is False
