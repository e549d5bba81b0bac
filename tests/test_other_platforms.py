"""Do the copies for nbgrader and Colab hold what these ask for, and do other platforms' settings fit?"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest
from needs import need

from course_utils.cli.main import COMMANDS, main
from course_utils.interactive.course_files import ROOT, numbered
from course_utils.teaching import other_platforms
from course_utils.teaching.check_cells import check_cells

FIRST = "notebooks/00_start_here.ipynb"
REPOSITORY = "https://example.org/you/course.git"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def nbgrader_marks(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["metadata"].get("nbgrader", {}).get(kind)]


def test_nbgrader_gets_every_exercise_with_its_marks_and_no_explanations(tmp_path):
    written = other_platforms.nbgrader_source(tmp_path / "course")
    exercises = sorted((ROOT / "exercises").glob("*.ipynb"))
    assert [path.name for path in written] == [path.name for path in exercises]
    for path in written:
        notebook = read(path)
        assert nbformat.validator.isvalid(nbformat.from_dict(notebook), version=4)
        marked = [
            cell["metadata"]["nbgrader"] for cell in notebook["cells"] if "nbgrader" in cell["metadata"]
        ]
        assert len({mark["grade_id"] for mark in marked}) == len(marked)
        checks = [cell["id"] for cell in nbgrader_marks(notebook, "grade")]
        assert checks == list(check_cells(read(ROOT / "exercises" / path.name)))
        solutions = [cell["id"] for cell in nbgrader_marks(notebook, "solution")]
        marked = [cell for cell in notebook["cells"] if "### BEGIN SOLUTION" in cell["source"]]
        assert solutions == [cell["id"] for cell in marked]
        exercise = {cell["id"] for cell in read(ROOT / "exercises" / path.name)["cells"]}
        assert {cell["id"] for cell in notebook["cells"]} == exercise
        assert not [cell for cell in notebook["cells"] if cell.get("outputs")]


def test_a_colab_copy_asks_for_a_gpu_and_fetches_the_course_first(tmp_path):
    copies = other_platforms.colab_copies(tmp_path / "copies", REPOSITORY, "taught")
    originals = [path for name in other_platforms.FOLDERS for path in numbered(ROOT / name)]
    assert [path.name for path in copies] == [path.name for path in originals]
    for path, original in zip(copies, originals, strict=True):
        notebook = read(path)
        assert notebook["metadata"]["accelerator"] == "GPU"
        assert nbformat.validator.isvalid(nbformat.from_dict(notebook), version=4)
        first, *others = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert f"--branch taught {REPOSITORY} {{COURSE}}" in first["source"] and "{{" not in first["source"]
        assert f'"{original.parent.name}"' in first["source"]
        assert others == [cell for cell in read(original)["cells"] if cell["cell_type"] == "code"]


def test_a_first_cell_unpacks_the_course_that_was_uploaded(tmp_path, monkeypatch):
    (copy, *_) = other_platforms.colab_copies(tmp_path / "copies", None)
    first = next(cell["source"] for cell in read(copy)["cells"] if cell["cell_type"] == "code")
    lines = [line for line in first.splitlines() if not line.lstrip().startswith("!")]
    assert len(first.splitlines()) - len(lines) == 1, "only pip is a command of the shell"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(AssertionError, match="Upload course"):
        exec("\n".join(lines), {})
    (tmp_path / "copies" / "course.zip").rename(tmp_path / "course.zip")
    exec("\n".join(lines), {})
    assert Path.cwd() == tmp_path / "course" / copy.parent.name and sys.path[0] == str(tmp_path / "course")
    assert not (tmp_path / "course" / "solutions").exists()
    assert (tmp_path / "course" / "pyproject.toml").exists()


@pytest.mark.skipif(shutil.which("git") is None or sys.platform == "win32", reason="Colab is Linux, with git")
def test_a_first_cell_fetches_the_course_from_its_repository_and_installs_it(tmp_path):
    """In IPython, as Colab executes it; what would be installed is written down instead."""
    (tmp_path / "there" / "notebooks").mkdir(parents=True)
    (tmp_path / "there" / "notebooks" / "data.txt").write_text("fetched")
    git = ["git", "-C", str(tmp_path / "there"), "-c", "user.name=you", "-c", "user.email=you@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"], ["branch", "-m", "taught"]):
        subprocess.run([*git, *words], check=True)
    address = f"file://{tmp_path / 'there'}"
    (copy, *_) = other_platforms.colab_copies(tmp_path / "copies", address, "taught")
    cell = next(cell["source"] for cell in read(copy)["cells"] if cell["cell_type"] == "code")
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >> pip.txt\n')
    (tmp_path / "pip").chmod(0o755)
    code = (
        "import os, sys; from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "shell = InteractiveShell.instance(config=Config({'HistoryManager': {'enabled': False}}))\n"
        f"sys.executable, there, cell = {str(tmp_path / 'pip')!r}, os.getcwd(), {cell!r}\n"
        "for _ in range(2):  # the second time nothing is fetched or installed\n"
        "    os.chdir(there); shell.run_cell(cell).raise_error()\n"
        "print(open('data.txt').read(), sys.path[0])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"fetched {tmp_path / 'course'}"
    assert (tmp_path / "pip.txt").read_text() == f"-m pip install --quiet {tmp_path / 'course'}[lab]\n"


@pytest.mark.parametrize("address", ["", "a; rm -rf b", "--upload-pack=x", "{x}"])
def test_an_address_that_a_shell_would_misread_is_refused(address, tmp_path):
    with pytest.raises(ValueError, match="is not a repository's address"):
        other_platforms.colab_copies(tmp_path / "copies", address)


@pytest.mark.parametrize("words", [["nbgrader"], ["colab", "--repository", REPOSITORY]])
def test_nothing_is_overwritten(words, tmp_path, capsys):
    command, *options = words
    assert main([command, str(tmp_path / "new"), *options]) == 0
    assert main([command, str(tmp_path / "new"), *options]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_binder_gets_the_torch_that_outputs_were_made_with():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    requirements = (ROOT / ".binder/requirements.txt").read_text(encoding="utf-8")
    locked = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    assert locked and f"torch=={locked[1]}+cpu\n" in requirements
    python = (ROOT / ".binder/runtime.txt").read_text(encoding="utf-8").strip().removeprefix("python-")
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "requires-python"
    ]
    assert tuple(map(int, python.split("."))) >= tuple(map(int, oldest.removeprefix(">=").split(".")))
    script = ROOT / ".binder/postBuild"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert sys.platform == "win32" or os.access(script, os.X_OK)


PULL = (
    "git-pull?repo=https%3A%2F%2Fexample.org%2Fyou%2Fcourse.git&branch=taught&urlpath=lab%2Ftree%2Fcourse%2F"
)


def hub_settings(name: str) -> Any:
    from traitlets.config.loader import PyFileConfigLoader

    return PyFileConfigLoader(name, path=str(ROOT / "docs")).load_config()


def test_the_hub_pulls_the_course_for_who_logs_in(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_REPOSITORY", raising=False)
    monkeypatch.setenv("COURSE_ENVIRONMENT", str(tmp_path))
    settings = hub_settings("jupyterhub_config.py")
    assert settings.Spawner.default_url == "/lab" and settings.Spawner.mem_limit.endswith("G")
    assert settings.Spawner.cmd == [str(tmp_path / "bin" / "jupyterhub-singleuser")]
    assert "authenticator_class" not in settings.JupyterHub, "accounts are the hub's own"
    monkeypatch.setenv("COURSE_REPOSITORY", REPOSITORY)
    monkeypatch.setenv("COURSE_BRANCH", "taught")
    pulls = f"/{PULL}{FIRST.replace('/', '%2F')}"
    assert hub_settings("jupyterhub_config.py").Spawner.default_url == pulls
    trying = hub_settings("jupyterhub_try.py")
    # one password for all: for this machine alone
    assert trying.JupyterHub.bind_url.startswith("http://127.0.0.1:")
    assert trying.Spawner.default_url == pulls


def test_links_have_the_forms_that_their_places_ask_for(capsys):
    assert other_platforms.link(FIRST, REPOSITORY, "taught", hub="https://hub.example.org/") == (
        f"https://hub.example.org/hub/user-redirect/{PULL}notebooks%2F00_start_here.ipynb"
    )
    assert other_platforms.link(FIRST, REPOSITORY, "a/b") == (
        "https://mybinder.org/v2/git/https%3A%2F%2Fexample.org%2Fyou%2Fcourse.git/a%2Fb"
        "?labpath=notebooks%2F00_start_here.ipynb"
    )
    colab_start = "https://colab.research.google.com/github/you/course/blob/main/notebooks/"
    options = ["--repository", REPOSITORY, "--branch", "taught", "--hub", "https://h.example.org"]
    assert main(["links", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(numbered(ROOT / "notebooks")) and all(PULL in x for x in lines)
    assert main(["links", "--repository", "https://github.com/you/course.git", "--colab"]) == 0
    assert capsys.readouterr().out.startswith(f"- [00_start_here]({colab_start}00_start_here.ipynb)\n")
    assert main(["links", "--repository", REPOSITORY, "--colab"]) == 1
    assert "from GitHub" in capsys.readouterr().err


def test_commands_of_the_page_are_there():
    text = (ROOT / "docs/classroom.md").read_text(encoding="utf-8")
    named = set(re.findall(r"course_utils (\w+)", text))
    assert {"release", "grade", "nbgrader", "colab", "links"} <= named
    assert set(re.findall(r"python3 -m course_utils (\w+)", text)) <= set(COMMANDS)
    paths = re.findall(r"`((?:docs|\.binder|notebooks)/[\w./]+)`", text)
    assert all((ROOT / path).exists() for path in paths)


def test_hooks_are_local_and_run_what_lint_runs():
    need("yaml")
    hooks = import_module("yaml").safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    entries = [hook["entry"] for hook in hooks["repos"][0]["hooks"]]
    assert "python3 -m course_utils lint" in entries and "python3 -m course_utils build --check" in entries
