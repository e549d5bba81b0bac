"""The simulated GPU is the same GPU on every build of torch: the sequence of what a step allocates, as a hash.

`python -m course_utils.benchmark.builds` prints the hashes of this interpreter's torch as JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

from ..interactive.course_files import ROOT
from ..measuring import measure
from ..measuring.simulated import availability
from ..run import TrainingRun
from .draw import shallow
from .tables import Table

OTHERS = "COURSE_OTHER_PYTHON"
"""The environment variable that names other interpreters to compare, each with a torch of its own."""


def build_runs() -> dict[str, TrainingRun]:
    """Runs of both families with every attention kernel, precision and kind of recomputation, by name."""
    gpt, llama = shallow("gpt2", 3), shallow("llama3.2-1b", 3)

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


def sequence_hash(run: TrainingRun) -> str:
    """A hash of what a simulated step of `run` allocates and frees: operator, bytes, kind, birth and death, in order.

    Raises like `measure`.
    """
    digest = hashlib.sha256()
    for item in measure(run, "simulated").allocations:
        digest.update(f"{item.operation} {item.bytes} {item.kind} {item.born} {item.died}\n".encode())
    return digest.hexdigest()[:16]


def hashes() -> dict[str, str]:
    """The hash of each of `build_runs`, by name; of one that cannot be simulated, "none: " and what was raised."""
    found = {}
    for name, run in build_runs().items():
        try:
            found[name] = sequence_hash(run)
        except Exception as error:  # shown in the hash's place, and as different from any hash
            found[name] = f"none: {type(error).__name__}: {error}"
    return found


def release() -> str:
    """torch's version line, "2.13" of 2.13.0+cpu: hashes are kept for each."""
    return ".".join(metadata.version("torch").split(".")[:2])


def report() -> dict[str, Any]:
    """The report that `python -m course_utils.benchmark.builds` prints: torch's version, its simulation, the hashes."""
    return {"torch": metadata.version("torch"), "how": availability()[1], "hashes": hashes()}


def other_interpreters() -> list[str]:
    """The interpreters that COURSE_OTHER_PYTHON names, separated as paths are; none if it is not set."""
    return [path for path in os.environ.get(OTHERS, "").split(os.pathsep) if path]


def report_of(python: str) -> dict[str, Any]:
    """The report of another interpreter. Raises RuntimeError with the end of its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COURSE_SOURCE": "simulated"}
    command = [python, "-W", "ignore", "-m", "course_utils.benchmark.builds"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{python} fails on the comparison of builds: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def builds_table() -> Table:
    """Each run's hash on this build and on the others that are installed; the note says whether they agree."""
    reports = [report(), *(report_of(python) for python in other_interpreters())]
    names = list(reports[0]["hashes"])
    rows = tuple((name, *(one["hashes"].get(name, "missing") for one in reports)) for name in names)
    agree = sum(len(set(row[1:])) == 1 for row in rows)
    versions = tuple(f"{one['torch']} ({one['how']})" for one in reports)
    note = (
        f"{agree} of {len(rows)} runs give the same sequence on all {len(reports)} builds."
        if len(reports) > 1
        else f"Only this build: set {OTHERS} to the paths of other interpreters to compare them."
    )
    title = "The simulated GPU on each build of torch"
    return Table("builds", title, ("run", *versions), rows, (note,), "simulated GPU")


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
