"""Set-up: which torch, when an environment is trusted, what is said when none can be made, what it has."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import Mock

import pytest
from needs import need

from course_utils.cli import environment
from course_utils.cli.environment import Home, SetupError, explain_failure, pip_install

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A repository with nothing but what set-up reads, and no wish about torch."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.delenv("COURSE_TORCH", raising=False)
    return Home(tmp_path, "Linux")


@pytest.fixture
def installer(home, monkeypatch):
    """Makes environments without pip or venv; what pip was asked for. PyTorch's own index never answers."""
    asked = []

    def run(command, **_):
        home.python.parent.mkdir(parents=True, exist_ok=True)
        home.python.touch()
        return subprocess.CompletedProcess(command, 0, stdout="2.13.0", stderr="")

    def install(home, what, arguments, may_fail=False):
        asked.append(arguments)
        return not may_fail

    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment, "pip_install", install)
    monkeypatch.setattr(environment, "nvidia_driver", lambda system: False)
    return asked


def ready(home: Home, purpose: str = "lab") -> bool:
    return environment.is_ready(home, purpose, "cpu", environment.remembered(home))


def test_interpreter_is_where_the_system_keeps_it(tmp_path):
    assert Home(tmp_path, "Linux").python == Home(tmp_path, "Darwin").python == tmp_path / ".venv/bin/python"
    assert Home(tmp_path, "Windows").python == tmp_path / ".venv/Scripts/python.exe"


@pytest.mark.parametrize(
    ("system", "asked", "before", "driver", "choice"),
    [
        ("Linux", "", "", True, "cuda"),
        ("Linux", "", "", False, "cpu"),
        ("Windows", "", "", True, "cuda"),
        ("Linux", "cpu", "", True, "cpu"),
        ("Linux", "CUDA ", "cpu", False, "cuda"),
        ("Linux", "", "cpu", True, "cpu"),  # chosen once, kept
    ],
)
def test_torch_build_follows_wish_then_habit_then_machine(system, asked, before, driver, choice, monkeypatch):
    monkeypatch.setattr(environment, "nvidia_driver", lambda system: driver)
    assert environment.torch_choice(system, asked, before) == choice


@pytest.mark.parametrize(("system", "asked"), [("Linux", "cudda"), ("Darwin", "cuda")])
def test_torch_build_that_cannot_be_is_refused(system, asked):
    with pytest.raises(SetupError, match=r"COURSE_TORCH.*leave it unset"):
        environment.torch_choice(system, asked)


def test_torch_is_sought_where_its_build_is():
    places = product(("Linux", "Windows", "Darwin"), ("cpu", "cuda"))
    found = {place: environment.torch_sources(*place) for place in places}
    assert [options[-1:] for options in found.pop(("Linux", "cpu"))] == [[environment.CPU_INDEX], []]
    assert [options[-1:] for options in found.pop(("Windows", "cuda"))] == [[environment.CUDA_INDEX]]
    assert all(sources == [[]] for sources in found.values())


# Trust


def test_finished_environment_is_used_as_it_is(home, installer):
    assert environment.interpreter(home, "lab") == home.python
    assert ready(home)
    facts = json.loads(home.marker.read_text())
    assert (facts["state"], facts["purpose"], facts["torch"]) == ("ready", "lab", "cpu")
    asked = list(installer)
    assert environment.CPU_INDEX in asked[0]
    assert asked[1] == [asked[0][-1]], "then the package index, for the same"
    assert environment.interpreter(home, "lab") == home.python
    assert installer == asked


def test_environment_without_its_interpreter_is_made_anew_and_tests_need_more_than_the_lab(home, installer):
    environment.interpreter(home, "lab")
    home.python.unlink()
    assert not ready(home)
    environment.interpreter(home, "lab")
    assert ready(home) and not ready(home, "test")
    environment.interpreter(home, "test")
    assert ready(home, "test") and ready(home, "lab")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_bring_the_environment_up_to_date(home, installer, name):
    environment.interpreter(home, "test")
    kept = home.folder / "installed-before"
    kept.touch()
    with (home.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert not ready(home)
    environment.interpreter(home, "lab")
    assert kept.exists(), "brought up to date, not made anew"
    assert ready(home, "test"), "what was installed for the tests stays"


@pytest.mark.parametrize("fact", ["python", "torch", "root", "layout"])
def test_other_foundations_mean_an_environment_made_anew(home, installer, fact, monkeypatch):
    environment.interpreter(home, "lab")
    stale = home.folder / "installed-before"
    stale.touch()
    memory = environment.remembered(home)
    environment.remember(home, **(memory | {fact: "other", "key": "other"}))
    monkeypatch.setenv("COURSE_TORCH", "cpu")
    environment.interpreter(home, "lab")
    assert not stale.exists()
    assert ready(home)


@pytest.mark.parametrize(
    "how", [KeyboardInterrupt, SetupError("pip failed"), OSError(28, "No space left on device")]
)
def test_interrupted_set_up_is_not_trusted_and_starts_over(home, installer, monkeypatch, how):
    def interrupted(home, what, arguments, may_fail=False):
        (home.folder / "half-installed").touch()
        raise how

    with monkeypatch.context() as patch:
        patch.setattr(environment, "pip_install", interrupted)
        with pytest.raises((KeyboardInterrupt, SetupError)):
            environment.interpreter(home, "lab")
    assert (home.folder / "half-installed").exists()
    assert not ready(home)
    environment.interpreter(home, "lab")
    assert not (home.folder / "half-installed").exists()
    assert ready(home)


@pytest.mark.parametrize("text", ["", "[]", '{"state": "ready"}', '{"state": "ready", "key": "another"}'])
def test_unreadable_or_foreign_marker_is_not_trusted(home, text):
    home.python.parent.mkdir(parents=True)
    home.python.touch()
    home.marker.write_text(text)
    assert not ready(home)


def test_a_folder_that_the_course_did_not_make_is_left_alone(home, installer):
    home.folder.mkdir()
    (home.folder / "yours").touch()
    with pytest.raises(SetupError, match=r"is not the course's own: move it away.*--here"):
        environment.interpreter(home, "lab")
    assert [path.name for path in home.folder.iterdir()] == ["yours"] and installer == []


# Failures, each in one sentence


def test_missing_venv_module_is_said_with_its_remedy(home, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nNo module named venv\n")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SetupError, match=r"No module named venv.*python3-venv.*then run the same command"):
        environment.interpreter(home, "lab")
    assert not ready(home)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "disk is full",
        ),
        (
            "WARNING: connection broken by 'x'\nERROR: No matching distribution found for torch\n",
            "No network",
        ),
        ("WARNING: connection broken by 'ProxyError('Cannot connect to proxy.')'\n", "correct HTTPS_PROXY"),
        ("ERROR: No matching distribution found for torch==2.13.0\n", "no build of torch"),
        ("ERROR: Failed building wheel for thing\n", "Failed building wheel for thing"),
        ("", "could not install torch"),
    ],
)
def test_pip_failures_are_told_in_one_sentence(said, told, tmp_path):
    sentence = explain_failure(said, "torch", tmp_path / "log")
    assert told in sentence
    assert "\n" not in sentence


def test_a_clone_that_may_not_be_written_to_is_told_in_one_sentence(home, monkeypatch):
    refused = PermissionError(errno.EACCES, "Permission denied", str(home.folder))
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=refused))  # root may write anywhere
    words = rf"^You may not write to {re.escape(str(home.folder))}: clone the course"
    with pytest.raises(SetupError, match=words):
        environment.interpreter(home, "lab")


def test_a_proxy_that_does_not_answer_is_told_by_a_real_pip(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    home = Home(tmp_path)
    home.python.parent.mkdir(parents=True)
    home.python.symlink_to(sys.executable)
    proxy = [
        "--retries",
        "1",
        "--timeout",
        "3",
        "--proxy",
        "http://127.0.0.1:9",
        "--index-url",
        "https://index.invalid/simple",
    ]
    index = ["--index-url", "https://index.invalid/simple"]
    with pytest.raises(SetupError, match=r"^The proxy did not answer, so a package could not be installed"):
        pip_install(home, "a package", [*proxy, *index, "a-package-of-nobody"])


def test_no_network_is_told_by_a_real_pip(tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    home = Home(tmp_path)
    home.python.parent.mkdir(parents=True)
    home.python.symlink_to(sys.executable)
    nowhere = [
        "--retries",
        "1",
        "--timeout",
        "3",
        "--index-url",
        "https://index.invalid/simple",
        "a-package-of-nobody",
    ]
    with pytest.raises(SetupError, match="No network"):
        pip_install(home, "a package", nowhere)
    assert pip_install(home, "a package", nowhere, may_fail=True) is False
    assert "a-package-of-nobody" in home.log.read_text()
    # one line an attempt, and one that it was not available
    assert len(capsys.readouterr().out.splitlines()) == 3


# --here


def test_here_uses_the_interpreter_in_use_if_it_has_what_is_needed(home):
    assert environment.interpreter(home, "lab", here=True) == Path(sys.executable)
    assert not home.folder.exists()


@pytest.mark.parametrize(("name", "least"), [("no-such-package", "1"), ("torch", "99.0")])
def test_here_names_what_is_absent_or_too_old(home, monkeypatch, name, least):
    monkeypatch.setattr(environment, "requirements", lambda root, purpose: {name: least, "pytest": "1"})
    with pytest.raises(SetupError, match=rf"--here needs {name}>={least} in .*install that"):
        environment.interpreter(home, "lab", here=True)


@pytest.mark.parametrize("here", [False, True])
def test_a_wheel_makes_no_environment_and_names_the_extra_to_install(home, monkeypatch, here):
    monkeypatch.setattr(environment, "IS_CLONE", False)
    assert environment.interpreter(home, "lab", here) == Path(sys.executable)
    monkeypatch.setattr(environment, "requirements", lambda root, purpose: {"no-such-package": "1"})
    command = rf'`{re.escape(sys.executable)} -m pip install "where-did-the-memory-go\[lab\]"`\.$'
    with pytest.raises(SetupError, match=rf"needs no-such-package>=1 in .*{command}"):
        environment.interpreter(home, "lab", here)
    assert not home.folder.exists()


def test_an_environment_that_the_user_made_is_used_as_with_here(home, installer, monkeypatch):
    """As `uv sync` makes it: in .venv, where set-up makes its own, but without its marker."""
    home.folder.mkdir()
    monkeypatch.setattr(environment.sys, "prefix", str(home.folder))
    assert environment.interpreter(home, "lab") == Path(sys.executable) and installer == []
    environment.remember(home, state="unfinished")
    assert environment.interpreter(home, "lab") == home.python
    assert installer, "one that set-up began is made anew"


def test_many_missing_packages_are_counted():
    said = environment.how_to_install([f"p{number}>=1" for number in range(5)], "test", here=True)
    assert "--here needs p0>=1, p1>=1, p2>=1, 2 more in" in said
    assert '-m pip install --editable ".[test]"`' in said


# What an environment consists of


def test_each_extra_contains_the_one_before_it_and_the_package_alone_needs_nothing():
    assert PROJECT["dependencies"] == []
    needed = [environment.requirements(ROOT, extra) for extra in ("torch", "lab", "test", "author")]
    assert [*needed[0]] == ["torch", "numpy"] and "jupyterlab" in needed[1] and "torch" in needed[3]
    assert all(less.items() < more.items() for less, more in pairwise(needed))
    extras = {"torch", "lab", "test", "author"}
    assert extras == set(PROJECT["optional-dependencies"]) == set(environment.SET_UP_WITH)


def test_lock_pins_every_direct_requirement_at_a_version_that_it_allows_and_holds_no_addresses():
    numbers = environment.version_numbers
    assert () < numbers("2.9.1") < numbers("2.11.0a0+git12") < numbers("2.13.0+cpu")
    locked = {name.lower().replace("_", "-"): version for name, version in environment.locked(ROOT).items()}
    for name, least in environment.requirements(ROOT, "author").items():
        pinned = locked[name.lower().replace("_", "-")]
        assert numbers(pinned) >= numbers(least), name
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line) for line in pins)


def test_conda_environment_has_the_packages_of_lab_and_test_and_a_python_that_the_package_allows():
    need("rattler", "yaml")
    rattler = import_module("rattler")
    yaml = import_module("yaml")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert conda["channels"] == ["conda-forge", "nodefaults"]
    assert {"pip": ["--editable ."]} in conda["dependencies"]
    listed = [rattler.MatchSpec(item, strict=True) for item in conda["dependencies"] if isinstance(item, str)]
    specs = {spec.name.normalized: spec for spec in listed if spec.name}
    ours = {"torch": "pytorch"}
    needed = {ours.get(name, name): least for name, least in environment.requirements(ROOT, "test").items()}
    assert set(specs) == {*needed, "python", "pip"}
    for name, least in needed.items():
        version = rattler.VersionSpec(str(specs[name].version))
        if name == "pytorch":
            locked = rattler.Version(environment.locked(ROOT)["torch"])
            assert version.matches(locked)
            assert rattler.VersionSpec(f">={least}").matches(locked)
        else:
            assert str(specs[name].version) == f">={least}", name
    python = rattler.VersionSpec(str(specs["python"].version))
    versions = [rattler.Version(f"3.{minor}") for minor in range(10, 15)]
    [pinned] = [version for version in versions if python.matches(version)]
    assert rattler.VersionSpec(PROJECT["requires-python"]).matches(pinned)
