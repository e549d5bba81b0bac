"""Errors of the sources: each claim, its source, the correction, and a function that computes the evidence.

`build` writes docs/errata.md from this list; a test keeps the two equal. A claim is quoted or shortened, its date or
version named where the text has one; no number in the evidence is typed. Nothing here needs torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import fill

from course_utils.allocator.policy import CachingAllocator
from course_utils.estimating import estimate, moments, published
from course_utils.estimating.exact.activations import activation_bytes, block_bytes, loss_saved, sum_bytes
from course_utils.gpus import gpu
from course_utils.interactive.course_files import ROOT, numbered
from course_utils.models import PRESETS, parameter_count
from course_utils.run import TrainingRun
from course_utils.units import GB, MiB, format_bytes, html_table, percent

from ..accumulation.published_batches import GOYAL, GOYAL_CAPTION, RAMP, batch_at
from ..accumulation.published_batches import published as goyal
from ..parameters.counting import GPT2_PAPER

PAGE = ROOT / "docs" / "errata.md"

NEWSLETTER = "the newsletter Daily Dose of Data Science, “Where Did the GPU Memory Go?”"
SLIDES = "the slides “Large models training” (Optimization for ML, HSE University)"
LECTURE = "a lecture on training large models, after the Ultra-Scale Playbook (2025)"
UNCLEAR = "the newsletter or the lecture: the course's notes do not say which"
"""The texts that are no papers, as well as they can be named."""


@dataclass(frozen=True)
class Erratum:
    """One claim that is wrong or imprecise: its source, the lesson about it, the correction, and a function that
    computes one line of numbers for it.
    """

    claim: str
    source: str
    lesson: int
    right: str
    evidence: Callable[[], str]


ERRATA: list[Erratum] = []
"""All of them, in the order of the page: a new one comes last, so that numbers stay."""


def _erratum(claim: str, source: str, lesson: int, right: str) -> Callable[[Callable[[], str]], Erratum]:
    def listed(evidence: Callable[[], str]) -> Erratum:
        ERRATA.append(Erratum(claim, source, lesson, right, evidence))
        return ERRATA[-1]

    return listed


def _gb(size: float, digits: int = 1, unit: str = "GB") -> str:
    return format_bytes(round(size), unit, digits)


_gib = partial(_gb, unit="GiB")

XL = TrainingRun("gpt2-xl", 32, 1024, "bf16-master")
FULL = XL.replace(recompute="full")
GPT3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master")
CARD = gpu("RTX5090-32GB")

LISTED = (3, 3, 6, 6, 6, 8, 6, 3)
"""GB of the slides' figure: fp16 weights and gradients, three fp32 states, activations, a buffer, fragmentation."""


# ----------------------------------------------------------------------------------------- the claims, in their order


@_erratum("One can barely train GPT-2 XL on 32 GB: 32 to 35 GB in all", NEWSLETTER, 1, "The recipe decides. 32 "
    "sequences at once fit a 32 GB card with fp32 master weights and the loss in chunks. With the loss over the whole "
    "batch they do not, and under autocast even chunks leave them at the card's edge. In "
    "micro-batches of 4 they fit.")  # fmt: skip
def barely_trains() -> str:
    sizes = []
    for name, run in {"master weights": FULL, "autocast": FULL.replace(precision="amp-bf16")}.items():
        whole, chunks = estimate(run).total, estimate(run.replace(loss_chunks=8)).total
        sizes.append(f"{name} {_gb(whole)}, with the loss in 8 chunks {_gb(chunks)}")
    cut = estimate(FULL.replace(micro_batch=4, accumulation_steps=8)).total
    sizes.append(f"master weights, 8 micro-batches of 4, {_gb(cut)}")
    return f"{'; '.join(sizes)}; a program gets {_gb(CARD.room)} of an RTX 5090"


@_erratum("GPT-2 XL cannot be trained on a 32 GB GPU", f"{SLIDES}, after ZeRO, section 3. The slides list the parts "
    "and draw no sum: 41 GB is ours", 1, "The recipe decides (see the claim before). And the parts are never all "
    "there at one moment.")  # fmt: skip
def forty_one() -> str:
    there = estimate(FULL)
    states = there["parameters"] + there["gradients"] + there["optimizer_states"]
    parts = f"{_gb(states)} of states, {_gb(there['activations'])} of activations, {_gb(there['temporaries'])} passing"
    listed = " + ".join(map(str, LISTED))
    return f"{listed} = {sum(LISTED)} GB; a step with full recomputation: {parts} = {_gb(there.total)}"


@_erratum("Activations of GPT-2 XL at batch 32 take about 60 GB", "ZeRO (Rajbhandari et al. 2020), section 3.2, "
    "footnote 3", 5, "Twelve tensors of equal width. The true figure depends on the attention kernel.")  # fmt: skip
def sixty_gigabytes() -> str:
    flash, eager = activation_bytes(XL), activation_bytes(XL.replace(attention="eager"))
    said = published.zero_activation_bytes(XL)
    return f"the formula {_gb(said)}; kept when forward ends: {_gb(flash)} with flash attention, {_gb(eager)} eager"


@_erratum("With checkpointing about 8 GB", "ZeRO, section 3.2: “the square root of the total”", 6, "A square root "
    "belongs to a chain of equal nodes. The real figure is near it by chance.")  # fmt: skip
def about_eight() -> str:
    root, checkpoints = published.zero_checkpointed_bytes(FULL), published.checkpoints_bytes(FULL)
    live, loss = block_bytes(FULL), sum_bytes(loss_saved(FULL))
    there = estimate(FULL)["activations"]
    return (
        f"over √48: {_gb(root)}; a checkpoint a block: {_gb(checkpoints)}, with the live block "
        f"{_gb(checkpoints + live)}; with the loss's log-softmax ({_gb(loss)}) and the rest {_gb(there, 2)}"
    )


@_erratum("Checkpointing reduces activations by about 50 %", SLIDES, 6, "Full recomputation keeps one input a block. "
    "Perhaps “square root” was read as “half”.")  # fmt: skip
def fifty_percent() -> str:
    runs = {kernel: XL.replace(attention=kernel) for kernel in ("flash", "eager")}
    saved = {kernel: 1 - activation_bytes(run.replace(recompute="full")) / activation_bytes(run)
             for kernel, run in runs.items()}  # fmt: skip
    return ", ".join(f"{percent(share)} with {kernel} attention" for kernel, share in saved.items())


@_erratum("Checkpointing costs 30 to 40 % more time", f"{LECTURE}; ZeRO has 33 %, the newsletter 25 to 30 %", 6, "In "
    "arithmetic one third is the limit, as the head is not run again. Time is another matter: Korthikanti et al. 2022 "
    "measured 39 % for a layer split over 8 GPUs (table 4).")  # fmt: skip
def a_third_at_most() -> str:
    shares = []
    for name in ("gpt2", "gpt2-xl", "gpt3-175b"):
        s, h, L, V = 1024, PRESETS[name].hidden, PRESETS[name].layers, PRESETS[name].vocab
        blocks, head = L * (24 * h * h + 4 * s * h), 2 * h * V
        shares.append(f"{name} {percent(blocks / (3 * (blocks + head)), 1)}")
    return "; ".join(shares)


@_erratum("Selective recomputation costs 2.7 % more compute", "Korthikanti et al. 2022, eq. 8", 6, "It adds one "
    "forward of the attention core, not three. PyTorch's checkpoint stops early and runs half.")  # fmt: skip
def two_point_seven() -> str:
    step = published.korthikanti_model_flops(GPT3)
    paper = published.korthikanti_hardware_flops(GPT3) - step
    core = published.selective_recomputation_flops(GPT3)
    shares = [f"{100 * size / step:.2f} %" for size in (paper, core, core / 2)]
    return f"eq. 8: {shares[0]}; the core's forward once more: {shares[1]}; q·kᵀ alone: {shares[2]}"


@_erratum("Selective recomputation saves up to 70 %", "the lecture, with an example of 97 and 17 GB", 6, "70 % is "
    "GPT-3's share (Korthikanti et al. 2022) and no upper limit: the lecture's own example saves more.")  # fmt: skip
def seventy_percent() -> str:
    shares = {run.model.name: 1 - 34 / (34 + 5 * run.model.heads * run.seq_len / run.model.hidden)
              for run in (GPT3, LLAMA)}  # fmt: skip
    return "; ".join(f"{name} {percent(share)}" for name, share in shares.items())


@_erratum("Llama-3 8B keeps 97 GB of activations at 4,096 tokens, 17 GB with selective recomputation", LECTURE, 5,
    "Both are GiB. And a GPT of that size with eager attention and dropout would keep them.")  # fmt: skip
def ninety_seven() -> str:
    eager = LLAMA.replace(attention="eager")
    said, selective = published.korthikanti_activation_bytes(eager), _without_scores(LLAMA)
    formula = f"{_gib(said)} = {_gb(said)}, without its term in s² {_gib(selective)} = {_gb(selective)}"
    return f"GPT's formula {formula}; a Llama keeps {_gib(activation_bytes(eager))} eager, " \
        f"{_gib(activation_bytes(LLAMA))} with flash attention"  # fmt: skip


def _without_scores(run: TrainingRun) -> int:
    return 34 * run.seq_len * run.micro_batch * run.model.hidden * run.model.layers


@_erratum("With full recomputation it keeps 1 GB", "the lecture", 5, "1 GiB is the checkpoints alone: the block that "
    "runs again and the loss come on top.")  # fmt: skip
def one_gibibyte() -> str:
    full = LLAMA.replace(recompute="full")
    checkpoints, live = published.checkpoints_bytes(full), published.korthikanti_block_bytes(full)
    there = estimate(full)
    rest = there["activations"] + there["temporaries"]
    return (
        f"checkpoints {_gib(checkpoints)} = {_gb(checkpoints, 2)}; GPT's live block {_gib(live)} more; a Llama with "
        f"flash attention, at its peak and with the loss, {_gib(rest)}"
    )


@_erratum("A 1B model takes 16 GB of states, 25 GB at 8,192 tokens with selective recomputation", "the lecture", 5,
    "The sum is right for 10⁹ parameters and for what blocks keep. A model called “1B” has more parameters, and its "
    "loss comes on top.")  # fmt: skip
def one_billion() -> str:
    run = TrainingRun("llama3.2-1b", 1, 8192, "bf16-master")
    kept, own = _without_scores(run), 16 * run.model.parameters
    return (
        f"16 GB + 34·s·b·h·L = 16 GB + {_gb(kept)} = {_gb(16 * GB + kept)}; Llama 3.2 1B has "
        f"{run.model.parameters / 1e9:.2f} · 10⁹ parameters, {_gb(own)} of states, and with flash attention and its "
        f"loss a peak of {_gb(estimate(run).total)}"
    )


@_erratum("The states of an 8B model take roughly 100 GB", "the lecture", 1, "16 bytes for each of its parameters.")
def states_of_eight_billion() -> str:
    N = PRESETS["llama3-8b"].parameters
    return f"16 bytes · {N:,} = {_gb(16 * N)}"


@_erratum("Activations are kept until the optimizer step", UNCLEAR, 1, "Each is freed in backward as soon as it has "
    "been used.")  # fmt: skip
def until_the_step() -> str:
    there = moments(XL)
    begin, end = there["end of forward"]["activations"], there["optimizer step"]["activations"]
    return f"GPT-2 XL: {_gb(begin)} when forward ends, {format_bytes(end)} when the optimizer steps"


@_erratum("We can't do much about residual memory", UNCLEAR, 10, "Temporaries, buffers and fragmentation all have a "
    "cause and a cure.")  # fmt: skip
def residual_memory() -> str:
    run = FULL.replace(precision="amp-bf16")
    foreach, fused = (moments(run.replace(optimizer=f"adamw-{how}"))["optimizer step"]["temporaries"]
                      for how in ("foreach", "fused"))  # fmt: skip
    whole, chunks = estimate(run).total, estimate(run.replace(loss_chunks=16)).total
    return (
        f"Adam's temporaries: {_gb(foreach)} with foreach, {format_bytes(fused)} fused; peak of GPT-2 XL, recomputed: "
        f"{_gb(whole)}, with the loss in 16 chunks {_gb(chunks)}"
    )


@_erratum("400 sequences of 1,024 tokens are about 4 million tokens", "the lecture", 7, "Ten times too many.")
def four_million() -> str:
    return f"400 · 1,024 = {400 * 1024:,}"


@_erratum("8×7 is roughly 56 B parameters", "the lecture", 4, "Only the MLPs are there eight times.")
def eight_times_seven() -> str:
    mixtral, mistral = PRESETS["mixtral-8x7b"], PRESETS["mistral-7b"]
    counts = [count / 1e9 for count in (mixtral.parameters, mixtral.active_parameters, 8 * mistral.parameters)]
    shown = "Mixtral 8x7B: {:.1f} · 10⁹ parameters, {:.1f} · 10⁹ for a token; 8 · Mistral 7B: {:.1f} · 10⁹"
    return shown.format(*counts)


@_erratum("The batch becomes 64 M tokens after 690 billion", "the lecture", 7, "MiniMax-01 has 790 billion.")
def seven_hundred_billion() -> str:
    seen = 700 * 10**9
    slip = [(690 * 10**9 if start == 790 * 10**9 else start, size) for start, size in RAMP]
    said, read = (batch_at(ramp, seen) // 10**6 for ramp in (RAMP, slip))
    return f"after 700 · 10⁹ tokens the batch is {said} M tokens; with the slip, {read} M"


@_erratum("23.68 % top-1 error at α = 0.1", "Goyal et al. 2017, caption of table 2(a); the slides repeat it", 7, "The "
    "caption took the neighboring row.")  # fmt: skip
def wrong_row() -> str:
    rows = [row for row in GOYAL if row.batch == 256]
    rate = next(row.rate for row in rows if row.error == GOYAL_CAPTION)
    base = goyal(256, "0.10").error
    return f"in the paper's table {GOYAL_CAPTION} % stands at α = {rate}, and α = 0.10 has {base:.2f} %"


@_erratum("255·255 overflows in fp16", "“The Technology Behind BLOOM Training” (Hugging Face blog, July 2022)", 3, "It "
    "is below the largest number by a little.")  # fmt: skip
def below_the_largest() -> str:
    largest = (2**11 - 1) * 2**5
    first = next(n for n in range(1, 300) if n * n > largest)
    return f"255·255 = {255 * 255:,}, the largest fp16 number is {largest:,}; {first}·{first} is the first to overflow"


@_erratum("Under autocast cross_entropy runs in float32", "PyTorch's list of CUDA operations that autocast to float32, "
    "in torch.amp's documentation", 3, "The loss does. Its log-softmax runs, and is kept, in the "
    "logits' 16 bits.")  # fmt: skip
def log_softmax_in_bf16() -> str:
    run = XL.replace(precision="amp-bf16")
    logits = run.seq_len * run.micro_batch * run.model.vocab
    first, copy = (saved.size // logits for saved in loss_saved(run)[:2])
    return f"bytes that the loss keeps for each logit: {first} of log-softmax, {copy} of its copy in fp32"


GPT1_VOCABULARY = 40_478
"""GPT-1's: 40,000 merges (Radford et al. 2018, section 4.1) and 478 characters; its checkpoint's vocab_size."""


@_erratum("GPT-2 has 117 M to 1,542 M parameters", "Radford et al. 2019, table 2", 4, "OpenAI later corrected it. The "
    "numbers follow from GPT-1's vocabulary.")  # fmt: skip
def smaller_vocabulary() -> str:
    shown = []
    for name in ("gpt2", "gpt2-xl"):
        small = parameter_count(replace(PRESETS[name], vocab=GPT1_VOCABULARY)) / 1e6
        shown.append(f"{name}: paper {GPT2_PAPER[name]} M, with V = {GPT1_VOCABULARY:,} {small:.0f} M, "
                     f"released {PRESETS[name].parameters / 1e6:.0f} M")  # fmt: skip
    return "; ".join(shown)


@_erratum("A tensor takes its size rounded up to 512 bytes", "a common description, which this course simulates by",
    10, "In a fresh segment. A cached block whose rest is at most 1 MiB is handed out whole.")  # fmt: skip
def not_split() -> str:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MiB))
    allocator.malloc(12 * MiB - MiB // 2)
    asked, taken = 12 * MiB - MiB // 2, allocator.allocated
    return f"asked for {asked / MiB:.1f} MiB where a cached block of 12 MiB lies free: {taken / MiB:.1f} MiB allocated"


@_erratum("ZeRO-2 with T5 of 2,851 M parameters on 8 GPUs: 15.93GB", "DeepSpeed's documentation, Memory Requirements",
    13, "The page's sum is right, its unit is GiB. The code behind it has another sum by now.")  # fmt: skip
def printed_as_gb() -> str:
    N, D = 2_851_000_000, 8
    size, now = published.deepspeed_zero2_bytes(N, D), 2 * N + 18 * N / D
    theirs = f"{_gib(size, 2)} = {_gb(size, 2)}"
    return f"4N + 16N/8 for its N = 2,851 · 10⁶: {theirs}; 2N + 18N/8, the code's: {_gib(now, 2)}"


@_erratum("With checkpointing, 34·s·b·h·L bytes of activations", "EleutherAI cookbook, calc_transformer_mem.py (commit "
    "069ae2e)", 13, "That is Korthikanti et al.'s row for selective recomputation, which the "
    "comment credits to ZeRO.")  # fmt: skip
def selective_row() -> str:
    said, really = published.cookbook_parts(FULL)["activations"], activation_bytes(FULL)
    return f"GPT-2 XL, 32 sequences: it says {_gb(said)}; with full recomputation forward keeps {_gb(really)}"


@_erratum("Training with Adam in 16 bits takes two times the model", "accelerate, commands/estimate.py (commit "
    "00e4d26)", 13, "The largest of four stages, for a batch of 1. What a step holds is a sum, activations left out as "
    "said.")  # fmt: skip
def largest_stage() -> str:
    run = TrainingRun("llama3.1-8b", 1, 8192)
    said = published.accelerate_bytes(run)
    held = 16 * run.model.parameters
    return f"Llama 3.1 8B in 16 bits: it says {_gb(said)}; weights, gradients and Adam's moments alone are {_gb(held)}"


@_erratum("For large models most memory is model states", "texts after ZeRO, in the words of the course's notes", 1,
    "Up to a number of tokens, which depends on the model and on what is recomputed.")  # fmt: skip
def mostly_states() -> str:
    runs = {"1 sequence": XL.replace(micro_batch=1), "32 sequences": XL, "32 with full recomputation": FULL}
    shares = []
    for name, there in ((name, estimate(run)) for name, run in runs.items()):
        states = there["parameters"] + there["gradients"] + there["optimizer_states"]
        shares.append(f"{name} {percent(states / there.total)}")
    return f"GPT-2 XL, states at the peak: {', '.join(shares)}"


DEFAULTS = {"PyTorch": "off", "DeepSpeed": "off", "transformers": "off", "Megatron-LM": "off", "torchtitan": "on"}
"""The default of a library: does it recompute? Lesson 06 names the sources."""


@_erratum("Checkpointing is on by default in most libraries", UNCLEAR, 6, "Most wait to be told.")
def by_default() -> str:
    on, off = ([name for name, state in DEFAULTS.items() if state == wanted] for wanted in ("on", "off"))
    return f"on in {len(on)} of {len(DEFAULTS)}, {', '.join(on)}; off in {', '.join(off)}"


@_erratum("What lies outside the blocks is less than 0.01 % of all activations", "Korthikanti et al. 2022, section "
    "4.3, of its model with 22 billion parameters", 5, "Its own formula gives over half a percent; far more with a "
    "large vocabulary and flash attention.")  # fmt: skip
def outside_the_blocks() -> str:
    h, a, L, V, s = 6144, 64, 48, 51_200, 2048
    ends, blocks = 1 + 4 * (1 + V / h), L * (34 + 5 * a * s / h)
    return f"1 + 4·(1 + V/h) of that and L·(34 + 5·a·s/h): {100 * ends / (ends + blocks):.2f} % for 22B"


# ------------------------------------------------------------------------------------------------ as a table, as a page

HEADINGS = ("claim", "where", "what is right", "computed", "lesson")


@dataclass(frozen=True, repr=False)
class ErrataTable:
    """Errata as a table, their evidence computed as it is drawn."""

    errata: Sequence[Erratum]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells, without the headings."""
        for one in self.errata:
            yield one.claim, one.source, one.right, one.evidence(), f"{one.lesson:02d}"

    def __repr__(self) -> str:
        return "\n".join(f"{claim} ({source})\n  {right} {found}." for claim, source, right, found, _ in self.rows())

    def _repr_html_(self) -> str:
        return html_table([HEADINGS, *self.rows()], words=len(HEADINGS))


def errata_table(lessons: Sequence[int] = ()) -> ErrataTable:
    """The errata of these lessons, of all where none is named. Raises ValueError where a lesson has none."""
    chosen = [one for one in ERRATA if not lessons or one.lesson in lessons]
    if not chosen:
        raise ValueError(f"no errata in lessons {list(lessons)}: {sorted({one.lesson for one in ERRATA})} have some")
    return ErrataTable(chosen)


INTRODUCTION = """# What the sources got wrong

This course owes nearly all that it knows to public texts. Where one of them is imprecise or wrong, it says so here: the
claim, where it stands, what is right, and numbers that the course computes
(`course_utils/lessons/calculators/errata.py`; this page is built from it and never edited by hand). Claims are quoted
or shortened, as they stood when they were read for this course, at the date or commit that is named where there is one;
a text may have been corrected since. Sizes are the course's own estimates, which tests compare with a simulated step; 1
GB = 10⁹ bytes, 1 GiB = 2³⁰ bytes.

Next to papers and tools, three texts are quoted: *the newsletter* ([Daily Dose of Data Science, “Where Did the GPU
Memory Go?”](https://blog.dailydoseofds.com/p/where-did-the-gpu-memory-go)), *the slides* (“Large models training”, of a
course on optimization for machine learning at HSE University), and *the lecture* (on training large models, after the
Ultra-Scale Playbook of 2025).

[Lesson 13](../notebooks/13_who_is_right.ipynb) works with this list. Found another, or an error here? Say what you read
and what you computed: [CONTRIBUTING.md](../CONTRIBUTING.md).
"""


def page() -> str:
    """docs/errata.md."""
    lessons = {int(path.name[:2]): path.name for path in numbered(ROOT / "notebooks")}
    parts = [INTRODUCTION]
    for number, one in enumerate(ERRATA, start=1):
        lines = [
            f"**Where:** {one.source}.", f"**What is right:** {one.right}", f"**Computed:** {one.evidence()}.",
            f"**More:** [lesson {one.lesson:02d}](../notebooks/{lessons[one.lesson]}).",
        ]  # fmt: skip
        wrapped = "\n\n".join(fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines)
        parts.append(f'<span id="erratum-{number}"></span>\n\n## {number} · “{one.claim}”\n{wrapped}\n')
    return "\n".join(parts)
