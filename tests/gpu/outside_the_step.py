"""Nineteen moments of a GPT's training run, most of them outside the step, for a card or a simulated GPU.

On a card: `python tests/gpu/outside_the_step.py` prints a JSON line for each moment.
`recorded/outside_the_step.jsonl` is what an H200 counted.
"""

import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course_utils.measuring.moments import measure_moments

WIDTH, BLOCKS, VOCABULARY, HEADS, BATCH, TOKENS = 1024, 8, 50304, 16, 8, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            z = block(z)
        return self.head(self.norm(z))


def batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), device="cuda")


def mixed() -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16)


class Training:
    """A model, its optimizer, and what a script does with them; `kept` is what a name keeps alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        """A new model and optimizer; the old ones are gone first, as in a new process."""
        self.model: Any = None
        self.optimizer: Any = None
        self.kept: Any = None
        gc.collect()
        torch.cuda.empty_cache()
        self.model = Gpt().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with mixed():
            return F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())

    def step(self) -> None:
        x = batch()
        self.loss(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, result: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.model.eval()
        results = []
        with torch.no_grad(), mixed():
            for x in self.kept:
                logits = self.model(x)
                results.append(result(logits))
        self.model.train()

    def losses_with_graphs(self) -> list[torch.Tensor]:
        return [self.loss(x) for x in self.kept]

    def save(self) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.path)

    def resume(self, device: str) -> None:
        self.kept = torch.load(self.path, map_location=device, weights_only=True)
        self.model.load_state_dict(self.kept["model"])
        self.optimizer.load_state_dict(self.kept["optimizer"])

    def keep_an_error(self) -> None:
        try:
            logits = self.model(batch())
            raise RuntimeError(f"the frame of this error has logits of shape {logits.shape}")
        except RuntimeError as error:
            sys.last_value = error

    def forget_the_error(self) -> None:
        sys.last_value = None
        gc.collect()

    def generate(self) -> None:
        self.model.eval()
        x = torch.randint(0, VOCABULARY, (BATCH, 16), device="cuda")
        with torch.no_grad(), mixed():
            for _ in range(64):
                x = torch.cat([x, self.model(x)[:, -1:].argmax(-1)], 1)
        self.model.train()


def moments(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The moments, under the names that the recording has; what is between them is not counted."""
    run = Training(path)
    for number in (1, 2, 3):
        yield f"step {number}", run.step
    run.kept = [batch() for _ in range(4)]
    yield "evaluation, no no_grad, losses kept", run.losses_with_graphs
    gc.collect()
    evaluations = {
        "fp32 logits kept on the GPU": lambda logits: logits.float(),
        "logits moved to the host": lambda logits: logits.float().cpu(),
        "only predictions kept": lambda logits: logits.argmax(-1),
    }
    for name, result in evaluations.items():
        yield f"evaluation, no_grad, {name}", lambda result=result: run.evaluate(result)
    yield "torch.save of both state dicts", run.save
    copied = lambda: len({name: one.clone() for name, one in run.model.state_dict().items()})  # noqa: E731
    yield "copy of the state dict on the GPU", copied
    yield "deepcopy for EMA", lambda: copy.deepcopy(run.model) and None
    run.begin()
    yield "resume, map_location cuda, checkpoint kept", lambda: run.resume("cuda")
    yield "step after it, checkpoint still named", run.step
    run.kept = None
    gc.collect()
    yield "step after it, checkpoint deleted", run.step
    run.begin()
    yield "resume, map_location cpu", lambda: run.resume("cpu")
    yield "step after it", run.step
    run.kept = None
    yield "an error kept in sys.last_value", run.keep_an_error
    run.forget_the_error()
    yield "after it is dropped", lambda: None
    yield "generation without a cache, 64 tokens, in the middle of training", run.generate
    yield "step, losses summed as tensors", lambda: [run.loss(batch()) for _ in range(3)]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for moment in measure_moments(moments(Path(folder) / "checkpoint.pt")).moments:
            print(json.dumps({"moment": moment.name, **vars(moment)}), flush=True)
