"""Checks of the exercises of lesson 18, "Who is right?": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...interactive.feedback import Mistakes, call, entries, exercise, expect, fail, recognized, unit_slip
from ...watching.on_gpu import on_new_gpu

# --------------------------------------------------------------------------------------------------
# 18.1: referee
MOMENTS = ("begin", "forward", "backward", "peak")


def _batch(rows: int, width: int, classes: int, of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, chosen from `of` times as many, and targets."""
    inputs = torch.randn(of, rows, width, device="cuda")[0].clone()
    return inputs, torch.randint(classes, (rows,), device="cuda")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cuda")


def _with_scratch() -> nn.Module:
    torch.empty(2**28, dtype=torch.uint8, device="cuda")  # gone at once
    return _mlp()


TRAININGS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "a wide layer, 8 tokens": (partial(nn.Linear, 2048, 2048, device="cuda"), partial(_batch, 8, 2048, 2048)),
    "a small MLP, 4,096 tokens": (_mlp, partial(_batch, 4096, 256, 256)),
    "a large vocabulary": (partial(nn.Linear, 64, 32_000, device="cuda"), partial(_batch, 512, 64, 32_000)),
    "a batch chosen from a large table": (_mlp, partial(_batch, 64, 256, 256, of=200)),
    "a model whose making takes more than its training": (_with_scratch, partial(_batch, 64, 256, 256)),
    "few classes and many tokens": (partial(nn.Linear, 8, 4, device="cuda"), partial(_batch, 2**18, 8, 4)),
}


def _referee(make_model: Callable[[], nn.Module], make_batch: Callable[[], Any], mistake: str = "") -> Any:
    """Bytes at MOMENTS of a step like all later ones; on request with a `mistake`."""
    base = torch.cuda.memory_allocated()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = list[int]()
    for _ in range(1 if mistake == "first step" else 2):
        if mistake != "no reset":
            torch.cuda.reset_peak_memory_stats()
        sizes = [torch.cuda.memory_allocated()]
        inputs, targets = make_batch()
        loss = F.cross_entropy(model(inputs), targets)
        sizes.append(torch.cuda.memory_allocated())
        loss.backward()
        sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        optimizer.step()
        if mistake != "gradients stay":
            optimizer.zero_grad()
        if mistake != "until backward":
            sizes[3] = torch.cuda.max_memory_allocated()
        del inputs, targets, loss
    before = {"older": (0, 0), "older peak": (base, 0)}.get(mistake, (base, base))
    return dict(zip(MOMENTS, [*(size - before[0] for size in sizes[:3]), sizes[3] - before[1]], strict=True))


def _on_used_gpu(answer: Any, name: str) -> list[float]:
    """An answer's readings of a training, on a GPU that has been used: something is there, a GB was."""
    with on_new_gpu():
        _referee(*TRAININGS["a small MLP, 4,096 tokens"])  # makes cuBLAS's workspaces
        held = torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda")
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        found = entries(call(answer, *TRAININGS[name], returns=Mapping), MOMENTS)
        del held
    return [float(size) for size in found.values()]


def _mistaken(mistake: str) -> Callable[[str], list[float]]:
    return partial(_on_used_gpu, partial(_referee, mistake=mistake))


REFEREE_MISTAKES: Mistakes = {
    "You read the first step, which begins without Adam's states. Later steps are different.": (
        _mistaken("first step")
    ),
    "You also count what was on the GPU before your function was called.": _mistaken("older"),
    "Your peak counts what was on the GPU before your function was called.": _mistaken("older peak"),
    "Your peak is from before the step: the counter keeps the maximum until it is reset.": (
        _mistaken("no reset")
    ),
    "Your peak is the peak up to the end of backward. The optimizer's step has temporaries, too.": (
        _mistaken("until backward")
    ),
    "Gradients are still there when your next step begins.": _mistaken("gradients stay"),
}


def _near(got: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """True if all readings agree to 2 % of the peak, which forgives blocks larger than their tensor."""
    pairs = [
        (one, right, rights[3])
        for ones, rights in zip(got, wanted, strict=True)
        for one, right in zip(ones, rights, strict=True)
    ]
    return all(abs(one - right) <= 0.02 * peak for one, right, peak in pairs)


@exercise("18.1", "Four moments of a step that is like all later ones, whatever was on the card before.")
def referee(answer: Any) -> None:
    """`answer(make_model, make_batch)` is a dictionary: bytes at MOMENTS."""
    right = partial(_on_used_gpu, _referee)
    got = [_on_used_gpu(answer, name) for name in TRAININGS]
    slip = unit_slip(got[0][0], right(next(iter(TRAININGS)))[0])
    expect(slip is None, f"Your bytes are {slip}")
    if recognized(got, [(name,) for name in TRAININGS], right, REFEREE_MISTAKES, same=_near):
        return
    more = "too much. Which of your variables hold a tensor then?"
    few = "too little. Before which lines do you read and reset? Do batch and loss keep their names?"
    for name, mine in zip(TRAININGS, got, strict=True):
        wanted = right(name)
        for moment, reading, size in zip(MOMENTS, mine, wanted, strict=True):
            off = f"With {name}, {moment!r} is {more if reading > size else few}"
            expect(abs(reading - size) <= 0.02 * wanted[3], off)


# --------------------------------------------------------------------------------------------------
# 18.2: breaks


class Step(NamedTuple):
    """Bytes of a second step: inputs of its layers with parameters, what forward keeps, gradients, the peak.

    `above` says how far the peak is above the end of forward, in gradients.
    """

    inputs: int
    kept: int
    gradients: int
    peak: int
    above: float


def second_step(make: Any, name: str, times: int = 1) -> Step:
    """Bytes of the second step of a learner's model on `times` its input, cuBLAS's workspaces aside."""
    # Makes the workspaces, which stay.
    nn.Linear(1, 1, device="cuda")(torch.ones(1, 1, device="cuda")).backward()
    base = torch.cuda.memory_allocated()
    inputs = list[int]()
    pair = call(make, returns=tuple)
    right = len(pair) == 2 and isinstance(pair[0], nn.Module) and isinstance(pair[1], torch.Tensor)
    expect(right, f"{name}: your function should return a pair, a module and a tensor.")
    model = pair[0].to("cuda")
    x = torch.cat([pair[1].to("cuda")] * times)
    small = f"{name}: your input is smaller than 1 MB. At that size, blocks of 512 bytes decide."
    expect(x.nbytes >= 10**6, small)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    expect(learning, f"{name}: no parameter of your model learns.")
    optimizer = torch.optim.AdamW(learning)
    begin = 0
    kept = 0
    gradients = 0
    for layer in model.modules():
        if list(layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].nbytes))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        inputs.clear()
        begin = torch.cuda.memory_allocated()
        loss = call(model, x, returns=torch.Tensor, may_change=(0,)).square().mean()
        expect(loss.requires_grad, f"{name}: no gradient can flow from your model's output.")
        kept = torch.cuda.memory_allocated() - begin
        loss.backward()
        idle = any(weight.grad is None for weight in learning)
        expect(not idle, f"{name}: a parameter that should learn gets no gradient. Use it, or freeze it.")
        gradients = sum(weight.grad.nbytes for weight in learning if weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    above = (peak - begin - kept) / max(1, gradients)
    return Step(sum(inputs), kept + x.nbytes, gradients, peak - base, above)


@exercise("18.2", "Three rules, and for each one a model that it was not made for.")
def breaks(answer: Any) -> None:
    """`answer()` is a dictionary: for each rule a function that makes a model and an input that break it."""
    made = entries(call(answer, returns=Mapping), ("batch", "layers", "gradients"), object)
    with on_new_gpu():
        once, layers, one = (second_step(made[name], name) for name in made)
        more = second_step(made["batch"], "batch", times=2).peak / once.peak
    grows = f"batch: twice the batch takes {more:.2f} times the memory. What does not grow with the batch?"
    expect(more <= 1.2, grows)
    part = layers.kept / max(1, layers.inputs)
    expect(
        part <= 0.5,
        f"layers: forward keeps {part:.2f} bytes per byte that its layers read. "
        "Which bytes does a layer read that are kept only once, or not at all? "
        "And x and the output are kept in any case.",
    )
    few = "gradients: yours are too small to matter. Take more parameters, or less input."
    expect(one.gradients > one.kept / 10, few)
    expect(
        one.above < 0.5,
        f"gradients: the peak is {one.above:.2f} times their bytes above the end of forward. "
        "In backward, activations disappear as gradients appear. Then the optimizer adds temporaries.",
    )


# --------------------------------------------------------------------------------------------------
# 18.3: bytes_a_token
TOKEN_CASES = ((4096, 1024, 14336, 32), (2048, 512, 8192, 32), (3584, 512, 18944, 28), (1000, 1000, 2700, 10))


def _token(
    h: int = 16, kv: int = 4, ffn: int = 8, a: int = 4, one: int = 8
) -> Callable[[int, int, int, int], int]:
    """An answer: so many bytes for each of h, kv, ffn and a, and so many more."""
    return lambda *sizes: one + sum(size * each for size, each in zip(sizes, (h, kv, ffn, a), strict=True))


token_right = _token()
TOKEN_MISTAKES: Mistakes = {
    "You have the lesson's 22·h, where five matrices make a copy. How many read a norm's output here?": (
        _token(h=22)
    ),
    "4·h is missing. The norms' inputs are fp32, and each of two matrices makes a 16-bit copy.": _token(h=12),
    "Your copies are as wide as the matrix's output. A copy is as wide as its input.": _token(
        h=14, kv=8, ffn=12
    ),
    "Your keys and values are as wide as the queries. With grouped queries they have kv numbers.": _token(
        h=20, kv=0
    ),
    "You count elements, not bytes. Which elements have 2 bytes, which 4?": _token(
        h=6, kv=2, ffn=4, a=1, one=2
    ),
}


@exercise("18.3", "Every byte is found, and autocast keeps more of them than most texts say.")
def bytes_a_token(answer: Any) -> None:
    """`answer(h, kv, ffn, a)` is what a block with fused matrices keeps for one token under autocast."""
    got = [call(answer, *case) for case in TOKEN_CASES]
    first = TOKEN_CASES[0]
    if recognized(got, TOKEN_CASES, token_right, TOKEN_MISTAKES):
        return
    slip = unit_slip(got[0], token_right(*first))
    expect(slip is None, f"Your bytes are {slip}")
    for place, letter in enumerate(("h", "kv", "ffn", "a")):  # the sum is linear in each
        wider = list(first)
        wider[place] += 64
        mine = call(answer, *wider) - call(answer, *first)
        off = f"The part with {letter} is off. How many tensors have that width, and in which format?"
        expect(mine == token_right(*wider) - token_right(*first), off)
    fail("The constant part is off. What is kept once per token, whatever the sizes?")
