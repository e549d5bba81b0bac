"""The noun: what is trained and how. Every choice is listed and checked here and nowhere else."""

import dataclasses
import math
import re
import sys
from dataclasses import dataclass, fields
from html import escape
from os import PathLike
from typing import Any

from .errors import check_known, unknown
from .gpus import gpu
from .model_files import model_config
from .models import LOGITS, PRESETS, TransformerConfig, attention_shapes, mlp_shapes


@dataclass(frozen=True)
class Precision:
    """A recipe of number formats: bytes an element, and who keeps an fp32 copy.

    `weight` and `gradient` are bytes per parameter, `state` those of each of the optimizer's moments
    (`first_moment` those of the first, where it differs); `compute` is the size of an element in matrix
    products; `autocast` names the 16-bit type that autocast computes in; `master` is the size of the
    optimizer's own copy of a weight, 0 if it keeps none.
    """

    name: str
    weight: int
    gradient: int
    compute: int
    dtype: str = "float32"
    autocast: str = ""
    master: int = 0
    state: int = 4
    first_moment: int = 0
    loss_scaling: bool = False
    tf32: bool = False


_RECIPES = (
    Precision("fp32", weight=4, gradient=4, compute=4),
    # fp32 in memory, 19 bits in matrix products
    Precision("tf32", weight=4, gradient=4, compute=4, tf32=True),
    Precision("amp-bf16", weight=4, gradient=4, compute=2, autocast="bfloat16"),
    Precision("amp-fp16", weight=4, gradient=4, compute=2, autocast="float16", loss_scaling=True),
    Precision("bf16-master", weight=2, gradient=2, compute=2, dtype="bfloat16", master=4),
    Precision("fp16-master", weight=2, gradient=2, compute=2, dtype="float16", master=4, loss_scaling=True),
    Precision("bf16-master-fp32grad", weight=2, gradient=4, compute=2, dtype="bfloat16", master=4),
    Precision("bf16", weight=2, gradient=2, compute=2, dtype="bfloat16", state=2),
    # Peng et al. 2023 (FP8-LM), and level O3 in the table of their MS-AMP's documentation ("Optimization
    # Level"): fp8 weights, gradients and first moments, fp16 master weights and second moments,
    # 1 + 1 + 2 + 1 + 2 = 7 bytes (their scales, one number a tensor, left out). States are accounted for;
    # nothing here computes in fp8.
    Precision(
        "fp8", weight=1, gradient=1, compute=2, dtype="float8_e4m3fn", master=2, state=2, first_moment=1
    ),
)

PRECISIONS = {precision.name: precision for precision in _RECIPES}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its algorithm, and how torch walks over the parameters ("loop", "foreach" or "fused").

    `forced` says that the implementation was asked for by name and is not torch's own choice.
    """

    name: str
    algorithm: str
    implementation: str = "foreach"
    forced: bool = False


def _forced(algorithm: str) -> tuple[Optimizer, ...]:
    """The optimizer as torch would run it on CUDA, and with each implementation forced."""
    implementations = ("loop", "foreach", "fused")
    forced = [Optimizer(f"{algorithm}-{how}", algorithm, how, forced=True) for how in implementations]
    return (Optimizer(algorithm, algorithm), *forced)


_OPTIMIZERS = (
    *_forced("adamw"),
    *_forced("adam"),
    Optimizer("momentum", "momentum"),
    Optimizer("sgd", "sgd"),
    Optimizer("adafactor", "adafactor", "loop"),
    Optimizer("adam8bit", "adam8bit", "loop"),
    Optimizer("lion", "lion", "loop"),
    Optimizer("muon", "muon", "loop"),
)

OPTIMIZERS = {optimizer.name: optimizer for optimizer in _OPTIMIZERS}

ATTENTIONS = ("eager", "flash", "efficient", "cudnn")

RECOMPUTES = ("none", "full", "selective", "selective-attention", "sqrt", "offload")
"""Kinds of recomputation in backward, next to "every-K", a checkpoint for every K blocks.

"full" keeps each block's input; "sqrt" a checkpoint for every √L blocks; "selective" keeps matrix products
and attention and computes the rest again; "selective-attention" computes the core of attention again and
keeps the rest (Korthikanti et al. 2022, section 5); "offload" computes nothing again but keeps it all in host
memory.
"""

COMPILES = ("none", "model", "blocks")
"""Parts that torch.compile compiles: "model" is the model with its loss, "blocks" each block by itself."""

LORA_ALIASES = {"attention": ("qkv", "q", "k", "v", "out"), "mlp": ("gate", "up", "down")}

OVERRIDES = ("dropout", "logits", "unfused")
"""What a model has of its own and a run may choose anew."""

LARGEST_FLOAT = sys.float_info.max  # Python's whole numbers go on beyond it

LARGEST = {"seq_len": 100_000_000, "global_batch": 1_000_000_000}
"""Sizes beyond these, and any other beyond a million, are typing errors, not training runs."""


@dataclass(frozen=True)
class TrainingRun:
    """One training run as one of its ranks sees it: what `estimate` and `measure` take.

    `model` is a preset's name, a `TransformerConfig` or the path of a Hugging Face config.json; `micro_batch`
    (b) counts sequences of `seq_len` (s) tokens; `accumulation_steps` micro-batches make one step;
    `global_batch` may be given instead. `world_size` ranks share the data, and with `zero_stage` 1 to 3 the
    optimizer states, the gradients and the parameters too. `loss_chunks` cuts the tokens into as many pieces
    for the logits and the loss. `compile` says what torch.compile compiles (COMPILES). `dropout`, `logits`
    ("fp32", or "compute" for the type that the head computes in) and `unfused` (GELU and RMSNorm in single
    operations: see `TransformerConfig`) override the model's own. With `lora_rank` only LoRA's factors on
    `lora_targets` are trained, and the matrices of the blocks are stored in `frozen_bits`. `card`, a name of
    `gpus.GPUS`, adds what cuBLAS keeps for itself there; left
    out, it is not counted. Raises ValueError for every choice that is unknown, absurd or contradicts another.
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
    zero_stage: int = 0
    bucket_view: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    clip_grad_norm: float | None = None
    set_to_none: bool = True
    loss_chunks: int = 1
    compile: str = "none"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    frozen_bits: int | None = None
    card: str | None = None

    def __init__(
        self,
        model: str | PathLike[str] | TransformerConfig,
        micro_batch: int = 1,
        seq_len: int = 1024,
        precision: str | Precision = "amp-bf16",
        optimizer: str | Optimizer = "adamw",
        attention: str = "flash",
        recompute: str = "none",
        accumulation_steps: int | None = None,
        world_size: int = 1,
        zero_stage: int = 0,
        *,
        bucket_view: bool = False,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        clip_grad_norm: float | None = None,
        set_to_none: bool = True,
        loss_chunks: int = 1,
        compile: str = "none",
        lora_rank: int = 0,
        lora_targets: str | tuple[str, ...] = (),
        frozen_bits: int | None = None,
        card: str | None = None,
        dropout: float | None = None,
        logits: str | None = None,
        unfused: bool | None = None,
        global_batch: int | None = None,
        **others: Any,
    ) -> None:
        for name in others:  # Python's own refusal would not say which name is meant
            check_known("choice of a TrainingRun", name, _choices())
        if logits is not None:
            check_known("logits", logits, LOGITS)
        config = _overridden(model_config(model), dropout=dropout, logits=logits, unfused=unfused)
        sizes = {"micro_batch": micro_batch, "seq_len": seq_len, "world_size": world_size}
        sizes |= {"tensor_parallel": tensor_parallel, "loss_chunks": loss_chunks}
        for name, value in sizes.items():
            check_size(name, value)
        chosen: dict[str, Any] = {
            "model": config,
            **sizes,
            "precision": _one_of("precision", precision, PRECISIONS),
            "optimizer": _one_of("optimizer", optimizer, OPTIMIZERS),
            "attention": _one_of("attention", attention, {name: name for name in ATTENTIONS}),
            "recompute": _recompute(recompute, config.layers),
            "accumulation_steps": _accumulation(accumulation_steps, global_batch, micro_batch, world_size),
            "compile": _one_of("compile", compile, {name: name for name in COMPILES}),
            "zero_stage": zero_stage,
            "clip_grad_norm": clip_grad_norm,
            "lora_rank": lora_rank,
            "lora_targets": _lora_targets(lora_targets, lora_rank, config),
            "frozen_bits": frozen_bits,
            "card": None if card is None else gpu(card).name,
            "bucket_view": bucket_view,
            "sequence_parallel": sequence_parallel,
            "set_to_none": set_to_none,
        }
        self.__dict__.update(chosen)  # quicker than object.__setattr__ for each of them
        checks = (_check_attention, _check_sharding, _check_parallel, _check_training, _check_lora)
        for check in (*checks, _check_compile):
            check(self)

    @property
    def global_batch(self) -> int:
        """Sequences that one optimizer step learns from: micro_batch · accumulation_steps · world_size."""
        return self.micro_batch * self.accumulation_steps * self.world_size

    @property
    def accumulates(self) -> bool:
        """True if backward adds to existing gradients instead of allocating new ones."""
        return self.accumulation_steps > 1 or not self.set_to_none or self.bucket_view

    @property
    def blocks_per_checkpoint(self) -> int:
        """Number of blocks per checkpoint of the residual stream; 0 if blocks are not recomputed whole."""
        return blocks_per_checkpoint(self.recompute, self.model.layers)

    def replace(self, **changes: Any) -> "TrainingRun":
        """A copy with some choices changed, checked anew.

        Raises ValueError like the constructor, and for unknown fields.
        """
        for name in changes:
            check_known("choice of a TrainingRun", name, _choices())
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        if changes.get("global_batch") is not None:
            kept.pop("accumulation_steps")
        return TrainingRun(**(kept | changes))

    def code(self) -> str:
        """The line of code that makes this run, with only the choices that differ from the defaults."""
        shown = [repr(self.model if self._preset() is None else self.model.name)]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default or field.name in ("micro_batch", "seq_len"):
                shown.append(f"{field.name}={getattr(value, 'name', value)!r}")
        shown += [f"{name}={value!r}" for name, value in self._overrides().items()]
        return f"TrainingRun({', '.join(shown)})"

    def _preset(self) -> TransformerConfig | None:
        """The preset that the model is, but for OVERRIDES."""
        preset = PRESETS.get(self.model.name)
        if preset is None:
            return None
        own = {name: getattr(preset, name) for name in OVERRIDES}
        return preset if preset == dataclasses.replace(self.model, **own) else None

    def _overrides(self) -> dict[str, Any]:
        """The OVERRIDES that differ from the run's preset."""
        preset = self._preset()
        chosen = {name: getattr(self.model, name) for name in OVERRIDES}
        return {name: value for name, value in chosen.items() if preset and value != getattr(preset, name)}

    def __str__(self) -> str:
        parts = [
            self.model.name,
            f"b={self.micro_batch}",
            f"s={self.seq_len:,}",
            self.precision.name,
            self.optimizer.name,
            f"{self.attention} attention",
        ]
        if self.recompute == "offload":
            parts.append("activations offloaded")
        elif self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        if self.accumulation_steps > 1:
            parts.append(f"{self.accumulation_steps} micro-batches")
        parts += self._ranks_in_words()
        if self.clip_grad_norm is not None:
            parts.append(f"gradients clipped at {self.clip_grad_norm:g}")
        if not self.set_to_none:
            parts.append("gradients zeroed, not freed")
        if self.loss_chunks > 1:
            parts.append(f"loss in {self.loss_chunks} chunks")
        if self.compile != "none":
            parts.append({"model": "compiled", "blocks": "each block compiled"}[self.compile])
        parts += self._overrides_in_words()
        if self.lora_rank:
            parts.append(f"LoRA of rank {self.lora_rank} on {', '.join(self.lora_targets)}")
        if self.frozen_bits:
            parts.append(f"frozen in {self.frozen_bits} bits")
        if self.card:
            parts.append(f"on {self.card}")
        return " · ".join(part for part in parts if part)

    def _ranks_in_words(self) -> list[str]:
        """The ranks, and what they share: nothing of one rank alone."""
        parts = []
        if self.world_size > 1:
            parts.append(f"{self.world_size} ranks")
        if self.zero_stage:
            parts.append(f"ZeRO-{self.zero_stage}")
        if self.tensor_parallel > 1:
            parts.append(f"tensor parallel {self.tensor_parallel}")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.bucket_view:
            parts.append("gradients as bucket views")
        return parts

    def _overrides_in_words(self) -> list[str]:
        """The model's options that differ from its preset."""
        logits = {"fp32": "logits in fp32", "compute": "logits not upcast"}
        kernels = "unfused" if self.model.unfused else "fused"
        words = {
            "dropout": f"dropout {self.model.dropout:g}",
            "logits": logits[self.model.logits],
            "unfused": f"{kernels} GELU and RMSNorm",
        }
        return [words[name] for name in self._overrides()]

    def _repr_html_(self) -> str:
        """A card for a notebook: the choices, in bold where they are not usual, and the line of code."""
        name, *told = str(self).split(" · ")
        if self.world_size == 1:
            told.append("1 rank")
        if self.recompute == "none":
            told.append("no recomputation")
        global_batch = f"global batch {self.global_batch:,}"  # usual, as it follows from the others
        told.insert(2, global_batch)
        usual = {*str(TrainingRun("gpt2")).split(" · "), "1 rank", "no recomputation", global_batch}
        choices = " · ".join(escape(one) if one in usual else f"<b>{escape(one)}</b>" for one in told)
        heading = f"<b>{escape(name)}</b> · {self.model.parameters:,} parameters"
        frame = "display:inline-block;border:1px solid var(--jp-border-color1,currentColor);padding:.4em .8em"
        return f"<div style='{frame}'>{heading}<br>{choices}<br><code>{escape(self.code())}</code></div>"


def _overridden(config: TransformerConfig, **choices: Any) -> TransformerConfig:
    """The model with the OVERRIDES that are not None."""
    overrides = {name: value for name, value in choices.items() if value is not None}
    return dataclasses.replace(config, **overrides) if overrides else config


def blocks_per_checkpoint(recompute: str, layers: int) -> int:
    """Number of blocks per checkpoint under this choice of recomputation; 0 if it has none."""
    if recompute == "full":
        return 1
    if recompute == "sqrt":
        return max(1, round(math.sqrt(layers)))
    if recompute.startswith("every-"):
        return int(recompute.removeprefix("every-"))
    return 0


def _check_attention(run: TrainingRun) -> None:
    model, precision, kernel = run.model, run.precision, run.attention
    if run.seq_len > model.max_positions:
        raise ValueError(
            f"a sequence of {run.seq_len:,} tokens is longer than "
            f"the {model.max_positions:,} positions of {model.name}"
        )
    if kernel in ("flash", "cudnn") and precision.compute != 2:
        raise ValueError(
            f"the {kernel} kernel computes in 16 bits only, not in {precision.name}: "
            "choose attention='efficient' or 'eager', or a 16-bit precision such as 'amp-bf16'"
        )
    largest = {"flash": 256, "cudnn": 128}.get(kernel, model.head_size)
    if model.head_size > largest:
        raise ValueError(
            f"heads of {model.head_size} elements: the {kernel} kernel takes up to {largest}; choose 'eager'"
        )
    if kernel != "eager" and model.head_size % 8:
        raise ValueError(
            f"heads of {model.head_size} elements: the {kernel} kernel takes multiples of 8; choose 'eager'"
        )


def _check_sharding(run: TrainingRun) -> None:
    for name in ("bucket_view", "sequence_parallel", "set_to_none"):
        if not isinstance(getattr(run, name), bool):
            raise ValueError(f"{name} is {getattr(run, name)!r}: it is True or False")
    if isinstance(run.zero_stage, (bool, float)) or run.zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage is {run.zero_stage!r}: 0 (nothing is sharded), 1, 2 or 3")
    if run.zero_stage and run.world_size == 1:
        raise ValueError(f"zero_stage={run.zero_stage} shards over ranks: set world_size to 2 or more")
    if run.bucket_view and (run.world_size == 1 or run.zero_stage > 1):
        raise ValueError(
            "bucket_view is DistributedDataParallel's: it needs world_size above 1 and zero_stage 0 or 1"
        )


def _check_parallel(run: TrainingRun) -> None:
    degree, model = run.tensor_parallel, run.model
    if run.sequence_parallel and degree == 1:
        raise ValueError(
            "sequence_parallel splits what tensor parallelism leaves whole: set tensor_parallel above 1"
        )
    if model.heads % degree or model.ffn % degree:
        raise ValueError(
            f"tensor_parallel={degree} does not divide {model.heads} heads and an MLP of {model.ffn}"
        )
    if run.sequence_parallel and run.seq_len % degree:
        raise ValueError(
            f"tensor_parallel={degree} does not divide a sequence of {run.seq_len}, which it must split"
        )


def _check_training(run: TrainingRun) -> None:
    norm = run.clip_grad_norm
    is_number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
    if norm is not None and not (is_number and 0 < norm <= LARGEST_FLOAT):
        raise ValueError(
            f"clip_grad_norm is {norm!r}: the largest norm that gradients may have, a number above 0"
        )
    if run.loss_chunks > run.micro_batch * run.seq_len:
        raise ValueError(
            f"loss_chunks={run.loss_chunks}: "
            f"there are only {run.micro_batch * run.seq_len} tokens to cut into pieces"
        )


def _check_lora(run: TrainingRun) -> None:
    rank, bits = run.lora_rank, run.frozen_bits
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= run.model.hidden:
        raise ValueError(
            f"lora_rank is {rank!r}: a whole number up to h = {run.model.hidden}; 0 trains every weight"
        )
    if isinstance(bits, float) or bits not in (None, 4, 8, 16):
        raise ValueError(
            f"frozen_bits is {bits!r}: 16, 8 or 4; None leaves frozen weights in {run.precision.name}"
        )
    if bits is not None and not rank:
        raise ValueError("frozen_bits says how frozen weights are stored: freeze them with lora_rank above 0")
    if bits is not None and run.precision.compute != 2:
        raise ValueError(
            f"frozen_bits needs a 16-bit precision such as 'amp-bf16' or 'bf16', not {run.precision.name}"
        )
    if rank and run.precision.name == "fp8":
        raise ValueError("LoRA is not accounted for in fp8: choose a 16-bit precision")
    if rank and run.model.experts:
        raise ValueError("LoRA on a mixture of experts is not covered: choose a model without experts")


def _check_compile(run: TrainingRun) -> None:
    if run.compile == "none":
        return
    if run.world_size * run.tensor_parallel > 1:
        raise ValueError(
            f"compile={run.compile!r} is covered on one rank: set world_size=1 and tensor_parallel=1,"
            " or compile='none'"
        )
    if run.recompute == "offload":
        raise ValueError(f"compile={run.compile!r} does not go with recompute='offload': choose one of them")


def _recompute(value: Any, layers: int) -> str:
    blocks = re.fullmatch(r"every-([1-9]\d*)", value) if isinstance(value, str) else None
    if not blocks and value not in RECOMPUTES:
        raise unknown("recompute", value, [*RECOMPUTES, "every-K, with a number of blocks for K"])
    if blocks and int(blocks[1]) > layers:
        raise ValueError(f"recompute={value!r}: the model has only {layers} blocks")
    return value


def _lora_targets(targets: Any, rank: Any, model: TransformerConfig) -> tuple[str, ...]:
    """The names of the matrices that get LoRA's factors, in the order of the network.

    "attention" and "mlp" name several, and nothing said means attention's.
    """
    if not rank:
        if targets:
            raise ValueError(
                f"lora_targets={targets!r} without LoRA: set lora_rank above 0, or lora_targets=()"
            )
        return ()
    if targets and not isinstance(targets, (str, tuple, list)):
        raise ValueError(f"lora_targets is {targets!r}: a name, or several in a tuple, such as ('q', 'v')")
    if not targets:
        asked = ("attention",)
    elif isinstance(targets, str):
        asked = (targets,)
    else:
        asked = targets
    names = [*attention_shapes(model), *mlp_shapes(model)]
    there = [name.removesuffix(".weight") for name in names if "weight" in name]
    for name in asked:
        check_known("LoRA target", name, [*there, *LORA_ALIASES])
    wanted = [name for target in asked for name in LORA_ALIASES.get(target, (target,))]
    return tuple(name for name in there if name in wanted)


def _choices() -> list[str]:
    """The names that `TrainingRun` and `replace` take."""
    return [*(field.name for field in fields(TrainingRun)), "global_batch", *OVERRIDES]


def check_size(name: str, value: Any) -> None:
    """Raise ValueError unless `value` can be the size of that name: a whole number from 1 to LARGEST."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it counts things, so it must be a whole number (an int)")
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    if value > LARGEST.get(name, 1_000_000):
        raise ValueError(f"{name} is {value:,}: more than {LARGEST.get(name, 1_000_000):,} cannot be meant")


def _one_of(what: str, value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, str) and value in known:
        return known[value]
    if value not in known.values():
        raise unknown(what, value, known)
    return value


def _accumulation(steps: int | None, global_batch: int | None, micro_batch: int, world_size: int) -> int:
    if global_batch is not None:
        if steps is not None:
            raise ValueError("give global_batch or accumulation_steps, not both: one follows from the other")
        check_size("global_batch", global_batch)
        steps, rest = divmod(global_batch, micro_batch * world_size)
        if rest:
            raise ValueError(
                f"a global batch of {global_batch} sequences is not a multiple of "
                f"micro_batch · world_size = {micro_batch} · {world_size} = {micro_batch * world_size}"
            )
    steps = 1 if steps is None else steps
    check_size("accumulation_steps", steps)
    return steps
