"""A character-level language model that a CPU trains in a few seconds, and a text to train it on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from ...models import TransformerConfig
from ...networks import Transformer, build_network, default_dtype

CORPUS = Path(__file__).with_name("corpus.txt")
# A rate at which this model learns well in 100 steps. One fused kernel: 28 small weights cost little else.
ADAMW = partial(torch.optim.AdamW, lr=3e-3, fused=True)


@dataclass
class Training:
    """Result of a training: the loss before each step, and the model."""

    losses: list[float]
    model: Transformer

    @property
    def final(self) -> float:
        """The mean of the last ten losses, nan if one of them is: single losses jump with their batch."""
        last = self.losses[-10:]
        return sum(last) / len(last)


@cache
def corpus() -> str:
    """The course's short text, a few thousand characters, written for this purpose."""
    return " ".join(CORPUS.read_text(encoding="utf-8").split())


@cache
def vocabulary() -> str:
    """Every character of the text once, in order; a token is a place in it."""
    return "".join(sorted(set(corpus())))


def encode(text: str) -> torch.Tensor:
    """Token ids of `text`, one for each character. Raises ValueError for one that the corpus lacks."""
    return torch.tensor([vocabulary().index(character) for character in text])


def batches(
    steps: int, micro_batch: int = 16, seq_len: int = 32, seed: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield, per step, token ids of random windows of the text and the ids that follow them, each (b, s)."""
    tokens = encode(corpus())
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - seq_len, (micro_batch, 1), generator=dice)
        windows = tokens[starts + torch.arange(seq_len + 1)]
        yield windows[:, :-1], windows[:, 1:]


def language_model(layers: int = 2, hidden: int = 64, *, seed: int = 0) -> Transformer:
    """GPT-2's design at a toy's size, over characters; the same `seed` gives the same weights."""
    config = TransformerConfig(
        "characters", "gpt2", layers, hidden, 4, vocab=len(vocabulary()), max_positions=128
    )
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        torch.manual_seed(seed)
        return build_network(config, "eager")


def train_language_model(
    optimizer: Callable[[Sequence[torch.nn.Parameter]], Any] = ADAMW,
    steps: int = 100,
    *,
    model: Transformer | None = None,
) -> Training:
    """Train the character model on the CPU in fp32, about 20 ms per step, with `optimizer(parameters)`."""
    model = model or language_model()
    stepper = optimizer(list(model.parameters()))
    done = Training([], model)
    for tokens, targets in batches(steps):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        done.losses.append(loss.item())
        stepper.step()
        model.zero_grad()
    return done


def mean_loss(model: torch.nn.Module, seq_len: int = 32) -> float:
    """The mean loss over the course's text, in windows of `seq_len`; the rest is left out."""
    tokens = encode(corpus())
    count = (len(tokens) - 1) // seq_len * seq_len
    inputs = tokens[:count].view(-1, seq_len)
    targets = tokens[1 : count + 1]
    with torch.no_grad():
        return cross_entropy(model(inputs).flatten(0, 1), targets).item()


class HalfProducts(TorchFunctionMode):
    """Products of 16-bit matrices as matrix units make them: added up in fp32, rounded to 16 bits once.

    CPUs without 16-bit instructions take five to ten times as long for torch's own. Backward's products run
    in fp32 too, and each gradient is rounded where forward's operand was widened. Under autocast to 16 bits,
    fp32 operands are rounded first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        dtype = _sixteen_bits(args) if func in PRODUCTS else None
        if dtype is None:
            return func(*args, **options)
        wide = [value.to(dtype).float() if isinstance(value, torch.Tensor) else value for value in args]
        with torch.autocast("cpu", enabled=False):
            return func(*wide, **options).to(dtype)


def _sixteen_bits(operands: Sequence[Any]) -> torch.dtype | None:
    """Autocast's format or the operands' own, None where neither has 16 bits."""
    formats = {value.dtype for value in operands if isinstance(value, torch.Tensor)}
    if torch.is_autocast_enabled("cpu"):
        formats = {torch.get_autocast_dtype("cpu")}
    return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in formats), None)


PRODUCTS = frozenset({torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})
