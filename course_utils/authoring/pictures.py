"""The pictures of the front page, drawn from the course's own estimates: the build writes them, its check compares."""

from collections.abc import Callable
from pathlib import Path

from .. import TrainingRun, estimate
from ..figures import stack
from ..figures.canvas import Figure
from ..figures.runs import NOT_COUNTED
from ..gpus import gpu
from ..units import format_bytes

FOLDER = Path("docs", "images")


def gpt2_xl_stack() -> Figure:
    """GPT-2 XL's training step of 32 sequences of 1,024 tokens at its peak, five ways, beside a card of 32 GB."""
    card = gpu("RTX5090-32GB")
    run = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16")
    recomputed = run.replace(recompute="full")
    master = recomputed.replace(precision="bf16-master")
    runs = {
        "autocast, everything kept": run,
        "recomputed in backward": recomputed,
        "and 16-bit weights with a 32-bit master copy": master,
        "and the loss in 8 chunks": master.replace(loss_chunks=8),
        "or 8 micro-batches of 4 for 1 of 32": master.replace(micro_batch=4, accumulation_steps=8),
    }
    rows = {label: estimate(run) for label, run in runs.items()}
    fitting = [label for label, row in rows.items() if row.total <= card.room]
    if fitting != list(rows)[-2:]:
        raise ValueError(f"README says of this picture that the last two ways fit, and now these do: {fitting}")
    most, least = (format_bytes(pick(row.total for row in rows.values()), "GB", 1) for pick in (max, min))
    title = f"From {most} to {least}: the recipe decides whether GPT-2 XL trains on a 32 GB card"
    return stack(rows, title, capacity=card, provenance=f"estimated from formulas · {NOT_COUNTED}")


PICTURES: dict[str, Callable[[], Figure]] = {"gpt2-xl-stack.svg": gpt2_xl_stack}


def draw(root: Path) -> list[Path]:
    """Write every picture of the front page below `root` and return their paths; without a page there are none."""
    paths = _paths(root)
    for path, picture in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        picture().save(path)
    return list(paths)


def check(root: Path) -> list[str]:
    """How the pictures below `root` differ from what would be drawn: one line for each, none when they agree."""
    stale = [path for path, picture in _paths(root).items() if not path.exists() or _text(path) != picture().svg]
    return [f"{path.relative_to(root)} is not what would be drawn now" for path in stale]


def _paths(root: Path) -> dict[Path, Callable[[], Figure]]:
    """Where each picture belongs; nowhere in a tree without a front page."""
    return {root / FOLDER / name: picture for name, picture in PICTURES.items() if (root / "README.md").exists()}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
