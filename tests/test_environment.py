"""Set-up: which torch, when an environment is trusted, what is said when none can be made, what it has."""

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
        if "import torchvision" in command:
            return subprocess.CompletedProcess(command, 1)  # as with the build of the package index
        asked.append(command)
        return subprocess.CompletedProcess(command, 1 if environment.CPU_INDEX in command else 0)

    monkeypatch.setattr(environment.subprocess, "run", run)
    return asked


def test_torch_build_follows_wish_then_habit_then_machine_and_nonsense_is_refused(folder, monkeypatch):
    assert environment.torch_choice() == "cpu"
    monkeypatch.setattr(environment, "nvidia_driver", lambda: True)
    assert environment.torch_choice() == "cuda"
    assert environment.torch_choice("cpu") == "cpu"
    monkeypatch.setenv("COURSE_TORCH", "CUDA ")
    assert environment.torch_choice("cpu") == "cuda"
    monkeypatch.setattr(environment.platform, "system", lambda: "Darwin")
    with pytest.raises(SetupError, match=r"COURSE_TORCH is 'cuda'.*leave it unset"):
        environment.torch_choice()


# Trust


def test_a_finished_environment_is_used_as_it_is_and_tests_get_more(folder, installer, monkeypatch):
    assert interpreter("lab", folder=folder) == python_in(folder)
    own_index, package_index, course = installer
    assert environment.CPU_INDEX in own_index and own_index[-1] == package_index[-1] == "torch"
    assert course[-2:] == ["--editable", ".[lab]"]
    assert interpreter("lab", folder=folder) == python_in(folder)
    assert len(installer) == 3, "nothing more was installed"
    interpreter("test", folder=folder)
    assert installer[-1][-1] == ".[author]"
    count = len(installer)
    interpreter("lab", folder=folder)
    assert len(installer) == count, "what tests need stays"
    monkeypatch.setenv("COURSE_LIBRARIES", "1")
    interpreter("lab", folder=folder)
    assert len(installer) == count, "the libraries of scripts are asked for by tests alone"
    interpreter("test", folder=folder)
    torch, course, uninstall = installer[-3:]
    assert torch[-2:] == ["torch", "torchvision"] and course[-1] == ".[scripts]"
    assert uninstall[2:] == ["pip", "uninstall", "--yes", "torchvision", "timm"], "what cannot be imported"
    monkeypatch.delenv("COURSE_LIBRARIES")
    count = len(installer)
    interpreter("test", folder=folder)
    assert len(installer) == count, "and stay, too"


def test_changed_requirements_bring_the_environment_up_to_date(folder, installer):
    interpreter("lab", folder=folder)
    kept = folder / "installed-before"
    kept.touch()
    for name in environment.FILES:
        (folder.parent / name).write_text("changed")
        count = len(installer)
        interpreter("lab", folder=folder)
        assert len(installer) > count and kept.exists(), "brought up to date, not made anew"


@pytest.mark.parametrize("fact", ["python", "torch", "root", "state", "damaged"])
def test_other_foundations_or_a_damaged_marker_mean_an_environment_made_anew(
    folder, installer, fact, monkeypatch
):
    interpreter("lab", folder=folder)
    stale = folder / "installed-before"
    stale.touch()
    environment.remember(folder, remembered(folder) | {fact: "cuda" if fact == "torch" else "other"})
    if fact == "damaged":
        (folder / MARKER).write_text("[1]")
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
        with pytest.raises((KeyboardInterrupt, SetupError)) as ended:
            interpreter("lab", folder=folder)
    assert not isinstance(how, OSError) or "No space left on device): fix this" in str(ended.value)
    assert remembered(folder)["state"] == "unfinished"
    interpreter("lab", folder=folder)
    assert not (folder / "half-installed").exists() and remembered(folder)["state"] == "ready"


def test_a_folder_that_the_course_did_not_make_is_left_alone(folder, installer):
    folder.mkdir()
    (folder / "yours").touch()
    with pytest.raises(SetupError, match=r"is not the course's own: move it away.*--here"):
        interpreter("lab", folder=folder)
    assert [path.name for path in folder.iterdir()] == ["yours"] and installer == []


# The user's own Python


@pytest.mark.parametrize(("here", "is_clone"), [(True, True), (False, False)])
def test_here_and_a_wheel_name_what_is_absent_and_how_to_install_it(folder, monkeypatch, here, is_clone):
    monkeypatch.setattr(environment, "IS_CLONE", is_clone)
    assert interpreter("torch", here, folder) == Path(sys.executable)
    monkeypatch.setitem(environment.NEEDED, "lab", ("torch", "no_such_package"))
    what = r'--editable "\.\[lab\]"' if is_clone else r'"where-did-the-memory-go\[lab\]"'
    command = rf"`{re.escape(sys.executable)} -m pip install {what}`"
    with pytest.raises(SetupError, match=rf"needs no_such_package in .*{command}"):
        interpreter("lab", here, folder)
    assert not folder.exists()


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


def locked() -> dict[str, str]:
    """Each package that constraints.txt pins, and its version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line) for line in pins), "pins alone"
    return dict(line.lower().replace("_", "-").split("==") for line in pins)


def test_lock_pins_every_direct_requirement_at_a_version_that_it_allows():
    for name, least in requirements("scripts").items():
        assert numbers(locked()[name.lower().replace("_", "-")]) >= numbers(least), name
    binder = (ROOT / ".binder" / "requirements.txt").read_text(encoding="utf-8")
    assert f"torch=={locked()['torch']}+cpu\n" in binder, "outputs were made with it"


def test_conda_environment_has_the_packages_of_lab_and_test_and_the_locked_torch():
    need("yaml")
    conda = import_module("yaml").safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, *others = conda["dependencies"]
    needed = requirements("test")
    del needed["torch"]
    packages = [f"{name}>={least}" for name, least in needed.items()]
    expected = [f"pytorch={locked()['torch']}", *packages, "pip", {"pip": ["--editable ."]}]
    assert sorted(map(str, others)) == sorted(map(str, expected))
    assert numbers(python) >= numbers(PROJECT["requires-python"])


@pytest.mark.parametrize(
    ("system", "build", "places"),
    [
        ("Linux", "cpu", [[environment.CPU_INDEX], []]),
        ("Windows", "cuda", [[environment.CUDA_INDEX]]),
        ("Darwin", "cpu", [[]]),
    ],
)
def test_torch_is_sought_where_its_build_is(system, build, places, monkeypatch):
    monkeypatch.setattr(environment.platform, "system", lambda: system)
    assert [options[-1:] for options in environment.torch_sources(build)] == places


def test_each_extra_contains_the_one_before_it_and_the_package_alone_needs_nothing():
    assert PROJECT["dependencies"] == []
    needed = [requirements(extra) for extra in ("torch", "lab", "test", "author", "scripts")]
    assert all(less.items() < more.items() for less, more in pairwise(needed))
    assert set(PROJECT["optional-dependencies"]) == set(environment.NEEDED)
