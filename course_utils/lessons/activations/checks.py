"""Checks of lesson 05, "What does each operation keep?": each names the misconception."""

import tomllib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ... import SimulationUnavailable, StepError
from ...interactive.feedback import call, entries, exercise, expect, of_kind
from ...interactive.saved_tensors import saved_by
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import counted, forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 05.1: expressions

# those that the lesson has not shown, of two tensors of one shape
EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "tanh(x + y)": lambda x, y: torch.tanh(x + y),
    "relu(x) ** 2": lambda x, y: torch.relu(x) ** 2,
    "x * sigmoid(x)": lambda x, y: x * torch.sigmoid(x),
    "exp(x) + sin(x)": lambda x, y: torch.exp(x) + torch.sin(x),
    "sigmoid(x) / 3 + y": lambda x, y: torch.sigmoid(x) / 3 + y,
}
HINTS = tomllib.loads(Path(__file__).with_name("expressions.toml").read_text(encoding="utf-8"))


@exercise("05.1", "Autograd keeps exactly what you said, for every expression.")
def expressions(answer: Any) -> None:
    """`answer(n)` is a dictionary: bytes kept for each of EXPRESSIONS; x and y are n bf16 numbers."""
    sizes = {n: entries(call(answer, n=n, returns=Mapping), tuple(EXPRESSIONS)) for n in (1024, 4096)}
    expect(sizes[1024] != sizes[4096], "Your bytes are the same for every n. Do you use the argument?")
    for n, got in sizes.items():
        kept = {name: saved_by(work, (n,), (n,), dtype="bf16") for name, work in EXPRESSIONS.items()}
        right = {name: sum(item.bytes for item in items) for name, items in kept.items()}
        twice = "All are twice too large. How many bytes has a bf16 number? (`saved_by` defaults to fp32.)"
        expect(any(got[name] != 2 * right[name] for name in right), twice)
        for name, wanted in right.items():
            size = float(got[name])
            hint = HINTS.get(name, {}).get(f"{size / (2 * n):g}")
            expect(not hint, f"{name}: {hint}")
            expect(size != wanted / 2, f"{name}: return bytes, not numbers. A bf16 number takes two.")
            off = f"{name} is off. Go through its operations one by one, then count each storage once."
            expect(size == wanted, off)


# --------------------------------------------------------------------------------------------------
# 05.2: kept_by_module


class Heads(nn.Module):
    """Attention of one head, computed in its own forward: it keeps views of what `qkv` made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("scale", torch.linspace(1, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.dropout((q * self.scale @ k.mT).softmax(-1), 0.5, self.training) @ v


class Gated(nn.Module):
    """Two operations use one tensor: SiLU its input, and the product its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.act = nn.SiLU()
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        return self.down(self.act(wide) * wide)


def kept_cases() -> Mapping[str, nn.Module]:
    """Modules to ask, by what a message calls them; the input of each is (2, 5, 8)."""
    deep: OrderedDict[str, nn.Module] = OrderedDict()
    deep["heads"] = Heads()
    deep["mlp"] = nn.Sequential(Gated(), nn.Dropout(0.3))
    twice = nn.Linear(8, 8)
    relu = (nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 8), nn.Dropout(0.5))
    return {
        "attention and an MLP, nested": nn.Sequential(deep),
        "an MLP with ReLU": nn.Sequential(*relu),
        "one layer used twice": nn.Sequential(twice, nn.Tanh(), twice),
        "a module that keeps nothing": nn.Sequential(nn.Identity(), nn.Flatten()),
        "a model that computes between its children": Gated(),
    }


def kept_ledger(
    model: nn.Module,
    x: torch.Tensor,
    counts: Any = (),
    each: bool = False,
    views: bool = False,
    place: Any = -1,
) -> dict[str, int]:
    """Bytes that forward keeps, by module. The options are mistakes.

    `counts` names what existed before and is counted; `each` counts a storage at every use; `views` counts a
    view's own bytes; `place` is the running module that bytes go to, of a list from the outermost to the
    innermost, and None is all of them.
    """
    existing = {"x": [x], "parameters": model.parameters(), "buffers": model.buffers()}
    known = [tensor for kind, tensors in existing.items() if kind not in counts for tensor in tensors]
    seen = {tensor.untyped_storage() for tensor in known}
    kept = Counter[str]()
    running = list[str]()
    handles = list[Any]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage not in seen:
            keepers = running if place is None else [running[max(place, -len(running))]]
            for name in keepers:
                kept[name] += tensor.nbytes if views else storage.nbytes()
        if not each:
            seen.add(storage)
        return tensor.detach()  # an operation that keeps its own result would keep itself alive

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:  # must return None: a hook's result would replace the module's output
        running.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    for handle in handles:
        handle.remove()
    return dict(kept)


KEPT_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "you count some storages more than once: two operations may keep one storage.": {"each": True},
    "you count the bytes of a view. It keeps its complete storage in memory.": {"views": True},
    "you count each view, with its own bytes. Count the storage behind it, once.": {
        "each": True,
        "views": True,
    },
    "you count parameters, too. A transposed view still has the parameter's storage.": {
        "counts": ["parameters"]
    },
    "you count x, too, which existed before.": {"counts": ["x"]},
    "you count a buffer, too. It persists anyway, like a parameter.": {"counts": ["buffers"]},
    "you count what existed before: x, parameters and buffers.": {"counts": ["x", "parameters", "buffers"]},
    "you give bytes to the outermost module that runs. Where in the list is the innermost?": {"place": 0},
    "you give bytes to the module around the one that runs.": {"place": -2},
    "you give a module what its submodules keep, too. Each storage belongs to one name.": {"place": None},
}


@exercise("05.2", "Every storage counts once, under the name of the module that kept it.")
def kept_by_module(answer: Any) -> None:
    """`answer(model, x)` is a dictionary from names of modules to the bytes that their forward keeps."""
    for what, model in kept_cases().items():
        with seeded():
            x = torch.randn(2, 5, 8, requires_grad=True)
            wanted = kept_ledger(model, x)
            found = call(answer, model, x, returns=Mapping)
            sizes = {name: of_kind(found[name], int, f"With {what}, {name!r} is") for name in found}
            got = {name: size for name, size in sizes.items() if size}
            for message, mistake in KEPT_MISTAKES.items():
                expect(got == wanted or got != kept_ledger(model, x, **mistake), f"With {what}, {message}")
        strangers = sorted(map(repr, {*got} - {*dict(model.named_modules())}))
        expect(not strangers, f"With {what}: {', '.join(strangers)} is not a name of `named_modules()`.")
        off = next((name for name, _ in model.named_modules() if got.get(name, 0) != wanted.get(name, 0)), "")
        if got.get(off, 0) > wanted.get(off, 0):
            way = "too much. Does a storage count twice, or one from before?"
        elif off in got:
            way = "too little. Do you add up?"
        else:
            way = "nothing."
        only_names = got != wanted and sum(got.values()) == sum(wanted.values())
        expect(
            not only_names,
            f"With {what}, the sum is right, names are not. "
            "Which module's forward runs when a storage is kept for the first time?",
        )
        wrong = f"With {what}, {off!r} has {way} What is saved first while its own forward runs?"
        expect(got == wanted, wrong)


# --------------------------------------------------------------------------------------------------
# 05.3: lean

# tokens, h, ffn, training, eps
LEAN_CASES = ((200, 16, 256, False, 1e-2), (200, 16, 256, True, 1e-5), (1, 8, 200, True, 1e-5))
# bytes on top: per token, a norm's statistics; once, a state of the CPU's random numbers
AROUND = 4 * 8
STATE = 5056


class Wasteful(nn.Module):
    """x + W3·dropout(SiLU(n·W1) · n·W2), n being LayerNorm of x: right, and it keeps too much."""

    def __init__(self, h: int, ffn: int, rate: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h)
        self.rate = rate
        self.log: list[Any] = []
        self.gate = nn.Linear(h, ffn, bias=False)
        self.up = nn.Linear(h, ffn, bias=False)
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        normal = centered / (centered.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        normal = self.norm.weight * normal + self.norm.bias
        gate = self.gate(normal)
        up = self.up(normal)
        y = self.down(F.dropout(gate * torch.sigmoid(gate) * up, self.rate, self.training))
        self.log.append(y.abs().mean())
        return x + y


@exercise(
    "05.3", "Same output, gradients and log, each product once, and nothing kept that is cheap to compute."
)
def lean(answer: Any) -> None:
    """`answer(block, x)` is what `block(x)` is, and keeps 2·h + 3·ffn numbers per token."""
    for tokens, h, ffn, training, eps in LEAN_CASES:
        with seeded(h):
            block = Wasteful(h, ffn, 0.3).train(training)
            x = torch.randn(tokens, h) + 1
            block.norm.eps = eps
            nn.init.normal_(block.norm.weight)
            nn.init.normal_(block.norm.bias)
        wanted, least = counted(block, [x], block.parameters())
        log = block.log
        block.log = [0.5]
        run = partial(call, answer, block, returns=torch.Tensor)
        got, work = counted(run, [x], block.parameters())
        mine = list(block.log)
        if training:
            mode = "In training"
            which = "Does it drop what the block drops, at its rate, only in training?"
            why = "Does the second forward drop the same?"
        else:
            mode = "With `block.eval()`"
            which = "Is the norm complete (weight, bias, eps)? Is it SiLU, is x added, nothing dropped?"
            why = "Does x reach the output by both paths?"
        close = same([got.output], [wanted.output], 1e-4)
        expect(close, f"{mode}, the output differs. {which}")
        slopes = same(got.gradients, wanted.gradients, 1e-3)
        expect(
            slopes,
            f"{mode}, the output is right, but a gradient is not. {why} Do you keep everything in fp32?",
        )
        _expect_one_logged(mine, log[0].item())
        expect(work <= least, "A matrix product runs a second time. Run only cheap operations again.")
        # fp32 numbers per token beyond x, the norm's output, gate, up and down's input
        over = (got.kept - STATE - tokens * (4 * (2 * h + 3 * ffn) + AROUND)) / tokens / 4
        wide = "You keep one wide tensor too many. What can you compute again from gate and up?"
        expect(over < ffn / 2, wide)
        besides = "You keep too much besides the wide tensors. The norm's tensors, or copies of weights?"
        expect(over <= 0, besides)


def _expect_one_logged(log: list[Any], wanted: float) -> None:
    """Raise CheckFailed unless a step has appended `wanted` alone to a log that had one entry of 0.5."""
    expect(log[:1] == [0.5], "The old entries of `block.log` are gone. Append to it.")
    expect(len(log) == 2, f"A step must log one number. Yours logs {len(log) - 1}.")
    entry = log[1]
    if isinstance(entry, torch.Tensor):
        expect(entry.numel() == 1, f"Your log has a tensor of {entry.numel():,} numbers. Log one number.")
        graph = "Your log holds a graph, and everything that the graph keeps. A number is enough."
        expect(not entry.requires_grad, graph)
    logged = of_kind(entry, Real, "Your log's entry is")
    expect(abs(logged - wanted) < 1e-4, "You log another number than the block does.")


# --------------------------------------------------------------------------------------------------
# 05.4: LeanLoss


def plain_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of an fp32 copy, as in most code."""
    return F.cross_entropy(logits.float(), targets)


def peaks(loss: Callable[..., torch.Tensor]) -> tuple[float, float]:
    """Bytes per logit at the peaks of forward and backward on a simulated GPU, with the logits' own two."""
    with on_new_gpu(), torch.device("cuda"):
        logits = torch.randn(256, 2**21, dtype=torch.bfloat16, requires_grad=True)
        output = loss(logits, torch.randint(2**21, (256,)))
        forward = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output.backward()
        return forward / logits.numel(), torch.cuda.max_memory_allocated() / logits.numel()


def _loss_case(
    tokens: int, without: Any = (), factor: float = 4, more: float = 0, vocabulary: int = 9
) -> list[Any]:
    with seeded(tokens):
        targets = torch.randint(vocabulary, (tokens,))
        targets[list(without)] = -100
        return [(factor * torch.randn(tokens, vocabulary) + more).bfloat16(), targets]


def _slip(mine: Any, slope: Any) -> str:
    if torch.allclose(mine.double(), slope.double(), 0.01, 1e-6):
        return ""
    if same([mine], [slope], 0.03):
        return (
            "It is close, but computed in 16 bits. Compute it from an fp32 copy; only the result is 16-bit."
        )
    if same([-mine], [slope], 4e-3):
        return "Its sign is reversed. Do you multiply by the incoming gradient?"
    if ((mine != 0).any(-1) != (slope != 0).any(-1)).any():
        return "Rows with target -100 must have a gradient of 0."
    if same([mine * (slope.float().norm() / mine.float().norm())], [slope], 4e-3):
        return "It is off by one factor everywhere: the loss is a mean."
    return (
        "It is softmax, minus 1 at the target, "
        "over the number of tokens that count, times the incoming gradient."
    )


LOSS_HINTS = {
    "out of bounds": "A row has no entry -100. Look up another entry for that target, and do not count it."
}


@exercise(
    "05.4", "Loss and gradient are in fp32, with two bytes per logit kept, and at most eight at any moment."
)
def lean_loss(answer: Any) -> None:
    """`answer` is an `autograd.Function` whose `apply(logits, targets)` is the mean loss in fp32."""
    run = getattr(answer, "apply", answer)
    cases = {
        "With 6 tokens": _loss_case(6),
        "With one token": _loss_case(1),
        "With targets that do not count (-100)": _loss_case(7, (0, 3, 4)),
        "With logits around 30": _loss_case(8, (2,), 1.0, 30.0),
        "With large logits": _loss_case(5, (1,), 300.0),
    }
    for what, case in cases.items():
        _expect_loss_and_gradient(run, what, case)
    _expect_few_bytes(run)


def _expect_loss_and_gradient(run: Any, what: str, case: Sequence[torch.Tensor]) -> None:
    """Raise CheckFailed unless `run` computes the loss of `case` and its gradient as `plain_loss` does."""
    handed: list[torch.Tensor] = []

    def one_number(*given: torch.Tensor) -> torch.Tensor:
        handed.append(given[0].detach())
        loss = call(run, *given, returns=torch.Tensor, hints=LOSS_HINTS)
        several = f"{what}, your loss is not a single number. Return the mean over tokens."
        expect(loss.shape == (), several)
        endless = f"{what}, your loss is {loss.item()}. exp overflows, or you take the log of 0: see hint 3."
        expect(loss.isfinite(), endless)
        return loss

    wanted = forward_backward(plain_loss, case)
    got = forward_backward(one_number, case)
    more = float(got.output / wanted.output)
    logits, targets = case
    tops = logits.amax(-1)[targets >= 0].float().mean()
    moved = same([got.output - tops], [wanted.output], 1e-2)
    expect(not moved, f"{what}, the loss is wrong. Is z still unchanged where you look up the target?")
    if more > 1.5:
        why = " A sum, not a mean?"
    elif 0 < more < 0.95:
        why = " Average only tokens that count."
    else:
        why = ""
    expect(same([got.output], [wanted.output], 1e-2), f"{what}, the loss is wrong.{why}")
    exact = got.output.dtype == torch.float32 and same([got.output], [wanted.output], 1e-4)
    expect(exact, f"{what}, the loss is close, but computed in 16 bits. Compute with an fp32 copy.")
    mine = got.gradients[0]
    missing = f"{what}, the logits get no gradient. backward must return it first, then None."
    expect(mine is not None, missing)
    slip = _slip(mine, wanted.gradients[0])
    expect(not slip, f"{what}, the loss is right, but its gradient is not. {slip}")
    overwrites = f"{what}, backward overwrites the logits. Others may still need them."
    expect(torch.equal(handed[0], logits), overwrites)


def _expect_few_bytes(run: Any) -> None:
    """Raise CheckFailed unless `run` keeps two bytes per logit and never needs more than about eight."""
    number = 64 * 4096
    got = forward_backward(run, _loss_case(64, (5,), vocabulary=4096))
    large = "What you keep is as large as the fp32 copy. What can you recompute from 16 bits?"
    expect(got.kept < 3.9 * number, large)
    expect(got.kept <= 2 * number + 48 * 64, "Besides 16 bits per logit, keep only a few numbers per token.")
    wide = "at one moment two fp32 tensors of the logits' size exist."
    try:
        forward, backward = peaks(run)
    except (StepError, SimulationUnavailable) as error:
        print(f"Traced on the CPU: {error}")
        inside = _Inside()
        with inside:
            backward = forward_backward(run, _loss_case(64, (5,), vocabulary=4096)).peak / number
        forward = 2 + 2 * inside.most / number
    expect(forward <= 8.5, f"You keep little, but in forward {wide} `logsumexp` makes one inside.")
    again = f"You keep little, but in backward {wide} Which operations can overwrite their input?"
    expect(backward <= 8.5, again)


class _Inside(TorchDispatchMode):
    """Notes the most bytes given to logsumexp: it takes as many inside, which no trace on the CPU sees."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            self.most = max(self.most, args[0].nbytes)
        return func(*args, **(kwargs or {}))
