"""The repository itself: its address, licenses, citation, files for GitHub, and README's table of lessons."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from course_utils.authoring.pages import README, TABLE, check_pages, readme
from course_utils.cli.main import COMMANDS
from course_utils.cli.maintain import WORKFLOWS
from course_utils.interactive.course_files import ROOT, number_of, numbered
from course_utils.teaching.other_platforms import COLAB_BRANCH

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
ADDRESS = PROJECT["urls"]["Repository"]

CC_BY_4 = "f5b745ef98087f531e719ee8ca6a96809444573ecc7173c6fa68eaad39b3cc3f"
"""The checksum of the license's legal text as Creative Commons publishes it, in UTF-8."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The address and the licenses


def test_every_address_follows_from_the_repositorys() -> None:
    found = re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+)", ADDRESS)
    assert found
    pages = f"https://{found[1]}.github.io/{found[2]}/"
    assert PROJECT["urls"] == {
        "Repository": ADDRESS,
        "Homepage": pages,
        "Documentation": pages,
        "Issues": f"{ADDRESS}/issues",
        "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
    }
    assert (CITATION["repository-code"], CITATION["url"]) == (ADDRESS, pages)
    (contact,) = yaml.safe_load(read(".github/ISSUE_TEMPLATE/config.yml"))["contact_links"]
    assert contact["url"].startswith(f"{ADDRESS}/blob/main/")
    assert (ROOT / contact["url"].removeprefix(f"{ADDRESS}/blob/main/")).exists()


def test_the_citation_names_the_version_the_title_and_the_authors_of_the_project() -> None:
    assert CITATION["version"] == PROJECT["version"] and str(CITATION["date-released"]) >= "2026-11-26"
    assert f"{CITATION['title']}." == PROJECT["description"]
    assert [author["name"] for author in CITATION["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert CITATION["keywords"] == PROJECT["keywords"]


def test_code_and_text_have_their_licenses_and_both_texts_are_whole() -> None:
    assert PROJECT["license"] == "Apache-2.0 AND CC-BY-4.0" == " AND ".join(CITATION["license"])
    assert PROJECT["license-files"] == ["LICENSE", "LICENSE-CC-BY-4.0.txt"]
    assert hashlib.sha256((ROOT / "LICENSE-CC-BY-4.0.txt").read_bytes()).hexdigest() == CC_BY_4
    assert "Apache License" in read("LICENSE")[:200]


def test_the_classifiers_name_every_python_from_the_oldest_that_is_tested_on() -> None:
    oldest = int(PROJECT["requires-python"].removeprefix(">=3."))
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    assert named == [f"3.{minor}" for minor in range(oldest, oldest + len(named))]
    assert named == workflow("tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]


# GitHub's files


SCHEMAS = {
    "github-workflows": list(WORKFLOWS),
    "github-issue-forms": [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("recording", "stuck", "wrong")],
    "github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": ["CITATION.cff"],
}


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        f"--builtin-schema=vendor.{schema}",
        *map(str, files),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_github_follow_its_schemas_and_another_field_would_be_noticed(
    schema: str, tmp_path: Path
) -> None:
    files = [ROOT / name for name in SCHEMAS[schema]]
    done = check(schema, *files)
    assert done.returncode == 0, done.stdout
    spoilt = tmp_path / "spoilt.yml"
    spoilt.write_text(files[0].read_text(encoding="utf-8") + "\nsurprise: 1\n", encoding="utf-8")
    assert check(schema, spoilt).returncode == 1


def test_no_file_of_github_is_left_unchecked() -> None:
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*") if path.is_file()}
    assert there == {name for files in SCHEMAS.values() for name in files} - {"CITATION.cff"}


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load(read(f".github/workflows/{name}"))


def commands(name: str) -> list[str]:
    """Every line that a workflow's jobs run."""
    jobs = workflow(name)["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    matrix = (
        workflow(name)["jobs"]
        .get("test", {})
        .get("strategy", {})
        .get("matrix", {"command": [], "include": []})
    )
    runs += [*matrix["command"], *(one["command"] for one in matrix["include"])]
    return [line for run in runs for line in run.replace("\\\n", "").splitlines()]


def test_workflows_run_what_everybody_runs() -> None:
    lines = commands("tests.yml")
    assert ".ci/run" in lines and "python -m course_utils test" in lines, (
        "Linux through .ci/run, macOS in full"
    )
    assert "python -m course_utils lint" in lines and "python -m course_utils build --check" in lines
    said = re.findall(
        r"(?:-m course_utils|where-did-the-memory-go) ([a-z]+)", "\n".join(lines + commands("site.yml"))
    )
    assert set(said) - {"start", "python"} <= set(COMMANDS)
    matrix = workflow("tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert {one["os"] for one in matrix["include"]} == {"macos-latest", "windows-latest"}
    assert any(line.endswith("--full tests/test_recordings.py") for line in lines), "the recorded lessons"
    assert "conda env create -f environment.yml" in lines


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_what_workflows_run_is_read_by_bash() -> None:
    for name in ("tests.yml", "site.yml"):
        for job in workflow(name)["jobs"].values():
            for step in job["steps"]:
                text = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", ""))
                assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, (
                    text
                )


def test_workflows_may_only_read_unless_a_job_publishes_and_none_runs_for_ever() -> None:
    for name in ("tests.yml", "site.yml"):
        content = workflow(name)
        assert content["permissions"] == {"contents": "read"} and "concurrency" in content
        for job in content["jobs"].values():
            assert 0 < job["timeout-minutes"] <= 90
            assert all(
                re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step
            )
    writing = {
        name: job["permissions"] for name, job in workflow("site.yml")["jobs"].items() if "permissions" in job
    }
    assert writing == {"deploy": {"pages": "write", "id-token": "write"}, "colab": {"contents": "write"}}
    assert not any("permissions" in job for job in workflow("tests.yml")["jobs"].values())


def test_a_workflow_that_never_ran_says_so() -> None:
    for name in ("tests.yml", "site.yml"):
        assert read(f".github/workflows/{name}").startswith("# Never executed so far: "), (
            "or change CONTRIBUTING too"
        )
        assert f"`{name}`" in read("CONTRIBUTING.md")
    assert "have never been executed" in " ".join(read("CONTRIBUTING.md").split())


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_branch_that_colab_opens_gets_the_copies_alone_each_time(tmp_path: Path) -> None:
    """The last step of the workflow's job, with a bare repository in place of GitHub's."""
    publish = workflow("site.yml")["jobs"]["colab"]["steps"][-1]["run"]
    assert f"git push --force origin {COLAB_BRANCH}" in publish
    (tmp_path / "copies").mkdir()
    variables = {**os.environ, "RUNNER_TEMP": str(tmp_path), "GITHUB_ACTOR": "you", "GITHUB_SHA": "abc"}

    def bash(script: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    bash(
        "git init -q --bare origin.git && git clone -q origin.git first && cd first && git switch -qc main\n"
        "echo 1 > file && git add file && git -c user.name=you -c user.email=you@example.org commit -qm 1\n"
        "git push -q origin main"
    )
    for name in ("00", "01"):
        (tmp_path / "copies" / f"{name}.ipynb").write_text("{}")
        bash(f"git clone -q -b main --depth 1 file://{tmp_path}/origin.git {name} && cd {name}\n{publish}")
    assert bash(f"cd origin.git && git ls-tree -r --name-only {COLAB_BRANCH}").split() == [
        "00.ipynb",
        "01.ipynb",
    ]
    assert bash(f"cd origin.git && git rev-list --count {COLAB_BRANCH}").strip() == "1"
    assert bash("cd origin.git && git ls-tree --name-only main").split() == ["file"]


# README's table of lessons


def test_the_table_has_a_row_and_two_links_for_each_lesson_and_is_what_build_makes() -> None:
    text = read("README.md")
    assert readme(ROOT) == text and "README.md" not in " ".join(check_pages(ROOT))
    table = text.partition(TABLE[0])[2].partition(TABLE[1])[0]
    owner_and_name = ADDRESS.removeprefix("https://github.com/")
    for path in numbered(ROOT / "notebooks"):
        (row,) = [line for line in table.splitlines() if f"](notebooks/{path.name})" in line]
        assert (
            f"https://colab.research.google.com/github/{owner_and_name}/blob/colab/notebooks/{path.name})"
            in row
        )
        assert (
            f"Fgithub.com%2F{owner_and_name.replace('/', '%2F')}/main?labpath=notebooks%2F{path.name})" in row
        )
    assert (
        table.count("](docs/images/colab.svg)")
        == table.count("](docs/images/binder.svg)")
        == len(numbered(ROOT / "notebooks"))
    )


def small(tmp_path: Path, *lessons: str) -> Path:
    """A root with README, pyproject and some lessons."""
    for name in ("README.md", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    for path in numbered(ROOT / "notebooks"):
        if number_of(path) in lessons:
            shutil.copy2(path, tmp_path / "notebooks")
    return tmp_path


def test_the_table_follows_lessons_and_the_address_and_keeps_what_one_finds_out(tmp_path: Path) -> None:
    root = small(tmp_path, "02")
    project = root / "pyproject.toml"
    project.write_text(
        project.read_text(encoding="utf-8").replace(ADDRESS, "https://github.com/you/there"), "utf-8"
    )
    file = root / README
    file.write_text(
        file.read_text(encoding="utf-8").replace("why the optimizer outweighs the model", "why"), "utf-8"
    )
    made = readme(root)
    rows = made.partition(TABLE[0])[2].partition(TABLE[1])[0].strip().splitlines()
    assert len(rows) == 3 and rows[2].startswith("| [02 Adam](notebooks/02_adam.ipynb) | why | 60 | [![")
    assert "github/you/there/blob/colab/notebooks/02_adam.ipynb" in rows[2]
    before, after = (read("README.md").partition(mark) for mark in TABLE)
    assert made.startswith(before[0]) and made.endswith(after[2])


def test_a_lesson_without_a_row_and_a_readme_without_its_marks_are_refused(tmp_path: Path) -> None:
    root = small(tmp_path, "02")
    text = read("README.md")
    (root / README).write_text(text.replace("| [02 Adam]", "| 02 Adam"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"needs a row `\| \[02 …\]"):
        readme(root)
    (root / README).write_text(text.replace(TABLE[1], ""), encoding="utf-8")
    with pytest.raises(ValueError, match="needs its table of lessons between"):
        readme(root)


def test_badges_are_pictures_with_words() -> None:
    for name in ("colab", "binder"):
        picture = ElementTree.fromstring(read(f"docs/images/{name}.svg"))
        assert picture.get("aria-label") == f"Open in {name.capitalize()}"
