"""Errors of the sources, as docs/errata.md has them: claim, source, correction and computed evidence.

Their words are in errata.toml; a claim is quoted or shortened, its date or version named where the text has
one. Nothing here needs torch.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from textwrap import fill
from typing import Any

from ... import CachingAllocator, TrainingRun, gpu
from ...estimating import estimate, moments, published
from ...estimating.formula import activation_bytes, block_bytes, bytes_per_logit, loss_bytes
from ...estimating.step_time import recomputed_flops
from ...interactive.course_files import ROOT, number_of, numbered
from ...models import PRESETS, parameter_count
from ...units import GB, MiB, each, format_bytes, html_table, percent
from ..accumulation.large_batch_results import GOYAL, GOYAL_CAPTION, RAMP, batch_at
from ..accumulation.large_batch_results import published as goyal
from ..parameters.counting import GPT2_PAPER
from ..torch_compile.recorded import WAYS
from .calculators import states_of

PAGE = ROOT / "docs" / "errata.md"
_gb = partial(format_bytes, unit="GB", digits=1)
_gib = partial(format_bytes, unit="GiB", digits=1)

XL = TrainingRun("gpt2-xl", 32, 1024, "bf16-master")
FULL = XL.replace(recompute="full")
GPT3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master")
CARD = gpu("RTX5090-32GB")


@dataclass(frozen=True)
class Erratum:
    """One claim that is wrong or imprecise: its source, its lesson, the correction, one line of numbers."""

    claim: str
    source: str
    lesson: str
    right: str
    evidence: str


def _numbers() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The numbers for the braces of errata.toml, claim by claim."""
    autocast = FULL.replace(precision="amp-bf16")
    runs = {
        "master": FULL,
        "master_in_8": FULL.replace(loss_chunks=8),
        "autocast": autocast,
        "autocast_in_8": autocast.replace(loss_chunks=8),
        "of_4": FULL.replace(micro_batch=4, accumulation_steps=8),
    }
    yield "puzzle_fits", each(_peak, **runs) | {"room": _gb(CARD.room)}

    # fp16 weights and gradients, three fp32 states, activations, a buffer, fragmentation
    listed = (3, 3, 6, 6, 6, 8, 6, 3)
    there = estimate(FULL)
    parts = {"parts": " + ".join(map(str, listed)), "sum": sum(listed)}
    sizes = {"activations": there["activations"], "temporaries": there["temporaries"], "peak": there.total}
    yield "puzzle_does_not_fit", parts | each(_gb, states=states_of(there), **sizes)

    flash, eager = (activation_bytes(XL.replace(attention=kernel)) for kernel in ("flash", "eager"))
    yield "twelve_tensors", each(_gb, formula=published.zero_activation_bytes(XL), flash=flash, eager=eager)

    root = published.zero_checkpointed_bytes(FULL)
    checkpoints = published.checkpoints_bytes(FULL)
    live = checkpoints + block_bytes(FULL)
    softmax = loss_bytes(FULL)
    sizes = each(_gb, root=root, checkpoints=checkpoints, live=live, softmax=softmax)
    yield "square_root", sizes | {"rest": _gb(there["activations"], digits=2)}

    full_flash = activation_bytes(FULL.replace(attention="flash"))
    full_eager = activation_bytes(FULL.replace(attention="eager"))
    yield "half_of_activations", each(percent, flash=1 - full_flash / flash, eager=1 - full_eager / eager)

    shares = {}
    for short, name in {"gpt2": "gpt2", "xl": "gpt2-xl", "gpt3": "gpt3-175b"}.items():
        s, h, L, V = 1024, PRESETS[name].hidden, PRESETS[name].layers, PRESETS[name].vocab
        blocks = L * (24 * h * h + 4 * s * h)
        head = 2 * h * V
        shares[short] = percent(blocks / (3 * (blocks + head)), 1)
    yield "a_third_more_time", shares

    step = published.korthikanti_model_flops(GPT3)
    core = recomputed_flops(GPT3.replace(recompute="selective-attention"))
    added = published.korthikanti_hardware_flops(GPT3) - step
    parts = {"equation": added / step, "core": core / step, "half": core / 2 / step}
    yield "selective_flops", each(partial(percent, digits=2), **parts)

    saved = [1 - 34 / (34 + 5 * run.model.heads * run.seq_len / run.model.hidden) for run in (GPT3, LLAMA)]
    yield "seventy_percent", each(percent, gpt3=saved[0], llama=saved[1])

    eager = LLAMA.replace(attention="eager")
    said = published.korthikanti_activation_bytes(eager)
    selective = _selective(LLAMA)
    sizes = each(
        _gib, said=said, selective=selective, eager=activation_bytes(eager), flash=activation_bytes(LLAMA)
    )
    yield "ninety_seven_gb", sizes | each(_gb, said_gb=said, selective_gb=selective)

    full = LLAMA.replace(recompute="full")
    there = estimate(full)
    checkpoints = published.checkpoints_bytes(full)
    live = published.korthikanti_block_bytes(full)
    both = there["activations"] + there["temporaries"]
    sizes = each(_gib, checkpoints=checkpoints, live=live, there=both)
    yield "one_gb", sizes | {"checkpoints_gb": _gb(checkpoints, digits=2)}

    run = TrainingRun("llama3.2-1b", 1, 8192, "bf16-master")
    kept = _selective(run)
    N = run.model.parameters
    sizes = each(_gb, kept=kept, together=16 * GB + kept, states=16 * N)
    yield "one_billion", sizes | {"billions": N / 1e9, "peak": _peak(run)}

    yield "hundred_gb", {"N": LLAMA.model.parameters, "states": _gb(16 * LLAMA.model.parameters)}

    step = moments(XL)
    begin, end = (step[name]["activations"] for name in ("end of forward", "optimizer step"))
    yield "until_the_step", {"begin": _gb(begin), "end": format_bytes(end)}

    steps = [moments(autocast.replace(optimizer=f"adamw-{how}")) for how in ("foreach", "fused")]
    foreach, fused = (step["optimizer step"]["temporaries"] for step in steps)
    peaks = each(_peak, peak=autocast, in_16=autocast.replace(loss_chunks=16))
    yield "residual", {"foreach": _gb(foreach), "fused": format_bytes(fused)} | peaks

    yield "four_million_tokens", {"tokens": 400 * 1024}

    mixtral = PRESETS["mixtral-8x7b"]
    eight = 8 * PRESETS["mistral-7b"].parameters
    counts = {"all": mixtral.parameters, "active": mixtral.active_parameters, "eight": eight}
    yield "eight_times_seven", {name: count / 1e9 for name, count in counts.items()}

    slip = [(690 * 10**9 if start == 790 * 10**9 else start, size) for start, size in RAMP]
    said, read = (batch_at(ramp, 700 * 10**9) // 10**6 for ramp in (RAMP, slip))
    yield "ramp", {"said": said, "read": read}

    rate = next(row.rate for row in GOYAL if row.batch == 256 and row.error == GOYAL_CAPTION)
    yield "alpha", {"caption": GOYAL_CAPTION, "rate": rate, "error": goyal(256, "0.10").error}

    largest = (2**11 - 1) * 2**5
    first = next(n for n in range(1, 300) if n * n > largest)
    yield "overflow", {"square": 255 * 255, "largest": largest, "first": first}

    run = XL.replace(precision="amp-bf16")
    log_softmax = run.precision.compute
    copy = bytes_per_logit(run)[0] - log_softmax
    yield "float32_loss", {"log_softmax": log_softmax, "copy": copy}

    small = PRESETS["gpt2"]
    xl = PRESETS["gpt2-xl"]
    vocab = 40_478  # GPT-1's: 40,000 merges and 478 characters (Radford et al. 2018, section 4.1)
    gpt1 = [parameter_count(replace(model, vocab=vocab)) for model in (small, xl)]
    counts = {"small": small.parameters, "xl": xl.parameters, "small_gpt1": gpt1[0], "xl_gpt1": gpt1[1]}
    papers = {"small_paper": GPT2_PAPER["gpt2"], "xl_paper": GPT2_PAPER["gpt2-xl"]}
    yield "gpt2_sizes", {"vocab": vocab} | papers | {name: count / 1e6 for name, count in counts.items()}

    allocator = CachingAllocator()
    asked = 12 * MiB - MiB // 2
    allocator.free(allocator.malloc(12 * MiB))
    allocator.malloc(asked)
    yield "rounded_up", {"asked": asked / MiB, "allocated": allocator.allocated / MiB}

    N, D = 2_851_000_000, 8
    size = published.deepspeed_zero2_bytes(N, D)
    sizes = each(partial(_gib, digits=2), gib=size, code=2 * N + 18 * N // D)
    yield "zero_2_unit", sizes | {"gb": _gb(size, digits=2)}

    yield "cookbook", each(_gb, said=published.cookbook_parts(FULL)["activations"], kept=full_flash)

    run = TrainingRun("llama3.1-8b", 1, 8192)
    yield "accelerate", each(_gb, said=published.accelerate_bytes(run), states=16 * run.model.parameters)

    steps = {"one": estimate(XL.replace(micro_batch=1)), "many": estimate(XL), "full": estimate(FULL)}
    yield "mostly_states", {name: percent(states_of(there) / there.total) for name, there in steps.items()}

    # lesson 06 names the sources
    on = ["torchtitan"]
    off = ["PyTorch", "DeepSpeed", "transformers", "Megatron-LM"]
    counts = {"number": len(on), "all": len(on + off)}
    yield "on_by_default", counts | {"on": ", ".join(on), "off": ", ".join(off)}

    h, a, L, V, s = 6144, 64, 48, 51_200, 2048
    ends = 1 + 4 * (1 + V / h)
    blocks = L * (34 + 5 * a * s / h)
    yield "outside_blocks", {"share": percent(ends / (ends + blocks), 2)}

    runs = {"few": TrainingRun("gpt2", 1, 128), "many": TrainingRun("gpt2", 32, 1024)}
    ratios = {
        name: estimate(run).total / estimate(run.replace(lora_rank=8)).total for name, run in runs.items()
    }
    yield "lora", ratios | {"weights": _gb(2 * GPT3.model.parameters)}

    lengths = ", ".join(f"{_adam_update(gradient):.2f}" for gradient in (0.001, 1, 1000))
    yield "smaller_updates", {"lengths": lengths}

    fp8 = TrainingRun("gpt2-xl", precision="fp8").precision
    yield "fp8_states", {"first": fp8.first_moment, "second": fp8.state, "master": fp8.master}

    ways = {
        "eager": "eager",
        "blocks": "each block",
        "model": "the model",
        "checkpoints": "the model, blocks in checkpoints",
    }
    yield "compiled", {name: _gb(WAYS[way]["peak"]) for name, way in ways.items()}


def _adam_update(gradient: float, steps: int = 100) -> float:
    """The length of Adam's update after so many equal gradients, in learning rates (Kingma and Ba 2015)."""
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    m = v = 0.0
    for _ in range(steps):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
    mean = m / (1 - beta1**steps)
    square = v / (1 - beta2**steps)
    return mean / (sqrt(square) + epsilon)


def _peak(run: TrainingRun) -> str:
    return _gb(estimate(run).total)


def _selective(run: TrainingRun) -> int:
    return published.playbook_parts(run.replace(recompute="selective-attention"))["activations"]


def _errata() -> Iterator[Erratum]:
    """All of them, in the order of errata.toml."""
    numbers = dict(_numbers())
    written = tomllib.loads(Path(__file__).with_name("errata.toml").read_text(encoding="utf-8"))
    for name, texts in written.items():
        words = {key: " ".join(text.split()) for key, text in texts.items()}
        yield Erratum(**words | {"evidence": words["evidence"].format_map(numbers[name])})


ERRATA = tuple(_errata())


class ErrataTable:
    """All errata; draws itself as a table."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.claim} ({one.source})\n  {one.right} {one.evidence}." for one in ERRATA)

    def _repr_html_(self) -> str:
        headings = ("claim", "where", "what is right", "computed", "lesson")
        rows = [(one.claim, one.source, one.right, one.evidence, one.lesson) for one in ERRATA]
        return html_table([headings, *rows], words=len(headings))


def page() -> str:
    """docs/errata.md."""
    lessons = {number_of(path): path.name for path in numbered(ROOT / "notebooks")}
    parts = [Path(__file__).with_name("errata_page.txt").read_text(encoding="utf-8")]
    for number, one in enumerate(ERRATA, start=1):
        lines = (
            f"**Where:** {one.source}.",
            f"**What is right:** {one.right}",
            f"**Computed:** {one.evidence}.",
            f"**More:** [lesson {one.lesson}](../notebooks/{lessons[one.lesson]}).",
        )
        filled = [fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines]
        wrapped = "\n\n".join(filled)
        parts.append(f'<span id="erratum-{number}"></span>\n\n## {number} · “{one.claim}”\n{wrapped}\n')
    return "\n".join(parts)
