"""Set-up: which torch, when an environment is trusted, what is said when none can be made, what it has."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from needs import need

from course_utils.cli import environment
from course_utils.cli.environment import MARKER, SetupError, interpreter, python_in, remembered

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The place of an environment in a clone on Linux, with no wish about torch and no GPU."""
    for name in environment.FILES:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(environment, "SHIPPED", tmp_path)
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    monkeypatch.setattr(environment, "nvidia_driver", lambda: False)
    monkeypatch.delenv("COURSE_TORCH", raising=False)
    return tmp_path / ".venv"


@pytest.fixture
def installer(folder, monkeypatch):
    """Makes environments without pip or venv; what pip was asked for. PyTorch's own index never answers."""
    asked = []

    def run(command, **_):
        if command[1:3] == ["-m", "venv"]:
            python_in(folder).parent.mkdir(parents=True)
            python_in(folder).touch()
            return subprocess.CompletedProcess(command, 0)
        asked.append(command)
        return subprocess.CompletedProcess(command, 1 if environment.CPU_INDEX in command else 0)

    monkeypatch.setattr(environment.subprocess, "run", run)
    return asked


# The torch build


@pytest.mark.parametrize(
    ("asked", "before", "driver", "choice"),
    [
        ("", "", True, "cuda"),
        ("", "", False, "cpu"),
        ("cpu", "", True, "cpu"),
        ("CUDA ", "cpu", False, "cuda"),
        ("", "cpu", True, "cpu"),  # chosen once, kept
    ],
)
def test_torch_build_follows_wish_then_habit_then_machine(folder, asked, before, driver, choice, monkeypatch):
    monkeypatch.setattr(environment, "nvidia_driver", lambda: driver)
    monkeypatch.setenv("COURSE_TORCH", asked)
    assert environment.torch_choice(before) == choice


@pytest.mark.parametrize(("system", "asked"), [("Linux", "cudda"), ("Darwin", "cuda")])
def test_torch_build_that_cannot_be_is_refused(folder, system, asked, monkeypatch):
    monkeypatch.setattr(environment.platform, "system", lambda: system)
    monkeypatch.setenv("COURSE_TORCH", asked)
    with pytest.raises(SetupError, match=r"COURSE_TORCH.*leave it unset"):
        environment.torch_choice()


@pytest.mark.parametrize(
    ("system", "build", "places"),
    [
        ("Linux", "cpu", [[environment.CPU_INDEX], []]),
        ("Linux", "cuda", [[]]),
        ("Windows", "cpu", [[]]),
        ("Windows", "cuda", [[environment.CUDA_INDEX]]),
        ("Darwin", "cpu", [[]]),
    ],
)
def test_torch_is_sought_where_its_build_is(system, build, places, monkeypatch):
    monkeypatch.setattr(environment.platform, "system", lambda: system)
    assert [options[-1:] for options in environment.torch_sources(build)] == places


# Trust


def test_a_finished_environment_is_used_as_it_is(folder, installer):
    assert interpreter("lab", folder=folder) == python_in(folder)
    assert remembered(folder)["state"] == "ready"
    own_index, package_index, course = installer
    assert environment.CPU_INDEX in own_index and own_index[-1] == package_index[-1] == "torch"
    assert course[-2:] == ["--editable", ".[lab]"]
    assert interpreter("lab", folder=folder) == python_in(folder)
    assert len(installer) == 3, "nothing more was installed"


def test_tests_need_more_than_the_lab_and_keep_it(folder, installer):
    interpreter("lab", folder=folder)
    interpreter("test", folder=folder)
    assert installer[-1][-1] == ".[author]"
    count = len(installer)
    interpreter("lab", folder=folder)
    assert len(installer) == count


@pytest.mark.parametrize("name", environment.FILES)
def test_changed_requirements_bring_the_environment_up_to_date(folder, installer, name):
    interpreter("lab", folder=folder)
    kept = folder / "installed-before"
    kept.touch()
    (folder.parent / name).write_text("changed")
    count = len(installer)
    interpreter("lab", folder=folder)
    assert len(installer) > count and kept.exists(), "brought up to date, not made anew"


@pytest.mark.parametrize("fact", ["python", "torch", "root", "state"])
def test_other_foundations_mean_an_environment_made_anew(folder, installer, fact, monkeypatch):
    interpreter("lab", folder=folder)
    stale = folder / "installed-before"
    stale.touch()
    environment.remember(folder, remembered(folder) | {fact: "cuda" if fact == "torch" else "other"})
    monkeypatch.setenv("COURSE_TORCH", "cpu")
    interpreter("lab", folder=folder)
    assert not stale.exists() and remembered(folder)["state"] == "ready"


@pytest.mark.parametrize("how", [KeyboardInterrupt(), OSError(28, "No space left on device"), None])
def test_interrupted_set_up_is_not_trusted_and_starts_over(folder, installer, monkeypatch, how):
    def interrupted(python, arguments):
        (folder / "half-installed").touch()
        if how:
            raise how
        return False  # pip failed

    with monkeypatch.context() as patch:
        patch.setattr(environment, "run_pip", interrupted)
        with pytest.raises((KeyboardInterrupt, SetupError)):
            interpreter("lab", folder=folder)
    assert remembered(folder)["state"] == "unfinished"
    interpreter("lab", folder=folder)
    assert not (folder / "half-installed").exists() and remembered(folder)["state"] == "ready"


@pytest.mark.parametrize("text", ["", "[]", "[1]", '{"state": "ready"}'])
def test_a_damaged_marker_is_not_trusted(folder, installer, text):
    folder.mkdir()
    (folder / MARKER).write_text(text)
    (folder / "half-installed").touch()
    interpreter("lab", folder=folder)
    assert not (folder / "half-installed").exists() and remembered(folder)["state"] == "ready"


def test_a_folder_that_the_course_did_not_make_is_left_alone(folder, installer):
    folder.mkdir()
    (folder / "yours").touch()
    with pytest.raises(SetupError, match=r"is not the course's own: move it away.*--here"):
        interpreter("lab", folder=folder)
    assert [path.name for path in folder.iterdir()] == ["yours"] and installer == []


# Failures, each in one sentence


def test_a_missing_venv_module_is_told_with_its_remedy(folder, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SetupError, match=r"-m venv` failed .*python3-venv.*then run the same command"):
        interpreter("lab", folder=folder)
    assert remembered(folder)["state"] == "unfinished"


@pytest.mark.parametrize(
    "problem", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")]
)
def test_a_read_only_folder_and_a_full_disk_are_named(folder, monkeypatch, problem):
    problem.filename = str(folder)

    def refuse(*_, **__):  # root may write anywhere
        raise problem

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = rf"^Setting up .* failed \(\[Errno \d+\] {problem.strerror}: '{folder}'\): fix this or clone"
    with pytest.raises(SetupError, match=words):
        interpreter("lab", folder=folder)


def test_where_no_index_answers_pip_says_so_and_one_sentence_what_to_do(tmp_path, monkeypatch, capfd):
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    nowhere = ["--retries", "0", "--index-url", "https://index.invalid/simple", "a-package-of-nobody"]
    with pytest.raises(SetupError, match=r"^pip could not install that and says why above: .*network.*disk"):
        environment.pip_install(Path(sys.executable), nowhere)
    assert "No matching distribution found for a-package-of-nobody" in capfd.readouterr().err


# --here


def test_here_uses_the_interpreter_in_use_if_it_has_what_is_needed(folder):
    assert interpreter("lab", here=True, folder=folder) == Path(sys.executable)
    assert not folder.exists()


@pytest.mark.parametrize(("here", "is_clone"), [(True, True), (True, False), (False, False)])
def test_here_and_a_wheel_name_what_is_absent_and_how_to_install_it(folder, monkeypatch, here, is_clone):
    monkeypatch.setattr(environment, "IS_CLONE", is_clone)
    monkeypatch.setitem(environment.NEEDED, "lab", ("torch", "no_such_package"))
    what = r'--editable "\.\[lab\]"' if is_clone else r'"where-did-the-memory-go\[lab\]"'
    command = rf"`{re.escape(sys.executable)} -m pip install {what}`"
    with pytest.raises(SetupError, match=rf"needs no_such_package in .*{command}"):
        interpreter("lab", here, folder)
    assert not folder.exists()


def test_an_environment_that_the_user_made_is_used_as_with_here(folder, installer, monkeypatch):
    """As `uv sync` makes it: in .venv, where set-up makes its own, but without its marker."""
    folder.mkdir()
    monkeypatch.setattr(environment.sys, "prefix", str(folder))
    assert interpreter("lab", folder=folder) == Path(sys.executable) and installer == []
    environment.remember(folder, {"state": "unfinished"})
    assert interpreter("lab", folder=folder) == python_in(folder)
    assert installer, "one that set-up began is made anew"


# What an environment consists of


def requirements(extra: str) -> dict[str, str]:
    """The packages of an extra with those that it contains: the name and its oldest version."""
    needed: dict[str, str] = {}
    for item in PROJECT["optional-dependencies"][extra]:
        contained = re.fullmatch(rf"{PROJECT['name']}\[(\w+)\]", item)
        if contained:
            needed |= requirements(contained[1])
        else:
            name, least = item.split(">=")
            needed[name] = least
    return needed


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_each_extra_contains_the_one_before_it_and_the_package_alone_needs_nothing():
    assert PROJECT["dependencies"] == []
    needed = [requirements(extra) for extra in ("torch", "lab", "test", "author")]
    assert all(less.items() < more.items() for less, more in pairwise(needed))
    assert set(PROJECT["optional-dependencies"]) == set(environment.NEEDED)


def test_lock_pins_every_direct_requirement_at_a_version_that_it_allows_and_holds_no_addresses():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line) for line in pins)
    locked = dict(line.lower().replace("_", "-").split("==") for line in pins)
    for name, least in requirements("author").items():
        assert numbers(locked[name.lower().replace("_", "-")]) >= numbers(least), name


def test_conda_environment_has_the_packages_of_lab_and_test_and_a_python_that_the_package_allows():
    need("rattler", "yaml")
    rattler = import_module("rattler")
    yaml = import_module("yaml")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert conda["channels"] == ["conda-forge", "nodefaults"]
    assert {"pip": ["--editable ."]} in conda["dependencies"]
    listed = [rattler.MatchSpec(item, strict=True) for item in conda["dependencies"] if isinstance(item, str)]
    specs = {spec.name.normalized: spec for spec in listed if spec.name}
    needed = requirements("test")
    torch = needed.pop("torch")
    assert set(specs) == {*needed, "pytorch", "python", "pip"}
    assert {name: str(specs[name].version) for name in needed} == {
        name: f">={least}" for name, least in needed.items()
    }
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and rattler.VersionSpec(str(specs["pytorch"].version)).matches(rattler.Version(pinned[1]))
    assert rattler.VersionSpec(f">={torch}").matches(rattler.Version(pinned[1]))
    python = rattler.VersionSpec(str(specs["python"].version))
    versions = [rattler.Version(f"3.{minor}") for minor in range(10, 15)]
    [one] = [version for version in versions if python.matches(version)]
    assert rattler.VersionSpec(PROJECT["requires-python"]).matches(one)
