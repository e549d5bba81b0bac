"""The noun: what is trained and how. Every choice is listed and checked here and nowhere else."""

from dataclasses import dataclass, fields
from typing import Any

from .models import PRESETS, TransformerConfig, model_config
from .nearest import unknown


@dataclass(frozen=True)
class Precision:
    """A recipe of number formats: bytes an element, and who keeps an fp32 copy.

    `weight` and `gradient` are bytes per parameter; `compute` is the size of an element in matrix products;
    `autocast` names the 16-bit type that autocast computes in; `master` says that the optimizer keeps fp32 weights.
    """

    name: str
    weight: int
    gradient: int
    compute: int
    autocast: str = ""
    master: bool = False
    loss_scaling: bool = False


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", weight=4, gradient=4, compute=4),
        Precision("amp-bf16", weight=4, gradient=4, compute=2, autocast="bfloat16"),
        Precision("amp-fp16", weight=4, gradient=4, compute=2, autocast="float16", loss_scaling=True),
        Precision("bf16-master", weight=2, gradient=2, compute=2, master=True),
    )
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: `states` tensors per parameter, and how torch walks over them ("loop", "foreach" or "fused")."""

    name: str
    algorithm: str
    states: int
    implementation: str
    forced: bool = False


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", "adamw", 2, "foreach"),  # torch's own default on CUDA
        Optimizer("adamw-loop", "adamw", 2, "loop", forced=True),
        Optimizer("adamw-foreach", "adamw", 2, "foreach", forced=True),
        Optimizer("adamw-fused", "adamw", 2, "fused", forced=True),
        Optimizer("momentum", "sgd", 1, "foreach"),
    )
}

ATTENTIONS = ("eager", "flash", "efficient")
RECOMPUTES = ("none", "full")

LARGEST = {"seq_len": 100_000_000, "global_batch": 1_000_000_000}
"""Sizes beyond these, and any other beyond a million, are typing errors, not training runs."""


@dataclass(frozen=True)
class TrainingRun:
    """One training run on one rank: what `estimate` and `measure` take.

    `model` is a preset's name or a `TransformerConfig`; `micro_batch` (b) counts sequences of `seq_len` (s) tokens;
    `accumulation_steps` micro-batches make one step. `global_batch` may be given instead of `accumulation_steps`.
    Raises ValueError, in words, for every choice that is unknown, absurd or contradicts another.
    """

    model: TransformerConfig
    micro_batch: int = 1
    seq_len: int = 1024
    precision: Precision = PRECISIONS["amp-bf16"]
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    attention: str = "flash"
    recompute: str = "none"
    accumulation_steps: int = 1
    world_size: int = 1

    def __init__(
        self,
        model: str | TransformerConfig,
        micro_batch: int = 1,
        seq_len: int = 1024,
        precision: str | Precision = "amp-bf16",
        optimizer: str | Optimizer = "adamw",
        attention: str = "flash",
        recompute: str = "none",
        accumulation_steps: int | None = None,
        world_size: int = 1,
        global_batch: int | None = None,
    ) -> None:
        sizes = {"micro_batch": micro_batch, "seq_len": seq_len, "world_size": world_size}
        for name, value in sizes.items():
            _check_size(name, value)
        chosen: dict[str, Any] = {
            "model": model_config(model),
            **sizes,
            "precision": _one_of("precision", precision, PRECISIONS),
            "optimizer": _one_of("optimizer", optimizer, OPTIMIZERS),
            "attention": _one_of("attention", attention, {name: name for name in ATTENTIONS}),
            "recompute": _one_of("recompute", recompute, {name: name for name in RECOMPUTES}),
            "accumulation_steps": _accumulation(accumulation_steps, global_batch, micro_batch, world_size),
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        model, precision = self.model, self.precision
        if self.seq_len > model.max_positions:
            raise ValueError(
                f"a sequence of {self.seq_len:,} tokens is longer than the {model.max_positions:,} positions "
                f"of {model.name}"
            )
        if self.attention == "flash" and precision.compute != 2:
            raise ValueError(
                f"the flash kernel computes in 16 bits only, not in {precision.name}: "
                "choose attention='efficient' or 'eager', or a 16-bit precision such as 'amp-bf16'"
            )

        if self.attention == "flash" and model.head_size > 256:
            raise ValueError(f"heads of {model.head_size} elements: the flash kernel takes up to 256; choose 'eager'")
        if self.attention != "eager" and model.head_size % 8:
            raise ValueError(
                f"heads of {model.head_size} elements: the {self.attention} kernel takes multiples of 8; choose 'eager'"
            )

    @property
    def global_batch(self) -> int:
        """Sequences that one optimizer step learns from: micro_batch · accumulation_steps · world_size."""
        return self.micro_batch * self.accumulation_steps * self.world_size

    def replace(self, **changes: Any) -> "TrainingRun":
        """A copy with some choices changed, checked anew. Raises ValueError like the constructor, and for unknown
        fields.
        """
        names = [field.name for field in fields(self)]
        for name in changes:
            if name not in [*names, "global_batch"]:
                raise unknown("choice of a TrainingRun", name, [*names, "global_batch"])
        kept = {name: getattr(self, name) for name in names}
        if "global_batch" in changes:
            kept.pop("accumulation_steps")
        return TrainingRun(**(kept | changes))

    def code(self) -> str:
        """The line of code that makes this run, with only the choices that differ from the defaults."""
        default = {field.name: field.default for field in fields(self)}
        shown = [repr(self.model.name if PRESETS.get(self.model.name) == self.model else self.model)]
        for name, standard in default.items():
            value = getattr(self, name)
            if name != "model" and (value != standard or name in ("micro_batch", "seq_len")):
                shown.append(f"{name}={getattr(value, 'name', value)!r}")
        return f"TrainingRun({', '.join(shown)})"

    def __str__(self) -> str:
        parts = [
            self.model.name, f"b={self.micro_batch}", f"s={self.seq_len:,}", self.precision.name, self.optimizer.name,
            f"{self.attention} attention",
        ]  # fmt: skip
        parts += ["full recomputation"] if self.recompute == "full" else []
        parts += [f"{self.accumulation_steps} micro-batches"] if self.accumulation_steps > 1 else []
        parts += [f"{self.world_size} ranks"] if self.world_size > 1 else []
        return " · ".join(parts)


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it counts things, so it must be a whole number (an int)")
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    if value > LARGEST.get(name, 1_000_000):
        raise ValueError(f"{name} is {value:,}: more than {LARGEST.get(name, 1_000_000):,} cannot be meant")


def _one_of(what: str, value: Any, known: dict[str, Any]) -> Any:
    if any(value == choice for choice in known.values()):
        return value
    if not isinstance(value, str) or value not in known:
        raise unknown(what, value, known)
    return known[value]


def _accumulation(steps: int | None, global_batch: int | None, micro_batch: int, world_size: int) -> int:
    if global_batch is None:
        _check_size("accumulation_steps", 1 if steps is None else steps)
        return 1 if steps is None else steps
    if steps is not None:
        raise ValueError("give global_batch or accumulation_steps, not both: one follows from the other")
    _check_size("global_batch", global_batch)
    if global_batch % (micro_batch * world_size):
        raise ValueError(
            f"a global batch of {global_batch} sequences is not a multiple of micro_batch · world_size = "
            f"{micro_batch} · {world_size} = {micro_batch * world_size}"
        )
    steps = global_batch // (micro_batch * world_size)
    _check_size("accumulation_steps", steps)
    return steps
