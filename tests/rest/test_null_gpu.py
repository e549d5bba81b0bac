"""The command that runs the course on a GPU that does nothing, and one live step on it if it can be built."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from null_gpu import checks, missing, standing_in

from course_utils.evidence.tasks import recording_list

SITE = Path(sysconfig.get_path("platlib"))


def test_every_live_path_is_checked():
    names = [one.name for one in checks(Path("folder"))]
    assert len(names) == len(set(names))
    assert {"tests/test_live.py", "tests/test_own_step.py", "demos", "solutions/19_will_it_fit.ipynb"} <= set(
        names
    )
    kinds = {task.kind for task in recording_list()} - {"notebook"}
    assert {name.removeprefix("recorder: ") for name in names if name.startswith("recorder: ")} == kinds


ON_IT = """
import json, sys, torch
from course_utils import measure
from course_utils.run import TrainingRun
blocks = [torch.empty(30 << 20, device="cuda") for _ in range(3)]
addresses = [block.data_ptr() for block in blocks]
blocks.clear()
try:
    torch.empty(80 << 30, device="cuda")
    message = ""
except torch.OutOfMemoryError as error:
    message = str(error)
run = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
live, simulated = measure(run, "live"), measure(run, "simulated")
print(json.dumps({
    "name": torch.cuda.get_device_name(),
    "capability": torch.cuda.get_device_capability(),
    "memory": torch.cuda.mem_get_info()[1],
    "ascending": addresses == sorted(addresses),
    "message": message,
    "source": live.source,
    "equal": live.breakdown == simulated.breakdown and live.moments == simulated.moments,
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if reason := missing(SITE):
        pytest.skip(f"the null GPU cannot be built here: {reason}")
    return standing_in(SITE, tmp_path_factory.mktemp("null_gpu"))


def on_it(environment: dict[str, str], **knobs: str) -> dict[str, object]:
    code = [sys.executable, "-c", ON_IT]
    done = subprocess.run(
        code, env=environment | knobs, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_believes_in_an_h200_and_a_live_step_equals_the_simulated_one(environment):
    found = on_it(environment, NULL_ASC="1")
    assert found["name"] == "NVIDIA H200 (null)" and found["capability"] == [9, 0]
    assert found["source"] == "live" and found["equal"] and found["ascending"]
    assert "GPU 0 has a total capacity of 140.40 GiB" in str(found["message"])


def test_it_stands_for_any_other_card_too(environment):
    found = on_it(environment, NULL_NAME="a card", NULL_CAPABILITY="8.6", NULL_MEMORY=str(24 << 30))
    assert (found["name"], found["capability"], found["memory"]) == ("a card", [8, 6], 24 << 30)
    assert "GPU 0 has a total capacity of 24.00 GiB" in str(found["message"])


IN_RANKS = """
import json, sys, torch
from course_utils.ranks.launch import run_ranks
assert torch.cuda.is_available()
print(json.dumps([run_ranks(sys.argv[1], 2), run_ranks(sys.argv[2], 2)]))
"""
ON_ITS_GPU = """
import torch
from course_utils.ranks.worker import report
report([torch.cuda.device_count(), torch.empty(7, device="cuda").numel()])
"""
OF_ADAM = """
import torch
from course_utils.ranks.worker import report_on_gloo
def one_step():
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight], lr=0.5).step()
    return [torch.cuda.device_count(), round(weight.item(), 6)]
report_on_gloo(one_step)
"""


def test_cuda_works_in_ranks_that_want_it_and_does_not_start_in_others(environment, tmp_path):
    """A driver refuses each call of a process that was forked from one that has used it."""
    for name, text in (("card.py", ON_ITS_GPU), ("weights.py", OF_ADAM)):
        (tmp_path / name).write_text(text)
    programs = [str(tmp_path / name) for name in ("card.py", "weights.py")]
    done = subprocess.run(
        [sys.executable, "-c", IN_RANKS, *programs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[[1, 7]] * 2, [[0, 0.5]] * 2]
