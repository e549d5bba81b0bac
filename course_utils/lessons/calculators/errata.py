"""Errors of the sources, as docs/errata.md has them: each claim, its source, the correction, and computed evidence.

A claim is quoted or shortened, its date or version named where the text has one. Nothing here needs torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill

from course_utils import CachingAllocator, TrainingRun, gpu
from course_utils.estimating import estimate, moments, published
from course_utils.estimating.exact.activations import activation_bytes, block_bytes, loss_saved, sum_bytes
from course_utils.estimating.step_time import recomputed_flops
from course_utils.interactive.course_files import ROOT, number_of, numbered
from course_utils.models import PRESETS, parameter_count
from course_utils.units import GB, MiB, format_bytes, html_table, percent

from ..accumulation.published_batches import GOYAL, GOYAL_CAPTION, RAMP, batch_at
from ..accumulation.published_batches import published as goyal
from ..parameters.counting import GPT2_PAPER
from .calculators import states_of

PAGE = ROOT / "docs" / "errata.md"
_gb, _gib = (partial(format_bytes, unit=unit, digits=1) for unit in ("GB", "GiB"))

NEWSLETTER = "the newsletter Daily Dose of Data Science, “Where Did the GPU Memory Go?”"
SLIDES = "the slides “Large models training” (Optimization for ML, HSE University)"
LECTURE = "a lecture on training large models, after the Ultra-Scale Playbook (2025)"
UNCLEAR = "the newsletter or the lecture: the course's notes do not say which"

XL = TrainingRun("gpt2-xl", 32, 1024, "bf16-master")
FULL = XL.replace(recompute="full")
GPT3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master")
CARD = gpu("RTX5090-32GB")


@dataclass(frozen=True)
class Erratum:
    """One claim that is wrong or imprecise: its source, the lesson about it, the correction, one line of numbers."""

    claim: str
    source: str
    lesson: str
    right: str
    evidence: str


def _errata() -> Iterator[Erratum]:
    """All of them, in the order of the page: a new one comes last, so that numbers stay."""
    autocast = FULL.replace(precision="amp-bf16")
    sizes = [f"{name} {_peak(run)}, with the loss in 8 chunks {_peak(run, loss_chunks=8)}"
             for name, run in {"master weights": FULL, "autocast": autocast}.items()]  # fmt: skip
    yield Erratum(
        "One can barely train GPT-2 XL on 32 GB: 32 to 35 GB in all", NEWSLETTER, "01",
        "The recipe decides. 32 sequences at once fit a 32 GB card with fp32 master weights and the loss in chunks. "
        "With the loss over the whole batch they do not, and under autocast even chunks leave them at the card's edge. "
        "In micro-batches of 4 they fit.",
        f"{'; '.join(sizes)}; master weights, 8 micro-batches of 4, "
        f"{_peak(FULL, micro_batch=4, accumulation_steps=8)}; a program gets {_gb(CARD.room)} of an RTX 5090",
    )  # fmt: skip

    # fp16 weights and gradients, three fp32 states, activations, a buffer, fragmentation
    listed, there = (3, 3, 6, 6, 6, 8, 6, 3), estimate(FULL)
    yield Erratum(
        "GPT-2 XL cannot be trained on a 32 GB GPU",
        f"{SLIDES}, after ZeRO, section 3. The slides list the parts and draw no sum: 41 GB is ours", "01",
        "The recipe decides (see the claim before). And the parts are never all there at one moment.",
        f"{' + '.join(map(str, listed))} = {sum(listed)} GB; a step with full recomputation: {_gb(states_of(there))} "
        f"of states, {_gb(there['activations'])} of activations, {_gb(there['temporaries'])} passing = {_peak(FULL)}",
    )  # fmt: skip

    flash, eager = (activation_bytes(XL.replace(attention=kernel)) for kernel in ("flash", "eager"))
    yield Erratum(
        "Activations of GPT-2 XL at batch 32 take about 60 GB",
        "ZeRO (Rajbhandari et al. 2020), section 3.2, footnote 3", "05",
        "Twelve tensors of equal width. The true figure depends on the attention kernel.",
        f"the formula {_gb(published.zero_activation_bytes(XL))}; kept when forward ends: {_gb(flash)} with flash "
        f"attention, {_gb(eager)} eager",
    )  # fmt: skip

    root, checkpoints = published.zero_checkpointed_bytes(FULL), published.checkpoints_bytes(FULL)
    yield Erratum(
        "With checkpointing about 8 GB", "ZeRO, section 3.2: “the square root of the total”", "06",
        "A square root belongs to a chain of equal nodes. The real figure is near it by chance.",
        f"over √48: {_gb(root)}; a checkpoint a block: {_gb(checkpoints)}, with the live block "
        f"{_gb(checkpoints + block_bytes(FULL))}; with the loss's log-softmax ({_gb(sum_bytes(loss_saved(FULL)))}) and "
        f"the rest {_gb(there['activations'], digits=2)}",
    )  # fmt: skip

    full_flash, full_eager = (activation_bytes(FULL.replace(attention=kernel)) for kernel in ("flash", "eager"))
    yield Erratum(
        "Checkpointing reduces activations by about 50 %", SLIDES, "06",
        "Full recomputation keeps one input a block. Perhaps “square root” was read as “half”.",
        f"{percent(1 - full_flash / flash)} with flash attention, {percent(1 - full_eager / eager)} with eager "
        "attention",
    )  # fmt: skip

    shares = []
    for name in ("gpt2", "gpt2-xl", "gpt3-175b"):
        s, h, L, V = 1024, PRESETS[name].hidden, PRESETS[name].layers, PRESETS[name].vocab
        blocks, head = L * (24 * h * h + 4 * s * h), 2 * h * V
        shares.append(f"{name} {percent(blocks / (3 * (blocks + head)), 1)}")
    yield Erratum(
        "Checkpointing costs 30 to 40 % more time", f"{LECTURE}; ZeRO has 33 %, the newsletter 25 to 30 %", "06",
        "In arithmetic one third is the limit, as the head is not run again. Time is another matter: Korthikanti et "
        "al. 2022 measured 39 % for a layer split over 8 GPUs (table 4).", "; ".join(shares),
    )  # fmt: skip

    step = published.korthikanti_model_flops(GPT3)
    core = recomputed_flops(GPT3.replace(recompute="selective-attention"))
    added = published.korthikanti_hardware_flops(GPT3) - step
    yield Erratum(
        "Selective recomputation costs 2.7 % more compute", "Korthikanti et al. 2022, eq. 8", "06",
        "It adds one forward of the attention core, not three. PyTorch's checkpoint stops early and runs half.",
        f"eq. 8: {percent(added / step, 2)}; the core's forward once more: {percent(core / step, 2)}; q·kᵀ alone: "
        f"{percent(core / 2 / step, 2)}",
    )  # fmt: skip

    saved = {run.model.name: 1 - 34 / (34 + 5 * run.model.heads * run.seq_len / run.model.hidden)
             for run in (GPT3, LLAMA)}  # fmt: skip
    yield Erratum(
        "Selective recomputation saves up to 70 %", "the lecture, with an example of 97 and 17 GB", "06",
        "70 % is GPT-3's share (Korthikanti et al. 2022) and no upper limit: the lecture's own example saves more.",
        "; ".join(f"{name} {percent(share)}" for name, share in saved.items()),
    )  # fmt: skip

    eager = LLAMA.replace(attention="eager")
    said, selective = published.korthikanti_activation_bytes(eager), _selective(LLAMA)
    yield Erratum(
        "Llama-3 8B keeps 97 GB of activations at 4,096 tokens, 17 GB with selective recomputation", LECTURE, "05",
        "Both are GiB. And a GPT of that size with eager attention and dropout would keep them.",
        f"GPT's formula {_gib(said)} = {_gb(said)}, without its term in s² {_gib(selective)} = {_gb(selective)}; a "
        f"Llama keeps {_gib(activation_bytes(eager))} eager, {_gib(activation_bytes(LLAMA))} with flash attention",
    )  # fmt: skip

    full = LLAMA.replace(recompute="full")
    there, checkpoints = estimate(full), published.checkpoints_bytes(full)
    yield Erratum(
        "With full recomputation it keeps 1 GB", "the lecture", "05",
        "1 GiB is the checkpoints alone: the block that runs again and the loss come on top.",
        f"checkpoints {_gib(checkpoints)} = {_gb(checkpoints, digits=2)}; GPT's live block "
        f"{_gib(published.korthikanti_block_bytes(full))} more; a Llama with flash attention, at its peak and with the "
        f"loss, {_gib(there['activations'] + there['temporaries'])}",
    )  # fmt: skip

    run = TrainingRun("llama3.2-1b", 1, 8192, "bf16-master")
    kept, N = _selective(run), run.model.parameters
    yield Erratum(
        "A 1B model takes 16 GB of states, 25 GB at 8,192 tokens with selective recomputation", "the lecture", "05",
        "The sum is right for 10⁹ parameters and for what blocks keep. A model called “1B” has more parameters, and "
        "its loss comes on top.",
        f"16 GB + 34·s·b·h·L = 16 GB + {_gb(kept)} = {_gb(16 * GB + kept)}; Llama 3.2 1B has {N / 1e9:.2f} · 10⁹ "
        f"parameters, {_gb(16 * N)} of states, and with flash attention and its loss a peak of {_peak(run)}",
    )  # fmt: skip

    yield Erratum(
        "The states of an 8B model take roughly 100 GB", "the lecture", "01", "16 bytes for each of its parameters.",
        f"16 bytes · {LLAMA.model.parameters:,} = {_gb(16 * LLAMA.model.parameters)}",
    )  # fmt: skip

    step = moments(XL)
    begin, end = (step[name]["activations"] for name in ("end of forward", "optimizer step"))
    yield Erratum(
        "Activations are kept until the optimizer step", UNCLEAR, "01",
        "Each is freed in backward as soon as it has been used.",
        f"GPT-2 XL: {_gb(begin)} when forward ends, {format_bytes(end)} when the optimizer steps",
    )  # fmt: skip

    foreach, fused = (moments(autocast.replace(optimizer=f"adamw-{how}"))["optimizer step"]["temporaries"]
                      for how in ("foreach", "fused"))  # fmt: skip
    yield Erratum(
        "We can't do much about residual memory", UNCLEAR, "10",
        "Temporaries, buffers and fragmentation all have a cause and a cure.",
        f"Adam's temporaries: {_gb(foreach)} with foreach, {format_bytes(fused)} fused; peak of GPT-2 XL, recomputed: "
        f"{_peak(autocast)}, with the loss in 16 chunks {_peak(autocast, loss_chunks=16)}",
    )  # fmt: skip

    yield Erratum(
        "400 sequences of 1,024 tokens are about 4 million tokens", "the lecture", "07", "Ten times too many.",
        f"400 · 1,024 = {400 * 1024:,}",
    )  # fmt: skip

    mixtral, mistral = PRESETS["mixtral-8x7b"], PRESETS["mistral-7b"]
    yield Erratum(
        "8×7 is roughly 56 B parameters", "the lecture", "04", "Only the MLPs are there eight times.",
        f"Mixtral 8x7B: {mixtral.parameters / 1e9:.1f} · 10⁹ parameters, {mixtral.active_parameters / 1e9:.1f} · 10⁹ "
        f"for a token; 8 · Mistral 7B: {8 * mistral.parameters / 1e9:.1f} · 10⁹",
    )  # fmt: skip

    slip = [(690 * 10**9 if start == 790 * 10**9 else start, size) for start, size in RAMP]
    said, read = (batch_at(ramp, 700 * 10**9) // 10**6 for ramp in (RAMP, slip))
    yield Erratum(
        "The batch becomes 64 M tokens after 690 billion", "the lecture", "07b", "MiniMax-01 has 790 billion.",
        f"after 700 · 10⁹ tokens the batch is {said} M tokens; with the slip, {read} M",
    )  # fmt: skip

    rate = next(row.rate for row in GOYAL if row.batch == 256 and row.error == GOYAL_CAPTION)
    yield Erratum(
        "23.68 % top-1 error at α = 0.1", "Goyal et al. 2017, caption of table 2(a); the slides repeat it", "07b",
        "The caption took the neighboring row.",
        f"in the paper's table {GOYAL_CAPTION} % stands at α = {rate}, and α = 0.10 has "
        f"{goyal(256, '0.10').error:.2f} %",
    )  # fmt: skip

    largest = (2**11 - 1) * 2**5
    first = next(n for n in range(1, 300) if n * n > largest)
    yield Erratum(
        "255·255 overflows in fp16", "“The Technology Behind BLOOM Training” (Hugging Face blog, July 2022)", "03",
        "It is below the largest number by a little.",
        f"255·255 = {255 * 255:,}, the largest fp16 number is {largest:,}; {first}·{first} is the first to overflow",
    )  # fmt: skip

    log_softmax, copy = (one.size // (XL.seq_len * XL.micro_batch * XL.model.vocab)
                         for one in loss_saved(XL.replace(precision="amp-bf16"))[:2])  # fmt: skip
    yield Erratum(
        "Under autocast cross_entropy runs in float32",
        "PyTorch's list of CUDA operations that autocast to float32, in torch.amp's documentation", "03",
        "The loss does. Its log-softmax runs, and is kept, in the logits' 16 bits.",
        f"bytes that the loss keeps for each logit: {log_softmax} of log-softmax, {copy} of its copy in fp32",
    )  # fmt: skip

    vocab = 40_478  # GPT-1's: 40,000 merges (Radford et al. 2018, section 4.1) and 478 characters
    shown = [f"{name}: paper {GPT2_PAPER[name]} M, with V = {vocab:,} "
             f"{parameter_count(replace(PRESETS[name], vocab=vocab)) / 1e6:.0f} M, "
             f"released {PRESETS[name].parameters / 1e6:.0f} M" for name in ("gpt2", "gpt2-xl")]  # fmt: skip
    yield Erratum(
        "GPT-2 has 117 M to 1,542 M parameters", "Radford et al. 2019, table 2", "04",
        "OpenAI later corrected it. The numbers follow from GPT-1's vocabulary.", "; ".join(shown),
    )  # fmt: skip

    allocator, asked = CachingAllocator(), 12 * MiB - MiB // 2
    allocator.free(allocator.malloc(12 * MiB))
    allocator.malloc(asked)
    yield Erratum(
        "A tensor takes its size rounded up to 512 bytes", "a common description, which this course simulates by", "10",
        "In a fresh segment. A cached block whose rest is at most 1 MiB is handed out whole.",
        f"asked for {asked / MiB:.1f} MiB where a cached block of 12 MiB lies free: {allocator.allocated / MiB:.1f} "
        "MiB allocated",
    )  # fmt: skip

    N, D = 2_851_000_000, 8
    size = published.deepspeed_zero2_bytes(N, D)
    yield Erratum(
        "ZeRO-2 with T5 of 2,851 M parameters on 8 GPUs: 15.93GB", "DeepSpeed's documentation, Memory Requirements",
        "13", "The page's sum is right, its unit is GiB. The code behind it has another sum by now.",
        f"4N + 16N/8 for its N = 2,851 · 10⁶: {_gib(size, digits=2)} = {_gb(size, digits=2)}; 2N + 18N/8, the code's: "
        f"{_gib(2 * N + 18 * N // D, digits=2)}",
    )  # fmt: skip

    said = published.cookbook_parts(FULL)["activations"]
    yield Erratum(
        "With checkpointing, 34·s·b·h·L bytes of activations",
        "EleutherAI cookbook, calc_transformer_mem.py (commit 069ae2e)", "13",
        "That is Korthikanti et al.'s row for selective recomputation, which the comment credits to ZeRO.",
        f"GPT-2 XL, 32 sequences: it says {_gb(said)}; with full recomputation forward keeps {_gb(full_flash)}",
    )  # fmt: skip

    run = TrainingRun("llama3.1-8b", 1, 8192)
    yield Erratum(
        "Training with Adam in 16 bits takes two times the model",
        "accelerate, commands/estimate.py (commit 00e4d26)", "13",
        "The largest of four stages, for a batch of 1. What a step holds is a sum, activations left out as said.",
        f"Llama 3.1 8B in 16 bits: it says {_gb(published.accelerate_bytes(run))}; weights, gradients and Adam's "
        f"moments alone are {_gb(16 * run.model.parameters)}",
    )  # fmt: skip

    runs = {"1 sequence": XL.replace(micro_batch=1), "32 sequences": XL, "32 with full recomputation": FULL}
    steps = {name: estimate(run) for name, run in runs.items()}
    shares = [f"{name} {percent(states_of(there) / there.total)}" for name, there in steps.items()]
    yield Erratum(
        "For large models most memory is model states", "texts after ZeRO, in the words of the course's notes", "01",
        "Up to a number of tokens, which depends on the model and on what is recomputed.",
        f"GPT-2 XL, states at the peak: {', '.join(shares)}",
    )  # fmt: skip

    on, off = ["torchtitan"], ["PyTorch", "DeepSpeed", "transformers", "Megatron-LM"]  # lesson 06 names the sources
    yield Erratum(
        "Checkpointing is on by default in most libraries", UNCLEAR, "06", "Most wait to be told.",
        f"on in {len(on)} of {len(on + off)}, {', '.join(on)}; off in {', '.join(off)}",
    )  # fmt: skip

    h, a, L, V, s = 6144, 64, 48, 51_200, 2048
    ends, blocks = 1 + 4 * (1 + V / h), L * (34 + 5 * a * s / h)
    yield Erratum(
        "What lies outside the blocks is less than 0.01 % of all activations",
        "Korthikanti et al. 2022, section 4.3, of its model with 22 billion parameters", "05",
        "Its own formula gives over half a percent; far more with a large vocabulary and flash attention.",
        f"1 + 4·(1 + V/h) of that and L·(34 + 5·a·s/h): {percent(ends / (ends + blocks), 2)} for 22B",
    )  # fmt: skip


def _peak(run: TrainingRun, **changes: int) -> str:
    return _gb(estimate(run.replace(**changes)).total)


def _selective(run: TrainingRun) -> int:
    return published.playbook_parts(run.replace(recompute="selective-attention"))["activations"]


ERRATA = tuple(_errata())


class ErrataTable:
    """All errata; draws itself as a table."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.claim} ({one.source})\n  {one.right} {one.evidence}." for one in ERRATA)

    def _repr_html_(self) -> str:
        headings = ("claim", "where", "what is right", "computed", "lesson")
        rows = [(one.claim, one.source, one.right, one.evidence, one.lesson) for one in ERRATA]
        return html_table([headings, *rows], words=len(headings))


errata_table = ErrataTable


def page() -> str:
    """docs/errata.md."""
    lessons = {number_of(path): path.name for path in numbered(ROOT / "notebooks")}
    parts = [Path(__file__).with_name("errata_page.txt").read_text(encoding="utf-8")]
    for number, one in enumerate(ERRATA, start=1):
        more = f"**More:** [lesson {one.lesson}](../notebooks/{lessons[one.lesson]})."
        lines = (f"**Where:** {one.source}.", f"**What is right:** {one.right}", f"**Computed:** {one.evidence}.", more)
        wrapped = "\n\n".join(fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines)
        parts.append(f'<span id="erratum-{number}"></span>\n\n## {number} · “{one.claim}”\n{wrapped}\n')
    return "\n".join(parts)
