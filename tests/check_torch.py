"""Does the course hold on another torch? `python3 -m course_utils check-torch VERSION` says so in one page.

It makes an environment with that torch in `build/torch-VERSION`. There and on the torch in use it asks the
same: can a GPU be simulated, what do the runs of `tests/test_builds.py` allocate, and of what does torch
warn. Then it runs the quick suite on the other torch. Standard library alone, but for what the two
interpreters execute.
"""

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from course_utils.cli import environment
from course_utils.cli.command import SAME_ANSWERS, course_environment
from course_utils.cli.maintain import QUICK_TARGETS, TEST_OPTIONS

ROOT = Path(__file__).resolve().parent.parent

KEPT = Path(__file__).with_name("build_hashes.json")
MOST = 12
"""Lines of each list on the page; the rest is counted."""

Facts = dict[str, Any]
"""What one torch answers, as `facts` returns it."""


# What is asked of a torch: this part runs on the interpreter that has it


def facts(names: Sequence[str] = ()) -> Facts:
    """What this interpreter's torch answers; of the runs of test_builds those with these names, all without
    names.

    For each run its hash, its peak in bytes, and by operator the number of its allocations and their bytes; a
    run that cannot be simulated has "error" instead. So are the operators that torch knows, and its warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import test_builds
        import torch

        can, how = test_builds.availability()
        known = test_builds.build_runs()
        runs = {name: steps_of(known[name]) for name in names or known} if can else {}
    said = {warning_line(one.category, one.message, one.filename, one.lineno) for one in caught}
    operators = sorted({name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")})
    return {
        "torch": torch.__version__,
        "can": can,
        "how": how,
        "runs": runs,
        "operators": operators,
        "warnings": sorted(filter(None, said)),
    }


def steps_of(run: Any) -> Facts:
    """Hash, peak and allocations by operator of a simulated step; "error" and its words where it fails."""
    from course_utils.measuring import measure
    from course_utils.measuring.sequence import hash_of

    try:
        measured = measure(run, "simulated")
    except (
        Exception
    ) as error:  # of any kind, as torch may change in any way: it is printed, and counts as a failure
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    count = Counter[str]()
    size = Counter[str]()
    for item in measured.allocations:
        count[item.operation] += 1
        size[item.operation] += item.bytes
    operators = {name: [count[name], size[name]] for name in count}
    return {"hash": hash_of(measured.allocations), "peak": measured.peak, "operators": operators}


def warning_line(category: type, message: Warning | str, file: str, line: int) -> str:
    """A deprecation in one line, with the module that it is about; "" for other warnings."""
    if not re.search("Deprecat|Future", category.__name__):
        return ""
    return f"{category.__name__}: {' '.join(str(message).split())[:160]} ({short(file)}:{line})"


def short(file: str) -> str:
    """A file's path, from its package or from the course on."""
    ours = Path(file).as_posix().removeprefix(f"{ROOT.as_posix()}/")
    return re.sub(r"^.*(?:site-packages|dist-packages)/", "", ours)


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


def asked(python: str, names: Sequence[str] = ()) -> Facts:
    """The facts of another interpreter. Raises SetupError with the last line of its
    output if it gives none.
    """
    command = [python, str(Path(__file__)), *names]
    done = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise environment.SetupError(
            f"{python} cannot run the course at all, so there is nothing to compare: {last}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def quick_suite(python: str, targets: Sequence[str], options: Sequence[str], log: Path) -> tuple[int, str]:
    """Run pytest over the targets on an interpreter; returns its exit code and its
    output, which `log` keeps.
    """
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--color=no", *options, *targets]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write_text(done.stdout, encoding="utf-8")
    return done.returncode, done.stdout


def without_pictures(options: Sequence[str], place: Path) -> list[str]:
    """The options of pytest with one rule more for nbval, in a file of `place`: pictures name torch, so they
    differ.
    """
    file = place / "nbval_sanitize.cfg"
    rules = (ROOT / options[options.index("--nbval-sanitize-with") + 1]).read_text(encoding="utf-8")
    file.write_text(
        f"{rules}\n[a picture names its torch]\nregex: base64,[\\w+/=]+\nreplace: base64,PICTURE\n", "utf-8"
    )
    return [
        str(file) if before == "--nbval-sanitize-with" else one for before, one in pairwise(["", *options])
    ]


def variables() -> dict[str, str]:
    """The environment variables of both interpreters: simulated, one thread, the tests importable."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return course_environment(SAME_ANSWERS) | {"PYTHONPATH": paths, "COLUMNS": "200"}


# The page


def page(
    before: Facts, now: Facts, suite: tuple[int, str], kept: Mapping[str, Mapping[str, str]]
) -> tuple[bool, str]:
    """Whether the course holds, and the page that says why: `before` is the torch in use, `now` the other
    one.

    A run holds if it allocates what was kept for that release (`kept`, from build_hashes.json); where nothing
    was, what it allocates on the torch in use.
    """
    release = ".".join(now["torch"].split(".")[:2])
    of_release = kept.get(release, {})
    expected = {name: of_release.get(name) or one.get("hash") for name, one in before["runs"].items()}
    wrong = [name for name, value in expected.items() if now["runs"].get(name, {}).get("hash") != value]
    code, output = suite
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)
    against = "kept for it in tests/build_hashes.json" if of_release else f"on torch {before['torch']}"
    verdicts = {
        "the simulated GPU": (now["can"], now["how"]),
        "what steps allocate": (
            bool(expected) and not wrong,
            f"{len(expected) - len(wrong)} of {len(expected)} runs as {against}",
        ),
        "the quick suite": (code == 0, summary(output, code)),
    }
    broken = [name for name, (good, _) in verdicts.items() if not good]
    holds = "The course holds." if not broken else f"The course does not hold: {', '.join(broken)}."
    lines = [f"# The course on torch {now['torch']}", "", holds, "", "| | | |", "|---|---|---|"]
    lines += [
        f"| {name} | {'holds' if good else '**fails**'} | {why} |" for name, (good, why) in verdicts.items()
    ]
    warned = re.findall(r"^ +(\S+:\d+): (\w*(?:Deprecation|Future)Warning: .*)$", output, re.MULTILINE)
    lines += ["", f"## What changed since torch {before['torch']}"]
    compared = f"{len(expected)} runs, {len(now['operators']):,} operators of torch, deprecations"
    lines += changes(before, now) or ["", f"Nothing that is compared here: {compared}."]
    lines += some(
        "Deprecations in the quick suite", sorted({f"{what} ({short(where)})" for where, what in warned})
    )
    lines += some("Tests that fail", failed)
    lines += ["", "## Next", "", next_step(verdicts, release, bool(of_release))]
    return not broken, "\n".join(lines) + "\n"


def summary(output: str, code: int) -> str:
    """pytest's closing line without its decoration; the last line and the exit code of a suite that did not
    end.
    """
    found = re.findall(r"^=+ (.*\d+ (?:passed|failed|error).*?) in [\d.:]+ ?s.*=+$", output, re.MULTILINE)
    return found[-1] if found else f"exit code {code}: {''.join(output.strip().splitlines()[-1:])[:160]}"


def changes(before: Facts, now: Facts) -> list[str]:
    """What differs between two torches, as lists of the page: runs, operators of steps and of torch,
    warnings.
    """
    runs = [
        line
        for name, one in before["runs"].items()
        for line in differing(name, one, now["runs"].get(name, {}))
    ]
    old, new = (steps_operators(one) for one in (before, now))
    gone, come = (set(a["operators"]) - set(b["operators"]) for a, b in ((before, now), (now, before)))
    return [
        *some("Runs that allocate otherwise", runs),
        *some("Operators that steps no longer call", sorted(old - new)),
        *some("Operators that steps call now", sorted(new - old)),
        *some(f"Operators that torch no longer has ({len(come)} are new)", sorted(gone)),
        *some("Deprecations that this torch warns of, and the other did not", without(now, before)),
        *some("Deprecations that it warns of no longer", without(before, now)),
    ]


def differing(name: str, before: Facts, now: Facts) -> list[str]:
    """One line for a run that differs: its peak, and the operators whose allocations do; none if it is the
    same.
    """
    if before.get("hash") == now.get("hash"):
        return []
    if "hash" not in before or "hash" not in now:
        return [f"{name}: {now.get('error') or ('simulated' if 'hash' in now else 'not simulated')}"]
    counts = [one["operators"] for one in (before, now)]
    names = sorted(set(counts[0]) | set(counts[1]))
    pairs = [(operator, *(one.get(operator, [0, 0]) for one in counts)) for operator in names]
    parts = [f"{o} {a[0]}× {a[1]:,} → {b[0]}× {b[1]:,} bytes" for o, a, b in pairs if a != b]
    peak = f"peak {before['peak']:,} → {now['peak']:,} bytes ({now['peak'] - before['peak']:+,})"
    more = [f"and {len(parts) - 4} operators more"] if len(parts) > 4 else []
    return ["; ".join([f"{name}: {peak}", *(parts[:4] or ["the same operators in another order"]), *more])]


def steps_operators(one: Facts) -> set[str]:
    return {operator for run in one["runs"].values() for operator in run.get("operators", ())}


def without(these: Facts, those: Facts) -> list[str]:
    """Warnings of one torch that the other does not give, whatever the line of code."""
    known = {re.sub(r":\d+\)$", "", line) for line in those["warnings"]}
    return [line for line in these["warnings"] if re.sub(r":\d+\)$", "", line) not in known]


def some(title: str, items: Iterable[str]) -> list[str]:
    """A list of the page under its title, cut at MOST; nothing for no items."""
    listed = list(items)
    more = [f"- and {len(listed) - MOST} more"] if len(listed) > MOST else []
    return ["", f"**{title}:**", "", *(f"- {item}" for item in listed[:MOST]), *more] if listed else []


def next_step(verdicts: Mapping[str, tuple[bool, str]], release: str, kept: bool) -> str:
    """What to do about it, in one or two sentences."""
    if not verdicts["the simulated GPU"][0]:
        return "Begin with course_utils/measuring/simulated.py: it patches torch's tables by their layout."
    if not verdicts["what steps allocate"][0]:
        return (
            "Look at each run above. If torch really allocates so, keep it with `tests/test_builds.py"
            " --write` on that torch; else a recorder or an estimate misses an operator."
        )
    if not verdicts["the quick suite"][0]:
        return "Look at the tests that fail; quick.txt next to this page has their whole output."
    write = "" if kept else f" Keep its hashes for {release}: run `tests/test_builds.py --write` on it."
    return f"Run the whole suite on it before you raise the pin.{write}"


# The command


def run(chosen: Namespace) -> int:
    """Make the environment, ask both torches, run the quick suite, print and save the page; 1 if anything
    fails.

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
    print(f"Running the quick suite on torch {now['torch']} …", flush=True)
    suite = quick_suite(python, QUICK_TARGETS, without_pictures(TEST_OPTIONS, place), place / "quick.txt")
    holds, text = page(before, now, suite, json.loads(KEPT.read_text(encoding="utf-8")))
    (place / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis page is {place / 'report.md'}, the suite's output quick.txt next to it.")
    return 0 if holds else 1


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1:])))
