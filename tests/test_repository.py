"""The repository itself: its address, licenses, citation, files for GitHub, README's table, sizes."""

import hashlib
import json
import re
import subprocess
import tomllib
from importlib import import_module
from typing import Any

import pytest
from needs import need

from course_utils.authoring.address import FILES, lines_of_readme, pages_of, set_address
from course_utils.authoring.build import committed_notebooks
from course_utils.authoring.pages import readme
from course_utils.cli.main import COMMANDS
from course_utils.interactive.course_files import ROOT, numbered

need("yaml")
yaml = import_module("yaml")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
WHOLE, NOTEBOOK, CELL = 11_000_000, 400_000, 150_000
"""The most bytes: what a clone fetches, and what a browser has to show."""

CC_BY_4 = "f5b745ef98087f531e719ee8ca6a96809444573ecc7173c6fa68eaad39b3cc3f"
"""The checksum of the license's legal text as Creative Commons publishes it, in UTF-8."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_address_follows_from_the_repositorys_and_the_citation_is_of_this_version() -> None:
    owner, name = ADDRESS.removeprefix("https://github.com/").split("/")
    pages = f"https://{owner}.github.io/{name}/"
    changes = f"{ADDRESS}/blob/main/CHANGELOG.md"
    expected = {
        "Homepage": pages,
        "Documentation": pages,
        "Issues": f"{ADDRESS}/issues",
        "Changelog": changes,
    }
    assert PROJECT["urls"] == expected | {"Repository": ADDRESS}
    citation = yaml.safe_load(read("CITATION.cff"))
    assert (citation["repository-code"], citation["url"]) == (ADDRESS, pages)
    assert citation["version"] == PROJECT["version"]
    assert PROJECT["license"] == " AND ".join(citation["license"])
    assert hashlib.sha256((ROOT / "LICENSE-CC-BY-4.0.txt").read_bytes()).hexdigest() == CC_BY_4
    (contact,) = yaml.safe_load(read(".github/ISSUE_TEMPLATE/config.yml"))["contact_links"]
    assert (ROOT / contact["url"].removeprefix(f"{ADDRESS}/blob/main/")).exists()


# GitHub's files


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load(read(f".github/workflows/{name}"))


def test_workflows_may_only_read_unless_a_job_publishes_and_run_commands_that_there_are() -> None:
    writing = {}
    for name in ("tests.yml", "site.yml"):
        assert workflow(name)["permissions"] == {"contents": "read"}
        jobs = workflow(name)["jobs"]
        writing |= {job: jobs[job]["permissions"] for job in jobs if "permissions" in jobs[job]}
        said = re.findall(r"-m course_utils ([a-z-]+)", read(f".github/workflows/{name}"))
        assert said and set(said) <= set(COMMANDS)
    assert writing == {"deploy": {"pages": "write", "id-token": "write"}, "colab": {"contents": "write"}}


# README's table of lessons


def test_the_table_of_lessons_is_what_build_makes() -> None:
    text = read("README.md")
    assert readme(ROOT) == text
    assert len(re.findall(r"^\| \[", text, re.MULTILINE)) == len(numbered(ROOT / "notebooks"))
    assert len(text.replace("|", " ").split()) <= 900 and lines_of_readme(ADDRESS) in text


def test_one_command_writes_another_address_everywhere(tmp_path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(read(name), encoding="utf-8")
    for wrong in ("github.com/me/course", "https://github.com/me", "https://github.com/me/course.git", ""):
        with pytest.raises(ValueError, match="OWNER/NAME"):
            set_address(tmp_path, wrong)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == read("README.md")
    new = "https://github.com/me/my.course-1"
    assert len(set_address(tmp_path, new)) == len(FILES) and set_address(tmp_path, new) == []
    texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in FILES}
    assert not any(ADDRESS in text or pages_of(ADDRESS) in text for text in texts.values())
    assert (
        tomllib.loads(texts["pyproject.toml"])["project"]["urls"]["Homepage"]
        == "https://me.github.io/my.course-1/"
    )
    assert (
        texts["README.md"].count("](docs/images/colab.svg)") == 1
        and f"git clone {new} " in texts["README.md"]
    )
    set_address(tmp_path, ADDRESS)
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in FILES} == {
        name: read(name) for name in FILES
    }


# Sizes


def test_no_notebook_and_no_cell_is_too_large() -> None:
    for path in committed_notebooks(ROOT):
        assert path.stat().st_size <= NOTEBOOK, path.name
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            size = len(json.dumps(cell.get("outputs", []), indent=1, ensure_ascii=False).encode())
            assert size <= CELL, cell["id"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git repository")
def test_the_repository_is_small_and_holds_nothing_that_a_build_fetches() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]
    assert sum(path.stat().st_size for path in files) < WHOLE
    assert [path.name for path in files if path.suffix in (".wasm", ".whl", ".tgz", ".zip", ".mjs")] == []
