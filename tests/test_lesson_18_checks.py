"""The checks of lesson 18: right answers of every style pass, each wrong answer gets the hint it deserves."""

from typing import Any

import torch
from checking import Answers, JudgedAnswers
from torch import nn
from torch.nn import functional as F


def moments(
    steps: int = 2,
    without: bool = True,
    reset: str = "first",
    early: bool = False,
    zero: bool = True,
    drop: bool = True,
    hold: bool = False,
    late: bool = False,
    after: bool = False,
    counter: str = "memory_allocated",
    unit: float = 1,
    targets: bool = False,
) -> Any:
    """A referee, with one habit of its own."""
    lasting: dict[str, Any] = {}

    def answer(make_model: Any, make_batch: Any) -> dict[str, float]:
        now = getattr(torch.cuda, counter)
        if reset == "once":
            torch.cuda.reset_peak_memory_stats()
        base = now() if without else 0
        model = make_model()
        base = now() if after else base
        optimizer = torch.optim.AdamW(model.parameters())
        found: dict[str, float] = {}
        for _ in range(steps):
            if reset == "first":
                torch.cuda.reset_peak_memory_stats()
            found["begin"] = now()
            inputs, wanted = make_batch()
            if targets:
                lasting["targets"] = wanted
            if reset == "late":
                torch.cuda.reset_peak_memory_stats()
            if late:
                found["begin"] = now()
            out = model(inputs)
            loss = F.cross_entropy(out, wanted)
            if not hold:
                del out
            found["forward"] = now()
            loss.backward()
            found["backward"] = now()
            found["peak"] = torch.cuda.max_memory_allocated()
            optimizer.step()
            if zero:
                optimizer.zero_grad()
            if not early:
                found["peak"] = torch.cuda.max_memory_allocated()
            if drop:
                del inputs, wanted, loss
                out = None
        lasting.clear()
        return {name: unit * (size - base) for name, size in found.items()}

    return answer


def with_a_function(make_model: Any, make_batch: Any) -> dict[str, int]:
    """Each step is a call, so that nothing of it lives on."""
    before = torch.cuda.memory_allocated()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> list[int]:
        torch.cuda.reset_peak_memory_stats()
        sizes = [torch.cuda.memory_allocated()]
        inputs, targets = make_batch()
        loss = F.cross_entropy(model(inputs), targets)
        sizes.append(torch.cuda.memory_allocated())
        loss.backward()
        sizes.append(torch.cuda.memory_allocated())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [*sizes, torch.cuda.max_memory_allocated()]

    sizes = [step() for _ in range(3)][-1]
    return dict(zip(("begin", "forward", "backward", "peak"), (size - before for size in sizes), strict=True))


def forgets_the_batch(make_model: Any, make_batch: Any) -> dict[str, int]:
    """Makes the batch in a function that forgets it."""
    before = torch.cuda.memory_allocated()
    found = {}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def forward() -> Any:
        inputs, targets = make_batch()
        return F.cross_entropy(model(inputs), targets)

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        found["begin"] = torch.cuda.memory_allocated()
        loss = forward()
        found["forward"] = torch.cuda.memory_allocated()
        loss.backward()
        found["backward"] = torch.cuda.memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        found["peak"] = torch.cuda.max_memory_allocated()
        del loss
    return {moment: size - before for moment, size in found.items()}


def peak_with_base(make_model: Any, make_batch: Any) -> dict[str, float]:
    before = torch.cuda.memory_allocated()
    found = moments()(make_model, make_batch)
    return found | {"peak": found["peak"] + before}


REFEREE = Answers(
    right=[moments(), moments(steps=4), with_a_function],
    wrong=[
        (moments(steps=1), "You read the first step"),
        (moments(without=False), "what was on the GPU before your function was called"),
        (moments(reset="never"), "the counter keeps the maximum until it is reset"),
        (moments(early=True), "The optimizer's step has temporaries, too"),
        (moments(late=True), "Which of your variables hold a tensor then?"),
        (moments(after=True), "'begin' is too little"),
        (moments(reset="once"), "With a model whose making takes more"),
        (moments(targets=True), "Which of your variables hold a tensor then?"),
        (forgets_the_batch, "The batch is gone by then"),
        (peak_with_base, "Your peak counts what was on the GPU before"),
        (moments(reset="late"), "Before which lines do you read and reset"),
        (moments(zero=False), "Gradients are still there"),
        (moments(hold=True), "Which of your variables hold a tensor then?"),
        (moments(drop=False), "Which of your variables hold a tensor then?"),
        (moments(counter="memory_reserved"), "is too much. Which"),
        (moments(unit=1e-6), "MB where bytes"),
        (lambda make_model, make_batch: {"begin": 1, "forward": 2, "peak": 3}, "has no 'backward'"),
        (lambda make_model, make_batch: dict.fromkeys(MOMENTS, 10**6), "is too little"),
        (
            lambda make_model, make_batch: make_model()(make_batch()[0]).sum().item(),
            "your function raised StepError",
        ),
        (
            lambda make_model, make_batch: make_model(),
            "Called with a function, a function, your function returned",
        ),
        (lambda make_model: {}, "keep its first line"),
    ],
)
MOMENTS = ("begin", "forward", "backward", "peak")


class Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, x: Any) -> Any:
        return x + self.shift


class OneBias(nn.Module):
    """Only a shift at its end learns: layers that are frozen keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).requires_grad_(False)
        self.shift = Shift(512)

    def forward(self, x: Any) -> Any:
        return self.shift(self.frozen(x))


class Discards(nn.Module):
    """Layers that compute for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
        self.last = nn.Linear(512, 512)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            layer(x)
        return self.last(x)


def deep(layers: int = 32, h: int = 512, rows: int = 1024) -> Any:
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(h, h), nn.GELU())]
    return nn.Sequential(*pairs), torch.randn(rows, h)


BROKEN = {
    "batch": lambda: (nn.Linear(4096, 4096), torch.randn(256, 4096)),
    "layers": lambda: (nn.Sequential(*[Shift(1024) for _ in range(6)]), torch.randn(1024, 1024)),
    "gradients": deep,
}


def broken(**changes: Any) -> Any:
    return lambda: BROKEN | changes


def on_the_gpu() -> Any:
    return nn.Linear(4096, 4096, device="cuda"), torch.randn(64, 4096, device="cuda")


BREAKS = Answers(
    right=[
        broken(),
        broken(layers=lambda: (OneBias(), torch.randn(1024, 512))),
        broken(batch=on_the_gpu, gradients=lambda: deep(24, 1024, 2048)),
        broken(
            batch=lambda: (nn.Sequential(nn.Embedding(10**6, 16), nn.Flatten()), torch.arange(2**18)),
            layers=lambda: (nn.Sequential(*[Shift(1) for _ in range(9)]), torch.randn(2**20)),
        ),
    ],
    wrong=[
        (broken(batch=lambda: deep(4, 64, 8192)), "What does not grow with the batch?"),
        (broken(batch=lambda: (nn.Linear(4, 4), torch.randn(16, 4))), "smaller than 1 MB"),
        (broken(batch=lambda: (nn.Linear(4, 4), torch.randn(10**6, 5))), "your function raised RuntimeError"),
        (broken(batch=lambda: (nn.Linear(512, 512), torch.randn(10**6))[:1]), "should return a pair"),
        (broken(batch=lambda: nn.Linear(4096, 4096)), "but the exercise asks for a tuple"),
        (broken(layers=lambda: (torch.randn(512, 512), nn.Linear(512, 512))), "should return a pair"),
        (
            broken(layers=lambda: (Shift(1024), torch.randn(1024, 1024))),
            "x and the output are kept in any case",
        ),
        (broken(layers=lambda: deep(6)), "that are kept only once, or not at all"),
        (
            broken(layers=lambda: (nn.LayerNorm(1024), torch.randn(1024, 1024))),
            "Which bytes does a layer read that",
        ),
        (
            broken(layers=lambda: (Discards(), torch.randn(512, 512))),
            "gets no gradient. Use it, or freeze it",
        ),
        (
            broken(
                layers=lambda: (nn.Sequential(nn.ReLU(), nn.GELU()), torch.randn(512, 512).requires_grad_())
            ),
            "layers: no parameter of your model learns",
        ),
        (broken(gradients=lambda: deep(4, 512, 512)), "Then the optimizer adds temporaries"),
        (broken(gradients=lambda: deep(8, 64, 8192)), "yours are too small to matter"),
        (broken(gradients=BROKEN["batch"]), "Then the optimizer adds temporaries"),
        (broken(gradients=deep()), "without parentheses"),
        (lambda: {"batch": BROKEN["batch"]}, "has no 'layers' and no 'gradients'"),
        (lambda: list(BROKEN.values()), "but the exercise asks for a dictionary"),
    ],
)


def tensor_by_tensor(h: int, kv: int, ffn: int, a: int) -> int:
    fp32 = [h, 1, h, 1, a]
    bf16 = [h] * 4 + [kv, kv] + [ffn] * 4
    return 4 * sum(fp32) + 2 * sum(bf16)


def tally(norm: int = 4, statistic: int = 4, copies: int = 2, wide: bool = False, kernel: int = 4) -> Any:
    """The list, bullet by bullet, with something else for one of them."""

    def answer(h: int, kv: int, ffn: int, a: int) -> int:
        keys = h if wide else kv
        return 2 * (norm * h + statistic) + copies * 2 * h + 2 * (h + keys + keys + h) + kernel * a + 8 * ffn

    return answer


BYTES_A_TOKEN = Answers(
    right=[tally(), tensor_by_tensor, lambda h, kv, ffn, a: 2.0 * (8 * h + 2 * kv + 4 * ffn + 2 * a + 4)],
    wrong=[
        (tally(copies=0), "4·h is missing"),
        (tally(copies=5), "You have the lesson's 22·h"),
        (tally(copies=1), "2·h is missing"),
        (tally(norm=2), "4·h is missing"),
        (
            lambda h, kv, ffn, a: tally(copies=0)(h, kv, ffn, a) + 2 * (h + 2 * kv) + 4 * ffn,
            "A copy is as wide as its input",
        ),
        (lambda h, kv, ffn, a: tally()(h, kv, ffn, a) - 2 * ffn, "The part with ffn is off"),
        (lambda h, kv, ffn, a: tally()(h, kv, ffn, a) + 16, "The constant part is off"),
        (tally(wide=True), "With grouped queries they have kv numbers"),
        (tally(statistic=0), "The norms' statistics are missing"),
        (tally(kernel=0), "number for each head is missing"),
        (
            lambda h, kv, ffn, a: 2 * (h + 1) + 2 * h + 2 * (h + kv) + a + 4 * ffn,
            "You count elements, not bytes",
        ),
        (lambda h, kv, ffn, a: 34 * h, "The part with h is off"),
        (lambda h, kv, ffn, a: 8 * tally()(h, kv, ffn, a), "8 times too large"),
    ],
)

ANSWERS = {"18.1": REFEREE, "18.2": BREAKS, "18.3": BYTES_A_TOKEN}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
