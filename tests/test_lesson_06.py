"""Lesson 06: answers to its exercises, schedules against closed forms, and FLOPs counted on the CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from matplotlib.colors import to_hex
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from course_utils import PRESETS, TrainingRun
from course_utils.estimating.published import korthikanti_model_flops
from course_utils.estimating.step_time import recomputed_flops
from course_utils.figures.style import MARGIN, TITLE, WIDTH, text_width
from course_utils.lessons.recomputation.figures import DONE, KEPT, schedule_figure, schedule_title
from course_utils.lessons.recomputation.schedules import Schedule, keep_all, keep_every, keep_none
from course_utils.lessons.recomputation.widget import schedule_player
from course_utils.lessons.shared.recorded_front import FRONT, PROVENANCE
from course_utils.networks import build_network

aten = torch.ops.aten
RECORDED = Path(__file__).parent / "gpu" / "recorded"


# --------------------------------------------------------------------------------------------------
# 06.1: mlp
def mlp(x: Any, up: Any, down: Any) -> Any:
    """Hooks of one's own: GELU's output is not kept, but made again from its input."""
    z = up(x)
    y = F.gelu(z)
    place = y.data_ptr()

    def pack(kept: Any) -> Any:
        return None if kept.data_ptr() == place else kept

    def unpack(kept: Any) -> Any:
        return F.gelu(z.detach()) if kept is None else kept

    with saved_tensors_hooks(pack, unpack):
        return down(y)


def gelu_alone(x: Any, up: Any, down: Any) -> Any:
    return down(checkpoint(F.gelu, up(x), use_reentrant=False))


def all_in_one(x: Any, up: Any, down: Any) -> Any:
    return checkpoint(lambda x: down(F.gelu(up(x))), x, use_reentrant=False)


def up_and_gelu(x: Any, up: Any, down: Any) -> Any:
    return down(checkpoint(lambda x: F.gelu(up(x)), x, use_reentrant=False))


MLP = Answers(
    right=mlp,
    wrong=[
        (gelu_alone, "GELU's output is still kept"),
        (all_in_one, "You keep only x"),
        (up_and_gelu, "A matrix product runs again"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 06.2: in_groups
def in_groups(blocks: Any, x: Any, k: int) -> Any:
    """The last group, after all groups before it."""
    if not blocks:
        return x
    first = (len(blocks) - 1) // k * k
    x = in_groups(blocks[:first], x, k)
    return checkpoint(nn.Sequential(*blocks[first:]), x, use_reentrant=False)


def late_binding(blocks: Any, x: Any, k: int) -> Any:
    for first in range(0, len(blocks), k):
        group = nn.Sequential(*blocks[first : first + k])
        x = checkpoint(lambda x: group(x), x, use_reentrant=False)  # noqa: B023 (the trap of this exercise)
    return x


def past_the_end(blocks: Any, x: Any, k: int) -> Any:
    """The same trap with a counter, which is past the last group when backward begins."""
    first = 0

    def group(x: Any) -> Any:
        return nn.Sequential(*blocks[first : first + k])(x)

    while first < len(blocks):
        x = checkpoint(group, x, use_reentrant=False)
        first += k
    return x


def by_pytorch(blocks: Any, x: Any, k: int) -> Any:
    return checkpoint_sequential(nn.Sequential(*blocks), -(-len(blocks) // k), x, use_reentrant=False)


IN_GROUPS = Answers(
    right=in_groups,
    wrong=[
        (late_binding, "The output is right, but the gradients are not"),
        (past_the_end, "Backward ran something other than forward"),
        (by_pytorch, "`checkpoint_sequential` leaves out"),
        (edited(in_groups, "=False", "=True"), "No weight gets a gradient when x requires none"),
        (edited(in_groups, "=False", "=False, preserve_rng_state=False"), "draws other masks than the first"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 06.3: worth
def worth(least: float) -> Any:
    """FLOPs and bytes counted out, and the decision as True or False."""

    def keeps(ctx: Any, op: Any, *args: Any, **named: Any) -> bool:
        if op.overloadpacket not in (aten.mm, aten.addmm, aten.bmm):
            return False
        left, right = args[-2:]
        stack = left.shape[0] if left.dim() == 3 else 1
        numbers = stack * left.shape[-2] * right.shape[-1]
        return 2 * numbers * left.shape[-1] >= least * numbers * left.element_size()

    return keeps


WORTH = Answers(
    right=worth,
    wrong=[
        (edited(worth, " * left.element_size()", ""), "Compare FLOPs per *byte*"),
        (edited(worth, "left.element_size()", "4"), "Ask the tensor"),
        (edited(worth, ", **named: Any", ""), "a change of format with `dtype=…`"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 06.4: own_checkpoint
def own_checkpoint(function: Any, *inputs: Any) -> Any:
    """A Function, as the lesson begins it."""
    x = inputs[0]
    kind = x.device.type
    gpus = [x.device] if x.is_cuda else []
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
    formats = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            detached = [one.detach().requires_grad_(one.requires_grad) for one in ctx.saved_tensors]
            with torch.enable_grad(), formats, torch.random.fork_rng(gpus):
                torch.set_rng_state(on_cpu)
                if on_gpu is not None:
                    torch.cuda.set_rng_state(on_gpu, x.device)
                y = function(*detached)
            y.backward(*gradients)
            return tuple(one.grad for one in detached)

    return Again.apply(*inputs)


INPUTS_ALONE = "y.backward(*gradients, inputs=[one for one in detached if one.requires_grad])"
OWN_CHECKPOINT = Answers(
    right=own_checkpoint,
    wrong=[
        (lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False), "That is PyTorch's"),
        (edited(own_checkpoint, "y.backward(*gradients)", INPUTS_ALONE), "A weight that the function uses"),
        (edited(own_checkpoint, "torch.set_rng_state(on_cpu)", "pass"), "the second run draws other masks"),
        (edited(own_checkpoint, ", torch.random.fork_rng(gpus)", ""), "gets other random numbers"),
        (edited(own_checkpoint, ", formats", ""), "The second run has another autocast than the first"),
        (edited(own_checkpoint, "if on_gpu is not None", "if False"), "A GPU has random numbers of its own"),
    ],
)


ANSWERS = {"06.1": MLP, "06.2": IN_GROUPS, "06.3": WORTH, "06.4": OWN_CHECKPOINT}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code
@pytest.mark.parametrize("nodes", [1, 7, 24])
def test_schedules_cost_what_their_formulas_say(nodes: int) -> None:
    assert (keep_all(nodes).memory, keep_all(nodes).forwards) == (nodes, nodes)
    assert (keep_none(nodes).memory, keep_none(nodes).forwards) == (2, nodes + nodes * (nodes + 1) // 2)
    for k in range(1, nodes + 1):
        schedule = keep_every(nodes, k)
        # where k does not divide n, the last stretch is short, and the fuller of two moments counts
        whole, rest = divmod(nodes, k)
        assert schedule.memory == max(whole + k if whole else 0, whole + 1 + rest if rest else 0)
        assert schedule.forwards == 2 * nodes


@pytest.mark.parametrize("schedule", [keep_all(9), keep_none(9), keep_every(9, 4)])
def test_backward_finds_what_it_needs(schedule: Schedule) -> None:
    """b runs from last to first, each with its value; f runs from a checkpoint or after its neighbor."""
    backward = [tick for tick in schedule.ticks if tick.kind == "b"]
    assert [tick.node for tick in backward] == list(range(schedule.nodes, 0, -1))
    assert all(tick.node in tick.kept for tick in backward)
    in_hand = 1
    for tick in schedule.ticks:
        if tick.kind == "f":
            assert tick.node == in_hand or tick.node in tick.checkpoints
            in_hand = tick.node + 1


def test_the_figure_shows_the_tick() -> None:
    figure: Any = schedule_figure(keep_every(6, 2), 7)
    assert "Tick 7 of 18: f5 runs again. Values kept: 5. Checkpoints: 1, 3, 5." in figure.alt
    chain, curve = figure.axes
    assert [text.get_text() for text in chain.texts] == [
        f"{kind}{node}" for kind in "fb" for node in range(1, 7)
    ]
    forward, running, backward = chain.collections
    fills = [to_hex(color) for color in forward.get_facecolors()]
    assert fills == ["#ffffff"] * 4 + [KEPT.lower(), "#ffffff"]
    assert {to_hex(color) for color in backward.get_facecolors()} == {"#ffffff"}, "no backward has run"
    assert running.get_offsets().tolist() == [forward.get_offsets()[4].tolist()]
    nodes = [text.get_position()[0] for text in chain.texts[:6]]
    bars = chain.lines[0].get_xdata()
    assert [sum(node < bar for node in nodes) for bar in bars] == [0, 2, 4], "each left of its node"
    checkpoints, values = (part.get_data() for part in curve.patches)
    assert checkpoints.values.tolist() == values.baseline.tolist() == [1, 1, 2, 2, 3, 3, 3]
    assert values.values.tolist() == [1, 1, 2, 2, 3, 3, 4]


def test_backwards_that_have_run_are_marked() -> None:
    figure: Any = schedule_figure(keep_all(4), 7)  # b2 runs
    backward = figure.axes[0].collections[1]
    shown = [to_hex(color) for color in backward.get_facecolors()]
    assert shown == ["#ffffff"] * 2 + [DONE.lower()] * 2


@pytest.mark.parametrize("schedule", [keep_every(24, 12), keep_every(24, 24), keep_none(24)])
def test_the_picture_keeps_its_height_while_it_plays(schedule: Schedule) -> None:
    titles = [schedule_title(schedule, at) for at in range(1, len(schedule.ticks))]
    assert max(text_width(title, TITLE, bold=True) for title in titles) <= WIDTH - 2 * MARGIN


def test_the_player_follows_its_controls() -> None:
    player = schedule_player("keep every k", nodes=8, k=2, tick=3)
    assert "Tick 3 of 24: f3 runs. Work so far: 3 runs of f (0 repeated) and 0 of b." in player.message
    player.play.value = 9
    assert player.controls["tick"].value == 9
    player.controls["schedule"].value = "keep none"
    assert player.controls["k"].disabled, "k counts for nothing here"
    assert player.schedule == keep_none(8)
    assert player.controls["tick"].value == player.controls["tick"].max == len(player.schedule.ticks)
    with pytest.raises(ValueError, match="Known: keep all"):
        schedule_player("keep some")


def recorded_front() -> dict[str, dict[str, tuple[int, float, int]]]:
    """The recording that the lesson's table was copied from, under the lesson's names."""
    found: dict[str, dict[str, tuple[int, float, int]]] = {}
    for line in (RECORDED / "turns.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        choice = row["choice"]
        if row["group"] != "front" or choice["compiled"] == "blocks":
            continue
        how, name = "compiled" if choice["compiled"] else "eager", choice["recompute"]
        if choice["loss_chunks"] == 8:
            how = "loss in 8 chunks"
        if choice["budget"] != 1:
            how, name = "budget", f"{choice['budget']:g}"
        found.setdefault(how, {})[name] = row["peak_allocated"], row["step_ms"]["median"], row["kept"]
        torch_version = row["torch"].partition("+")[0]
        assert f"recorded on {row['device']} · torch {torch_version} · {row['date']}" == PROVENANCE
    return found


def test_the_front_is_the_recording() -> None:
    assert recorded_front() == FRONT


def counted_flops(run: TrainingRun) -> tuple[int, int]:
    """FLOPs of matrix products in forward and in backward, as the course's network runs on the CPU."""
    network = build_network(run.model, run.attention, run.recompute)
    with FlopCounterMode(display=False) as counter:
        loss = network(torch.zeros(run.micro_batch, run.seq_len, dtype=torch.int64)).square().mean()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def test_steps_and_recomputation_count_as_the_formulas_say() -> None:
    """torch's checkpoint stops before weights·v, the second of the core's two equal products."""
    model = replace(PRESETS["tiny-gpt"], layers=2, hidden=64, heads=4, vocab=100, ffn=256)
    run = TrainingRun(model, 2, 32, "fp32", attention="eager")
    forward, backward = counted_flops(run)
    assert backward == 2 * forward
    assert forward + backward == korthikanti_model_flops(run)
    for policy, part in {"full": 1, "every-2": 1, "selective": 1, "selective-attention": 2}.items():
        again = run.replace(recompute=policy)
        assert recomputed_flops(again) == part * (sum(counted_flops(again)) - forward - backward), policy
