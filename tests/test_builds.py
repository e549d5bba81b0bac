"""The simulated GPU is one and the same on every build of torch: what a step allocates, in order, as a hash.

After a change of the networks or of the step, `python tests/test_builds.py --write` renews the hashes of this
torch.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for --write, which runs this file alone

from course_utils.evidence.frozen_runs import changed  # noqa: E402
from course_utils.evidence.sequence import release_line, sequence_hash  # noqa: E402
from course_utils.measuring.simulated import availability  # noqa: E402
from course_utils.run import ATTENTIONS, PRECISIONS, TrainingRun  # noqa: E402

KEPT = Path(__file__).with_name("build_hashes.json")
"""{"2.13": {name of a run: hash}}: what each version line of torch gave when last written."""


def build_runs() -> dict[str, TrainingRun]:
    """Runs of both families with every attention kernel, precision and kind of recomputation, by name."""
    gpt = changed("gpt2", layers=3)
    llama = changed("llama3.2-1b", layers=3)

    def run(model: Any, precision: str, attention: str, recompute: str = "none", **more: Any) -> TrainingRun:
        return TrainingRun(model, 4, 512, precision, attention=attention, recompute=recompute, **more)

    return {
        "gpt amp-bf16 flash": run(gpt, "amp-bf16", "flash"),
        "gpt bf16-master eager": run(gpt, "bf16-master", "eager"),
        "gpt amp-fp16 flash full": run(gpt, "amp-fp16", "flash", "full"),
        "gpt fp32 efficient": run(gpt, "fp32", "efficient"),
        "gpt tf32 eager": run(gpt, "tf32", "eager"),
        "gpt bf16-master cudnn selective": run(gpt, "bf16-master", "cudnn", "selective"),
        "gpt fp16-master flash every-2": run(gpt, "fp16-master", "flash", "every-2"),
        "gpt amp-bf16 fused efficient": run(gpt, "amp-bf16", "efficient", optimizer="adamw-fused"),
        "gpt bf16 flash clipped": run(gpt, "bf16", "flash", clip_grad_norm=1.0),
        "llama amp-bf16 flash": run(llama, "amp-bf16", "flash"),
        "llama bf16-master flash full": run(llama, "bf16-master", "flash", "full"),
        "llama amp-bf16 eager accumulated": run(llama, "amp-bf16", "eager", accumulation_steps=2),
        "llama bf16-master-fp32grad efficient": run(llama, "bf16-master-fp32grad", "efficient"),
        "llama amp-bf16 cudnn sqrt": run(llama, "amp-bf16", "cudnn", "sqrt"),
        "llama amp-bf16 eager selective-attention": run(llama, "amp-bf16", "eager", "selective-attention"),
        "llama bf16 flash offload": run(llama, "bf16", "flash", "offload"),
        "llama fp32 efficient momentum": run(llama, "fp32", "efficient", optimizer="momentum"),
        "llama amp-bf16 flash chunked loss": run(llama, "amp-bf16", "flash", loss_chunks=4),
    }


def hashes() -> dict[str, str]:
    """The hash of each of `build_runs`, by name; "none: " and what was raised where there is none."""
    found = {}
    for name, run in build_runs().items():
        try:
            found[name] = sequence_hash(run)
        except Exception as error:  # shown in the hash's place, and as different from any hash
            found[name] = f"none: {type(error).__name__}: {error}"
    return found


def kept() -> dict[str, dict[str, str]]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def write() -> None:
    """Renew the hashes of the torch that runs this."""
    everything = kept() | {release_line(): told_apart(hashes())}
    KEPT.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def told_apart(found: dict[str, str]) -> dict[str, str]:
    """The hashes, without those of runs that give what an earlier one gives: their choice was ignored."""
    first = {value: name for name, value in reversed(found.items())}
    apart = dict(found)
    for name, value in found.items():
        if first[value] != name and not value.startswith("none"):
            apart[name] = f"none: the same as {first[value]}"
    return apart


def hashed(found: dict[str, str]) -> dict[str, str]:
    """Without the runs that could not be simulated."""
    return {name: value for name, value in found.items() if not value.startswith("none")}


def test_the_runs_cover_both_families_every_kernel_and_precision_and_most_recomputations():
    runs = build_runs().values()
    assert {run.model.family for run in runs} == {"gpt2", "llama"}
    assert {run.attention for run in runs} == set(ATTENTIONS)
    assert {run.precision.name for run in runs} == set(PRECISIONS) - {"fp8"}  # nothing computes in fp8
    kinds = {"none", "full", "selective", "selective-attention", "sqrt", "offload", "every-2"}
    assert {run.recompute for run in runs} == kinds


@pytest.mark.parametrize("name", build_runs())
def test_a_step_allocates_what_it_did_when_the_hashes_were_written(name):
    if not availability()[0]:
        pytest.skip("nothing can be simulated here")
    of_this_torch = kept().get(release_line())
    if of_this_torch is None:
        pytest.skip(f"no hashes for torch {release_line()}: write them with tests/test_builds.py --write")
    assert sequence_hash(build_runs()[name]) == of_this_torch[name]


def test_every_run_has_a_hash_of_the_torch_that_is_pinned_and_of_each_other_that_is_kept():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==(\d+\.\d+)", constraints, re.MULTILINE)
    assert pinned and pinned[1] in kept()
    for version, found in kept().items():
        assert hashed(found).keys() == build_runs().keys(), version


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("Run it through pytest, or with --write to renew the hashes of this torch.")
    write()
