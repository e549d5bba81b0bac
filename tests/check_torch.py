"""Does the course hold on another torch? `python3 -m course_utils check-torch VERSION` says so in one page.

It makes an environment with that torch in `build/torch-VERSION`. There and on the torch in use it asks the
same: can a GPU be simulated, and what do the runs of `tests/test_builds.py` allocate? Then it runs the tests
on the other torch. Standard library alone, but for what the two interpreters execute.
"""

import json
import os
import platform
import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from course_utils.cli import environment
from course_utils.cli.command import SAME_ANSWERS, course_environment
from course_utils.cli.maintain import TEST_OPTIONS, TEST_TARGETS

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).with_name("build_hashes.json")
SANITIZE = "tests/nbval_sanitize.cfg"
PICTURES = "\n[a picture names its torch]\nregex: base64,[\\w+/=]+\nreplace: base64,PICTURE\n"
MOST = 12
"""Lines of each list on the page; the rest is counted."""

Facts = dict[str, Any]
"""What one torch answers, as `facts` returns it."""

GPU, STEPS, TESTS = "the simulated GPU", "what steps allocate", "the tests"


# What is asked of a torch: this part runs on the interpreter that has it


def facts(names: Sequence[str] = ()) -> Facts:
    """What this interpreter's torch answers, for the runs of test_builds with these names, or for all."""
    import test_builds
    import torch

    can, how = test_builds.availability()
    known = test_builds.build_runs()
    runs = {name: step_of(known[name]) for name in names or known} if can else {}
    return {"torch": torch.__version__, "can": can, "how": how, "runs": runs}


def step_of(run: Any) -> Facts:
    """Hash, peak, and by operator count and bytes of a simulated step's allocations; "error" if it fails."""
    from course_utils.evidence.sequence import hash_of
    from course_utils.measuring.sources import measure

    try:
        measured = measure(run, "simulated")
    except Exception as error:  # of any kind, as torch may change in any way: it counts as a failure
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    count = Counter[str]()
    size = Counter[str]()
    for item in measured.allocations:
        count[item.operation] += 1
        size[item.operation] += item.bytes
    operators = {name: [count[name], size[name]] for name in count}
    return {"hash": hash_of(measured.allocations), "peak": measured.peak, "operators": operators}


# Another interpreter


def own_environment(version: str, cuda: bool, place: Path) -> str:
    """Python of the environment for a version of torch, made if it is not there.

    Raises SetupError with one sentence: no network, no such version, no disk.
    """
    folder = place / "environment"
    python = environment.python_in(folder)
    build = "cuda" if cuda and platform.system() != "Darwin" else "cpu"
    made = place / "made.json"
    memory = json.dumps([build, platform.python_version(), version])
    if not (made.exists() and made.read_text(encoding="utf-8") == memory and python.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        environment.make_environment(folder)
        pins = place / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        pins.write_text("".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
        torch = f"torch=={version}"
        environment.install_torch(python, build, [torch])
        environment.pip_install(python, ["--constraint", str(pins), torch, "--editable", ".[test]"])
        made.write_text(memory, encoding="utf-8")
    return str(python)


def variables() -> dict[str, str]:
    """The environment variables of both interpreters: simulated, one thread, the tests importable."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return course_environment(SAME_ANSWERS) | {"PYTHONPATH": paths, "COLUMNS": "200"}


def asked(python: str, names: Sequence[str] = ()) -> Facts:
    """The facts of another interpreter. Raises SetupError with its last line if it gives none."""
    command = [python, __file__, *names]
    done = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise environment.SetupError(
            f"{python} cannot run the course at all, so there is nothing to compare: {last}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def run_tests(python: str, targets: Sequence[str], place: Path) -> tuple[int, str]:
    """Run pytest over the targets on an interpreter; returns its exit code and output.

    `place` keeps the output, and nbval's rules with one more: pictures name their torch, so they differ.
    """
    rules = place / "nbval_sanitize.cfg"
    rules.write_text((ROOT / SANITIZE).read_text(encoding="utf-8") + PICTURES, encoding="utf-8")
    options = [str(rules) if option == SANITIZE else option for option in TEST_OPTIONS]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--color=no", *options, *targets]
    with (place / "tests.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=variables(), stdout=log, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode, (place / "tests.txt").read_text(encoding="utf-8")


# The page


def page(
    before: Facts, now: Facts, suite: tuple[int, str], kept: Mapping[str, Mapping[str, str]]
) -> tuple[bool, str]:
    """Whether the course holds, and the page that says why: `before` is the torch in use, `now` the other.

    A run holds if it allocates what was kept for that release (`kept`, from build_hashes.json); where nothing
    was, what it allocates on the torch in use.
    """
    release = ".".join(now["torch"].split(".")[:2])
    of_release = kept.get(release, {})
    expected = {name: of_release.get(name) or one.get("hash") for name, one in before["runs"].items()}
    same = [name for name, value in expected.items() if now["runs"].get(name, {}).get("hash") == value]
    against = "kept for it in tests/build_hashes.json" if of_release else f"on torch {before['torch']}"
    code, output = suite
    verdicts = {
        GPU: (now["can"], now["how"]),
        STEPS: (
            bool(expected) and len(same) == len(expected),
            f"{len(same)} of {len(expected)} runs as {against}",
        ),
        TESTS: (code == 0, summary(output, code)),
    }
    broken = [name for name, (good, _) in verdicts.items() if not good]
    holds = "The course holds." if not broken else f"The course does not hold: {', '.join(broken)}."
    lines = [f"# The course on torch {now['torch']}", "", holds, "", "| | | |", "|---|---|---|"]
    for name, (good, why) in verdicts.items():
        lines.append(f"| {name} | {'holds' if good else '**fails**'} | {why} |")
    lines += ["", f"## What changed since torch {before['torch']}"]
    changed = [
        line for name in expected for line in differing(name, before["runs"][name], now["runs"].get(name))
    ]
    lines += some("Runs that allocate otherwise", changed) or ["", f"Nothing in {len(expected)} runs."]
    warned = re.findall(r"^ +\S+: (\w*(?:Deprecation|Future)Warning: .*)$", output, re.MULTILINE)
    lines += some("Deprecations in the tests", sorted(set(warned)))
    lines += some("Tests that fail", re.findall(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE))
    if broken:
        lines += ["", "CONTRIBUTING.md says under *Another torch* what to do."]
    elif not of_release:
        lines += ["", f"Keep its hashes for {release}: run `tests/test_builds.py --write` on it."]
    return not broken, "\n".join(lines) + "\n"


def summary(output: str, code: int) -> str:
    """pytest's closing line without its decoration; for tests that did not end, exit code and last line."""
    found = re.findall(r"^=+ (.*\d+ (?:passed|failed|error).*?) in [\d.:]+ ?s.*=+$", output, re.MULTILINE)
    return found[-1] if found else f"exit code {code}: {''.join(output.strip().splitlines()[-1:])[:160]}"


def differing(name: str, before: Facts, now: Facts | None) -> list[str]:
    """One line for a run that differs: its peak, and the operators whose allocations do; else none."""
    if now and before.get("hash") == now.get("hash"):
        return []
    if not now or "hash" not in before or "hash" not in now:
        return [f"{name}: {now['error'] if now and 'error' in now else 'not simulated on both'}"]
    parts = [f"peak {before['peak']:,} → {now['peak']:,} bytes ({now['peak'] - before['peak']:+,})"]
    for operator in sorted({*before["operators"], *now["operators"]}):
        old, new = (one["operators"].get(operator, [0, 0]) for one in (before, now))
        if old != new:
            parts.append(f"{operator} {old[0]}× {old[1]:,} → {new[0]}× {new[1]:,} bytes")
    if len(parts) == 1:
        parts.append("the same operators in another order")
    more = [f"and {len(parts) - 5} operators more"] if len(parts) > 5 else []
    return [f"{name}: {'; '.join([*parts[:5], *more])}"]


def some(title: str, items: Iterable[str]) -> list[str]:
    """A list of the page under its title, cut at MOST; nothing for no items."""
    listed = list(items)
    more = [f"- and {len(listed) - MOST} more"] if len(listed) > MOST else []
    return ["", f"**{title}:**", "", *(f"- {item}" for item in listed[:MOST]), *more] if listed else []


# The command


def run(chosen: Namespace) -> int:
    """Make the environment, ask both torches, run the tests, print and save the page; 1 if anything fails.

    Raises SetupError with one sentence if there is no such torch, no network, or another version at --python.
    """
    version = chosen.version.partition("+")[0]
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise environment.SetupError(
            f"{chosen.version!r} is no version of torch: write three numbers, as in 2.11.0."
        )
    place = (chosen.folder or ROOT / "build" / f"torch-{version}{'-cuda' * chosen.cuda}").resolve()
    python = chosen.python or own_environment(version, chosen.cuda, place)
    place.mkdir(parents=True, exist_ok=True)
    print("Asking both torches …", flush=True)
    now = asked(python)
    before = asked(sys.executable)
    if now["torch"].partition("+")[0] != version:
        raise environment.SetupError(f"{python} has torch {now['torch']}, not {version}: name that version.")
    print(f"Running the tests on torch {now['torch']} …", flush=True)
    suite = run_tests(python, TEST_TARGETS, place)
    holds, text = page(before, now, suite, json.loads(KEPT.read_text(encoding="utf-8")))
    (place / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis page is {place / 'report.md'}, the tests' output tests.txt next to it.")
    return 0 if holds else 1


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1:])))
