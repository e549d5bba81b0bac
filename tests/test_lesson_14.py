"""Lesson 14: answers and their hints; the simulator against closed forms; its figures."""

from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from matplotlib.colors import to_hex
from torch.func import functional_call
from torch.nn.functional import mse_loss

from course_utils.lessons.pipelines.check_ranks import difference
from course_utils.lessons.pipelines.figures import (
    COLOUR,
    COLOURS_OF_HALVES,
    pipeline_figure,
    schedules_figure,
)
from course_utils.lessons.pipelines.schedules import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    bubble,
    follow,
    most_kept,
    simulate,
)
from course_utils.lessons.pipelines.widget import pipeline_player
from course_utils.lessons.shared.on_ranks import outcomes


# --------------------------------------------------------------------------------------------------
# 14.1: cut
def trying_all(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int] | None:
    """Goes from long first stages to short ones, the check from short to long.

    So they agree only if no two cuts of a case are equally fast.
    """
    best = None
    least = float("inf")
    for counts in product(range(len(times), 0, -1), repeat=p):
        if sum(counts) != len(times):
            continue
        spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        full = [sum(states[span]) + min(m, p - stage) * sum(kept[span]) for stage, span in enumerate(spans)]
        slowest = max(sum(times[span]) for span in spans)
        if max(full) <= capacity and slowest < least:
            best = list(counts)
            least = slowest
    return best


def equal_layers(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int]:
    return [len(times) // p + (stage < len(times) % p) for stage in range(p)]


CUT = Answers(
    right=trying_all,
    wrong=[
        (edited(trying_all, "min(m, p - stage)", "m"), "That is GPipe"),
        (equal_layers, "the same number of layers"),
        (lambda *given: trying_all(*given) or equal_layers(*given), "does not fit: add its states"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 14.2: order
def by_counting(p: int, m: int, stage: int) -> list[str]:
    """Forward while fewer are kept than may be, else backward."""
    works = []
    forward = 0
    backward = 0
    while backward < m:
        if forward < m and forward - backward < p - stage:
            works.append(f"F{forward}")
            forward += 1
        else:
            works.append(f"B{backward}")
            backward += 1
    return works


ORDER = Answers(
    right=by_counting,
    wrong=[
        (edited(by_counting, "p - stage", "m"), "that is GPipe"),
        (edited(by_counting, "p - stage", "stage + 1"), "Too few forwards"),
        (edited(by_counting, "p - stage", "p - stage + 1"), "Too many forwards"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 14.3: two_stages
def in_one_loop(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Rank 0 frees the numbers of what it has sent, and keeps the output itself."""
    waiting = []
    for part in data:
        if rank == 1:
            x = receive((len(part), layers[0].in_features)).requires_grad_()
            loss = mse_loss(layers(x), part, reduction="sum") / sum(one.numel() for one in data)
            loss.backward()
            send(x.grad)
            continue
        y = layers(part)
        send(y.detach().clone())
        y.untyped_storage().resize_(0)
        waiting.append(y)
        if len(waiting) == 2:
            waiting[0].backward(receive(waiting[0].shape))
            waiting.pop(0)
    for y in waiting:
        y.backward(receive(y.shape))


NOTHING: list[Any] = []  # which real ranks do not know

unweighted = edited(in_one_loop, "/ sum(one.numel() for one in data)", "/ part.numel() / len(data)")
all_first = edited(in_one_loop, "len(waiting) == 2", "len(waiting) > len(data)")
holding = edited(in_one_loop, "y.untyped_storage().resize_(0)", "pass")
only_here = edited(in_one_loop, "waiting = []", "waiting = [*NOTHING]")

TWO_STAGES = Answers(
    right=in_one_loop,
    wrong=[
        (unweighted, "also the smaller one"),
        (all_first, "Under 1F1B it goes backward sooner"),
        (holding, "Who holds y?"),
        (only_here, "raised NameError"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """Both that reach real ranks, by the same processes: a start takes seconds, and outcomes are kept."""
    outcomes(2, [(difference, in_one_loop), (difference, only_here)])


# --------------------------------------------------------------------------------------------------
# 14.4: stashed
def with_graphs(stage: Any, order: Any, inputs: Any, gradients: Any, rate: Any) -> dict[str, Any]:
    """Each forward's graph holds its version; `autograd.grad` adds nothing up."""
    now = {name: weight.detach().requires_grad_() for name, weight in stage.named_parameters()}
    flying = {}
    for work in order:
        i = int(work[1:])
        if work.startswith("F"):
            flying[i] = (now, functional_call(stage, now, inputs[i]))
            continue
        seen, y = flying.pop(i)
        slopes = torch.autograd.grad(y, list(seen.values()), gradients[i])
        moved = [weight - rate * slope for weight, slope in zip(now.values(), slopes, strict=True)]
        now = {name: weight.detach().requires_grad_() for name, weight in zip(now, moved, strict=True)}
    return now


REDONE = "flying.pop(i); seen = now; y = functional_call(stage, now, inputs[i])"

STASHED = Answers(
    right=with_graphs,
    wrong=[
        (edited(with_graphs, "in zip(now.values()", "in zip(seen.values()"), "are lost"),
        (edited(with_graphs, "weight - rate", "weight + rate"), "uphill"),
        (edited(with_graphs, "seen, y = flying.pop(i)", REDONE), "uses the newest weights"),
        (edited(with_graphs, "return now", "return list(now.values())"), "dict"),
    ],
)

ANSWERS = {"14.1": CUT, "14.2": ORDER, "14.3": TWO_STAGES, "14.4": STASHED}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# schedules
SIZES = ((1, 4), (4, 2), (4, 9))
"""Stages and micro-batches: one stage, fewer micro-batches than stages, more."""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_does_all_works_once_each_after_what_it_needs_and_keeps_the_closed_form(
    schedule: str, size: tuple[int, int]
) -> None:
    p, m = size
    pipeline = simulate(schedule, p, m)
    done = {(work.kind, work.stage, work.micro): work for work in pipeline.works}
    micros = [-1] if schedule == "naive" else range(m)
    assert set(done) == set(product("FB", range(p), micros))
    assert len(done) == len(pipeline.works)
    for (kind, stage, micro), work in done.items():
        before = (FORWARD, stage - 1, micro) if kind == FORWARD else (BACKWARD, stage + 1, micro)
        if before in done:
            assert work.start >= done[before].end
        if kind == BACKWARD:
            assert work.start >= done[FORWARD, stage, micro].end
    for stage in range(p):
        mine = pipeline.of_stage(stage)
        assert all(one.end <= other.start for one, other in pairwise(mine))
        assert pipeline.most_kept(stage) == most_kept(schedule, p, m, stage)
        assert pipeline.kept(stage)[-1][1] == 0


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bubble_is_the_formula_however_long_a_backward_takes(size: tuple[int, int]) -> None:
    p, m = size
    for schedule in ("GPipe", "1F1B"):
        pipeline = simulate(schedule, p, m, backward=3.0)
        assert pipeline.idle == pytest.approx(bubble(p, m), abs=1e-12)
        assert pipeline.span == pytest.approx((m + p - 1) * (1 + 3))
    assert simulate("naive", p, m).idle == pytest.approx(1 - 1 / p)


def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight_and_is_as_late() -> None:
    pipeline = simulate("PipeDream", 4, 60)
    assert [pipeline.versions(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [pipeline.late(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert simulate("PipeDream", 4, 500).idle < 0.01 < pipeline.idle
    flushed = simulate("1F1B", 4, 60)
    assert {flushed.versions(stage) for stage in range(4)} == {1}
    assert {flushed.late(stage) for stage in range(4)} == {0}


# --------------------------------------------------------------------------------------------------
# orders of any schedule
INTERLEAVED = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
HALVES = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")


def test_an_order_of_torch_takes_as_long_as_by_hand_and_keeps_a_part_for_each_chunk() -> None:
    pipeline = follow("interleaved", [order.split() for order in INTERLEAVED])
    # rank 1 waits half a unit for its first input, and then works for two micro-batches of 3 units; the
    # last gradient comes back in one more short backward
    assert pipeline.chunks == 2 and pipeline.micro_batches == 2
    assert pipeline.span == 0.5 + 6 + 1
    assert pipeline.most_kept(0) == 2 and pipeline.messages == 6
    halves = follow("zero bubble", [order.split() for order in HALVES])
    # its second stage: F0, I0, F1, I1, W0, W1 from 1 to 7, without a gap
    assert [(work.start, work.end) for work in halves.of_stage(1)] == [(t, t + 1) for t in range(1, 7)]
    assert halves.kept(1)[-1] == (7, 0) and halves.most_kept(1) == 2


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_following_the_orders_of_a_known_schedule_is_simulating_it(schedule: str) -> None:
    known = simulate(schedule, 3, 5)
    orders = [[f"{stage}{work}" for work in known.order(stage)] for stage in range(3)]
    assert follow(schedule, orders) == known


def test_what_is_no_order_is_refused() -> None:
    with pytest.raises(ValueError, match="'F0' is not a work"):
        follow("mine", [["F0"]])
    with pytest.raises(ValueError, match="equally many"):
        follow("mine", [["0F0", "2F0"], ["1F0"]])
    with pytest.raises(ValueError, match="each waits for another"):
        follow("mine", [["0B0", "0F0"], ["1F0", "1B0"]])


# --------------------------------------------------------------------------------------------------
# figure and player
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_picture_has_every_work_where_it_is_and_what_each_stage_keeps(schedule: str) -> None:
    pipeline = simulate(schedule, 4, 8)
    figure: Any = pipeline_figure(pipeline)
    assert f"{100 * pipeline.idle:.0f} %" in figure.alt
    works, memory = figure.axes
    most = max(pipeline.most_kept(stage) for stage in range(4))
    for stage, row, hill in zip(range(4), works.collections, memory.patches, strict=True):
        mine = pipeline.of_stage(stage)
        boxes = [path.get_extents() for path in row.get_paths()]
        assert [(box.x0, box.x1) for box in boxes] == [(work.start, work.end) for work in mine]
        assert {(box.y0, box.y1) for box in boxes} == {(stage + 0.06, stage + 0.94)}
        fills = [to_hex(color) for color in row.get_facecolors()]
        assert fills == [COLOUR[work.kind].lower() for work in mine]
        tops, times, base = hill.get_data()
        counts = [round((base - top) / 0.88 * most, 6) for top in tops]
        assert dict(zip(times, counts, strict=False)) == dict(pipeline.kept(stage)[:-1])
        versions = f" and {pipeline.versions(stage)}" if schedule == "PipeDream" else ""
        assert memory.texts[stage].get_text() == f"at most {pipeline.most_kept(stage):.0f}{versions}"
    assert ("4 versions" in figure.alt) == (schedule == "PipeDream")


def test_a_box_has_the_number_of_its_micro_batch() -> None:
    pipeline = simulate("GPipe", 2, 3)
    works = pipeline_figure(pipeline).axes[0]
    told = {(*text.get_position(), text.get_text()) for text in works.texts}
    assert told == {
        ((work.start + work.end) / 2, work.stage + 0.5, str(work.micro)) for work in pipeline.works
    }


def test_the_player_follows_its_sliders() -> None:
    player = pipeline_player("GPipe", 4, 8)
    assert "27.3 %" in player.message
    player.controls["schedule"].value = "1F1B"
    player.controls["stages"].value = 2
    assert player.pipeline.stages == 2 and player.pipeline.schedule == "1F1B"
    assert player.figure is not None and player.figure.alt.startswith("1F1B: stages wait 11 %")
    player.controls["backward"].value = 1
    assert player.pipeline.span == pytest.approx((8 + 2 - 1) * 2)


def test_one_figure_shows_several_schedules_on_one_axis() -> None:
    halves = follow("zero bubble", [order.split() for order in HALVES])
    figure: Any = schedules_figure([simulate("GPipe", 2, 2), halves], "Two")
    assert "GPipe: stages wait 33 %" in figure.alt and "zero bubble: stages wait 14 %" in figure.alt
    assert {ax.get_xlim() for ax in figure.axes} == {(0, 9)}
    fills = [to_hex(color) for row in figure.axes[1].collections for color in row.get_facecolors()]
    assert [fills.count(to_hex(COLOURS_OF_HALVES[kind])) for kind in "FIW"] == [4, 4, 4]
