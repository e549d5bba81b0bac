"""Checks of the exercises of lesson 13, "Outside the step": they name misconceptions, never the answer."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from ...interactive.feedback import CheckFailed, Mistakes, call, entries, exercise, expect, fail, recognized
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import same, seeded

# --------------------------------------------------------------------------------------------------
# 13.1: peaks_of_a_run

# parameters, the step's peak, bytes of one batch's graph, numbers in one batch's logits, batches
RUNS = ((10_000, 500_000, 90_000, 7_000, 3), (2_000_000, 90_000_000, 31_000_000, 11_000_000, 8))
RUNS += ((1_000, 30_000, 5_000, 300, 1),)


def _moment(
    moment: str,
    N: int,
    step: int,
    graph: int,
    logits: int,
    batches: int,
    *,
    rest: int = 12,
    copy: int = 4,
    width: int = 4,
    one: bool = False,
) -> int:
    """The peak of a moment; on request with `rest` or `copy` bytes per parameter, `width` per logit."""
    times = 1 if one else batches
    return {
        "careless evaluation": rest * N + times * graph,
        "logits kept": rest * N + times * width * logits,
        "resume on the GPU": (rest + copy) * N,
        "step with a copy": step + copy * N,
    }[moment]


_PER_BATCH = {
    "the weights and moments are there during an evaluation, too.": {"rest": 0},
    "who frees a batch's tensors when the next one comes?": {"one": True},
    "weights are not all that lives between two steps.": {"rest": 4},
    "there are no gradients between two steps.": {"rest": 16},
}
SLIPS: Mapping[str, Mapping[str, Any]] = {
    "careless evaluation": _PER_BATCH,
    "logits kept": {**_PER_BATCH, "a number in fp32 has more bytes.": {"width": 2}},
    "resume on the GPU": {
        "the optimizer takes the loaded moments as they are. Who makes a copy?": {"copy": 12},
        "the file is loaded: which part of it is copied, and which is taken?": {"copy": 0},
        "the model's own weights are there before anything is loaded.": {"copy": 0, "rest": 12},
    },
    "step with a copy": {
        "an average has no moments and no gradients.": {"copy": 12},
        "an average has no gradients and no moments.": {"copy": 16},
        "the copy is in fp32.": {"copy": 2},
        "the copy is there in every step.": {"copy": 0},
    },
}


@exercise("13.1", "The largest of these is what the card must hold.")
def peaks_of_a_run(answer: Any) -> None:
    """`answer(N, step, graph, logits, batches)` is a dictionary of the peaks of four moments."""
    got = [entries(call(answer, *run, returns=dict), list(SLIPS)) for run in RUNS]
    for name, slips in SLIPS.items():
        mistakes: Mistakes = {
            f"{name}: {hint}": partial(_moment, name, **slip) for hint, slip in slips.items()
        }
        otherwise = f"{name}: what is alive at that moment? Write one term for each."
        recognized([each[name] for each in got], RUNS, partial(_moment, name), mistakes, otherwise)


# --------------------------------------------------------------------------------------------------
# What 13.2 and 13.3 run: a small network, on the CPU for values, on a simulated GPU for bytes


def _network(device: str, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    with seeded():
        layers = (nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, 2 * width))
        model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, device: str) -> None:
    model(torch.ones(4, width, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Weighed(NamedTuple):
    """Bytes that some work leaves, and its peak, both on top of what was allocated before."""

    result: Any
    left: int
    peak: int


def _weigh(work: Callable[[], Any]) -> _Weighed:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    return _Weighed(result, left, torch.cuda.max_memory_allocated() - before)


# --------------------------------------------------------------------------------------------------
# 13.2: resume

WIDTH = 512


def _saved(path: Path, device: str, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train two steps, and write the checkpoint whose number of steps is 2."""
    model, optimizer = _network(device, width)
    for _ in range(2):
        _step(model, optimizer, width, device)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(state, path)
    return model, optimizer


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


@exercise("13.2", "The checkpoint never was on the GPU as a whole, and nothing of it stays.")
def resume(answer: Any) -> None:
    """`answer(path, model, optimizer)` loads the checkpoint into both, and returns its number of steps."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        right_model, right_optimizer = _saved(path, "cpu", 8)
        model, optimizer = _network("cpu")
        step = call(answer, path, model, optimizer, returns=int, may_change=(1, 2))
        expect(step == 2, "Return the number of steps that is in the checkpoint.")
        loaded = same([*model.parameters()], [*right_model.parameters()])
        expect(loaded, "The model does not have the checkpoint's weights.")
        alike = same(_moments(optimizer), _moments(right_optimizer))
        expect(alike, "The optimizer does not have the checkpoint's moments: its next step starts from zero.")
        for steps in (0, 1):
            _expect_room(answer, path, steps)


def _expect_room(answer: Any, path: Path, steps: int) -> None:
    """CheckFailed if `answer` needs more of a GPU than the moments, after so many steps of a new model."""
    with on_new_gpu():
        _saved(path, "cuda", WIDTH)
        model, optimizer = _network("cuda", WIDTH)
        for _ in range(steps):
            _step(model, optimizer, WIDTH, "cuda")
        n = sum(weight.numel() for weight in model.parameters())
        work = partial(call, answer, path, model, optimizer, returns=int, may_change=(1, 2))
        seen = _weigh(work)
    moments = 8 * n if steps == 0 else 0
    stays = "Something of the checkpoint stays on the GPU after you return. Which name or attribute holds it?"
    expect(seen.left < moments + 2 * n, stays)
    whole = "The whole checkpoint is on the GPU while you load it. Where else can it be read to?"
    expect(seen.peak < 8 * n + 2 * n, whole)


# --------------------------------------------------------------------------------------------------
# 13.3: evaluate

BATCHES, ROWS = 5, 2_048


@exercise("13.3", "The peak is one batch's, whatever the number of batches.")
def evaluate(answer: Any) -> None:
    """`answer(model, batches)` is the class of every row, with dropout off, in the order of the batches."""
    with seeded(1):
        batches = [torch.randn(rows, 8) for rows in (3, 5, 1)]
    for training in (True, False):
        model, _ = _network("cpu")
        model.train(training)
        got = call(answer, model, batches, returns=torch.Tensor, may_change=(0,))
        back = "Leave the model as you found it: in training if it was, else not."
        expect(all(part.training is training for part in model.modules()), back)
        with torch.no_grad():
            right = torch.cat([model.eval()(batch).argmax(-1) for batch in batches])
        expect(got.shape == right.shape, f"Return one class for each of {len(right)} rows, in one tensor.")
        drops = "Some classes are off. Is dropout on, or is another axis the one of the classes?"
        expect(torch.equal(got.cpu(), right), drops)
    with on_new_gpu():
        model, _ = _network("cuda", WIDTH)
        batches = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(BATCHES)]
        with torch.no_grad():
            model(batches[0])  # cuBLAS makes its workspace
        seen = _weigh(partial(call, answer, model, batches, returns=torch.Tensor, may_change=(0, 1)))
    logits = 4 * ROWS * 2 * WIDTH
    kept = seen.peak / logits
    expect(kept < BATCHES, _what_piles_up(kept))
    two = "While a batch is computed, the last one's logits are still alive. Which name holds them?"
    expect(kept < 2, two)


def _what_piles_up(kept: float) -> str:
    """The hint for a peak of so many batches' logits: a graph keeps a batch's hidden tensors, too."""
    if kept > BATCHES + 1:
        return "Each batch leaves a graph for a backward that never comes."
    return (
        "You collect all logits, and take the classes at the end. How large is a class, how large are logits?"
    )


# --------------------------------------------------------------------------------------------------
# 13.4: peaks

MB = 2**20
# megabytes that the warm-up takes for a moment, and keeps; those that each of three ways takes
WARM_UPS = ((64, 4, (8, 32, 16)), (2, 0, (8, 4, 2)), (16, 16, (24, 8, 8)))


def _fill(size: int) -> torch.Tensor:
    return torch.empty(size * MB, dtype=torch.uint8, device="cuda")


class _Scene:
    """A warm-up that keeps something the first time, and ways that need memory for a moment."""

    def __init__(self, warm: int, kept: int, sizes: Sequence[int]) -> None:
        self.warm, self.kept = warm, kept
        self.held: list[torch.Tensor] = []
        self.ways = {f"way {number}": partial(self._take, size) for number, size in enumerate(sizes, 1)}

    def warm_up(self) -> None:
        self._take(self.warm)
        if not self.held:
            self.held.append(_fill(self.kept))

    def _take(self, size: int) -> None:
        _fill(size)


def _peaks(ways: Mapping[str, Any], warm_up: Any, mistake: str = "") -> dict[str, int]:
    """The peak of each way on top of what was there, as the exercise asks, or with a `mistake`."""
    found = {}
    for name, way in ways.items():
        if mistake == "reset first":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        warm_up()
        if mistake != "before":
            before = torch.cuda.memory_allocated()
        if mistake not in ("no reset", "reset first"):
            torch.cuda.reset_peak_memory_stats()
        way()
        found[name] = torch.cuda.max_memory_allocated() - (0 if mistake == "all" else before)
    return found


def _in_scene(scene: tuple[int, int, Sequence[int]], mistake: str = "", answer: Any = None) -> list[int]:
    with on_new_gpu():
        made = _Scene(*scene)
        if answer is None:
            return [*_peaks(made.ways, made.warm_up, mistake).values()]
        got = call(answer, made.ways, made.warm_up, returns=dict)
        return [*entries(got, [*made.ways], int).values()]


PEAK_MISTAKES = {
    "You read the largest peak so far, perhaps that of the warm-up or of an earlier way.": "no reset",
    "Your reset comes too early: the warm-up's own peak still counts.": "reset first",
    "You subtract what was allocated before the warm-up. What does a warm-up leave?": "before",
    "You count what was there before the way began.": "all",
}


@exercise("13.4", "Each peak is that of its own way, whatever ran before it.")
def peaks(answer: Any) -> None:
    """`answer(ways, warm_up)` is the peak of each way, after a warm-up, on top of what was there."""
    got = [_in_scene(scene, answer=answer) for scene in WARM_UPS]
    mistakes: Mistakes = {
        hint: partial(_in_scene, mistake=mistake) for hint, mistake in PEAK_MISTAKES.items()
    }
    cases = [(scene,) for scene in WARM_UPS]
    other = "Some peaks are off. Warm up, reset, read what is there, run, read the peak: for each way."
    recognized(got, cases, _in_scene, mistakes, other, lambda one, two: list(one) == list(two))


# --------------------------------------------------------------------------------------------------
# 13.5: weigh_models

ORDERS = ((256, 512, 256), (512, 256), (384,))


def _maker(width: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, torch.zeros(16, width, device="cuda")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _alone(width: int) -> tuple[int, int]:
    """The peak of a training, from before its model is made; and what it leaves if its names live."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training = _maker(width)
    _train(*training)
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@exercise("13.5", "Every model had the card to itself.")
def weigh_models(answer: Any) -> None:
    """`answer(makers, train)` is each training's peak, as if it were alone on the card."""
    for widths in ORDERS:
        with on_new_gpu():
            _alone(8)  # cuBLAS makes its workspaces
            alone = [_alone(width) for width in widths]
            makers = {f"model {number}": partial(_maker, width) for number, width in enumerate(widths, 1)}
            seen = _weigh(partial(call, answer, makers, _train, returns=dict))
        got = [*entries(seen.result, [*makers], int).values()]
        right = [peak for peak, _ in alone]
        before = [0, *(left for _, left in alone[:-1])]
        total = [sum(before[: place + 1]) for place in range(len(before))]
        others = {
            "The last model still counts when the next is weighed. How long does its name hold it?": before,
            "All earlier models still count. What holds them?": total,
        }
        for hint, extra in others.items():
            expect(extra == [0] or not _near(got, right, extra), hint)
        small = "A later model looks too small. You subtract what was there before. Was an old model in it?"
        later = any(mine < 0.98 * one for mine, one in zip(got[1:], right[1:], strict=True))
        expect(not later or got[0] < 0.98 * right[0], small)
        expect(_near(got, right, [0] * len(right)), "Some peaks are off: begin before the model is made.")
        expect(
            seen.left < 1000, "After you return, a model is still alive. Which name outlives your function?"
        )


def _near(got: Sequence[int], right: Sequence[int], extra: Sequence[int]) -> bool:
    """True if each number is the right one and so many bytes more, up to blocks that are a little larger."""
    pairs = zip(got, right, extra, strict=True)
    return all(abs(mine - one - more) < 0.02 * one + 4096 for mine, one, more in pairs)


# --------------------------------------------------------------------------------------------------
# 13.6: run_all


def _fails(note: Callable[[], None], chained: bool) -> Any:
    """Fill 32 MB and raise; `chained` as an error that another one has caused."""
    note()
    activations = _fill(32)
    try:
        raise ValueError(f"no such shape as {len(activations):,}")
    except ValueError as error:
        if chained:
            raise RuntimeError("the job has failed") from error
        raise


def _works(note: Callable[[], None]) -> str:
    note()
    _fill(8)
    return "done"


def _interrupts(note: Callable[[], None]) -> None:
    raise KeyboardInterrupt


def _jobs(alive: list[int]) -> Iterator[Callable[[], Any]]:
    def note() -> None:
        alive.append(torch.cuda.memory_allocated())

    for work in (_works, partial(_fails, chained=False), _works, partial(_fails, chained=True), _works):
        yield partial(work, note)


@exercise("13.6", "Every error can be read, and none of them holds a tensor.")
def run_all(answer: Any) -> None:
    """`answer(jobs)` runs all jobs, and lists what each returned, or its error, which holds no memory."""
    alive: list[int] = []
    with on_new_gpu():
        jobs = [*_jobs(alive)]
        got = call(answer, jobs, returns=list)
        gc.collect()
        left = torch.cuda.memory_allocated()
    expect(len(got) == len(jobs) == len(alive), "Run each job once, and return one entry for each.")
    expect([got[0], got[2], got[4]] == ["done"] * 3, "A job that works is not in your list as it returned.")
    kinds = [type(got[1]), type(got[3])]
    expect(
        kinds == [ValueError, RuntimeError], "In place of a result, return the error itself, not its text."
    )
    said = [str(got[1]), str(got[3])]
    told = said == [f"no such shape as {32 * MB:,}", "the job has failed"]
    expect(told, "An error has lost its message.")
    first = "After the first error, the failed job's tensors are still alive. Which frames does it hold?"
    expect(alive[2] == 0, first)
    cause = "An error may have a cause, and the cause has a traceback of its own."
    expect(alive[4] == 0 and left == 0, cause)
    _expect_interrupt(answer)


def _expect_interrupt(answer: Any) -> None:
    """CheckFailed unless the user can stop the jobs."""
    try:
        answer([partial(_interrupts, lambda: None)])
    except KeyboardInterrupt:
        return
    except Exception as error:
        raise CheckFailed(f"A user presses Ctrl-C, and {type(error).__name__} is raised.") from error
    fail("A user presses Ctrl-C, and your function goes on. Catch errors only: `Exception`.")
