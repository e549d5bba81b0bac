"""The simulated GPU is one and the same on every build of torch: what a step allocates, in order, as a hash.

After a change of the networks or of the step, `python tests/test_builds.py --write` renews the hashes of this torch.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for --write, which runs this file alone

from course_utils.benchmark import builds  # noqa: E402
from course_utils.measuring.simulated import availability  # noqa: E402
from course_utils.run import ATTENTIONS, PRECISIONS  # noqa: E402

KEPT = Path(__file__).with_name("build_hashes.json")
"""{"2.13": {name of a run: hash}}: what each version line of torch gave when last written."""


def kept() -> dict[str, dict[str, str]]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def write() -> None:
    """Renew the hashes of the torch that runs this."""
    everything = kept() | {builds.release(): told_apart(builds.hashes())}
    KEPT.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def told_apart(found: dict[str, str]) -> dict[str, str]:
    """The hashes, without those of runs that give what an earlier one gives: what makes them differ was ignored."""
    first = {value: name for name, value in reversed(found.items())}
    return {
        n: v if first[v] == n or v.startswith("none") else f"none: the same as {first[v]}" for n, v in found.items()
    }


def hashed(found: dict[str, str]) -> dict[str, str]:
    """Without the runs that could not be simulated."""
    return {name: value for name, value in found.items() if not value.startswith("none")}


def test_the_runs_cover_both_families_every_kernel_and_precision_and_most_recomputations():
    runs = builds.build_runs().values()
    assert {run.model.family for run in runs} == {"gpt2", "llama"}
    assert {run.attention for run in runs} == set(ATTENTIONS)
    assert {run.precision.name for run in runs} == set(PRECISIONS) - {"fp8"}  # nothing computes in fp8
    kinds = {"none", "full", "selective", "selective-attention", "sqrt", "offload", "every-2"}
    assert {run.recompute for run in runs} == kinds


@pytest.mark.skipif(not availability()[0], reason="nothing can be simulated here")
@pytest.mark.parametrize("name", builds.build_runs())
def test_a_step_allocates_what_it_did_when_the_hashes_were_written(name):
    of_this_torch = kept().get(builds.release())
    if of_this_torch is None:
        pytest.skip(f"no hashes for torch {builds.release()}: write them with tests/test_builds.py --write")
    assert builds.sequence_hash(builds.build_runs()[name]) == of_this_torch[name]


def test_every_run_has_a_hash_of_the_torch_that_is_pinned_and_of_each_other_that_is_kept():
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned and pinned[1] in kept()
    for release, found in kept().items():
        assert hashed(found).keys() == builds.build_runs().keys(), release


def test_a_choice_that_is_ignored_gets_no_hash():
    found = {"plain": "1f", "with a choice": "1f", "another": "2e"}
    assert told_apart(found) == {"plain": "1f", "with a choice": "none: the same as plain", "another": "2e"}


@pytest.mark.skipif(
    not builds.other_interpreters(), reason=f"no other build to compare with: set {builds.OTHERS} to interpreters"
)
def test_other_builds_give_the_same_sequences():
    here = builds.hashes()
    for python in builds.other_interpreters():
        other = builds.report_of(python)
        differing = [name for name, value in here.items() if other["hashes"][name] != value]
        assert not differing, f"torch {other['torch']} ({other['how']}) differs"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("Run it through pytest, or with --write to renew the hashes of this torch.")
    write()
