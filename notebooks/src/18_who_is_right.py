# ---
# jupyter:
#   course:
#     minutes: 65
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · Who is right?
#
# **65 minutes.** You should know what a block keeps ([lesson 05](05_activations.ipynb)), what recomputation leaves
# ([lesson 06](06_recomputation.ipynb)), and what autocast adds ([lesson 03](03_mixed_precision.ipynb)). You need no
# GPU.
#
# Here you ask nine published formulas and calculators for the memory of a training step, find the term that each one
# lacks, and close the account to the byte. Each was made for something. *For what?*
#
# The judge is a [*simulated*](../docs/glossary.md#simulated-gpu) step: it runs torch's own code and counts every
# tensor. At the end, real GPUs judge the nine, and the judge.

# %% [markdown]
# ## Nine calculators
# You train Llama 3.1 8B on one GPU: two sequences of 8,192 tokens, [bf16](../docs/glossary.md#fp16-and-bf16) autocast,
# AdamW, [flash attention](../docs/glossary.md#flashattention), nothing recomputed. How much memory does that take?
#
# Six of the nine answer this question. Three answer a part: accelerate and DeepSpeed count only states, Korthikanti et
# al. only activations.
#
# **Your guess.** Divide the largest of the six answers by the smallest: what do you get?

# %%
from course_utils import TrainingRun, format_bytes, plus_minus
from course_utils.interactive.guesses import predict, reveal, waits_for

llama = TrainingRun("llama3.1-8b", micro_batch=2, seq_len=8192, precision="amp-bf16")
xl = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16")
predict("18.fold", unit="times")

# %% tags=["hide-input"]
from course_utils.lessons.calculators.figures import side_by_side
from course_utils.lessons.calculators.calculators import answers, calculator, spread

waits_for("18.fold")
runs = {"Llama 3.1 8B": llama, "GPT-2 XL": xl}
order = [name for part in ("states", "activations", "a step") for name in answers(llama, part)]
panels = {}
for model, run in runs.items():
    panels[model] = {calculator(name).label: calculator(name).parts(run) for name in order}
side_by_side(panels, "Six public answers to one question, three to a part of it: no two agree")

# %%
reveal("18.fold", spread(llama, "a step"), unit="times")
for model, run in runs.items():
    for who, counts in {"six": "a step", "all nine": ""}.items():
        low, *_, high = answers(run, counts).values()
        least, most = format_bytes(low, "GB", 1), format_bytes(high, "GB", 1)
        print(f"{model}, {who:8s}: {least:>7s} to {most}: {spread(run, counts):.1f} times")

# %% [markdown]
# The factor of all nine mixes parts and sums. That of the six is real disagreement. Its main cause is hatched in the
# figure: the s×s matrix of [eager attention](../docs/glossary.md#eager-attention), which a flash kernel never writes.
# So the factor is not a constant:

# %% tags=["hide-input"]
from course_utils.figures import lines

batches = [1, 2, 4, 8]
spreads = {}
for model, run in runs.items():
    spreads[model] = (batches, [spread(run.replace(micro_batch=b), "a step") for b in batches])
title = "The larger the micro-batch, the further apart the six answers are"
ratio = "largest answer / smallest answer"
lines(spreads, title, "sequences in the micro-batch", ratio, log_x=True)

# %% [markdown]
# **What was each made for?**

# %%
for name in order:
    one = calculator(name)
    print(f"{name:29s} {one.made_for}\n{'':29s} [{one.source}]")

# %% [markdown]
# Tools change. `course_utils/estimating/published.py` has all nine as we read them, each with its source and what it
# leaves out.

# %% [markdown]
# ## Measure it
# **Your guess.** How many of the six are within 10 % of the step's peak, for Llama 3.1 8B?

# %%
predict("18.within", unit="calculators")

# %%
from course_utils import measure
from course_utils.lessons.calculators.calculators import truth

waits_for("18.within")
measured = {model: measure(run) for model, run in runs.items()}
real = {model: truth(measurement) for model, measurement in measured.items()}
for model, measurement in measured.items():
    peak = format_bytes(measurement.peak, "GB", 1)
    print(f"{model}: {peak} in {measurement.peak_phase} ({measurement.provenance})")

# %% tags=["hide-input"]
waits_for("18.within")
word = real["GPT-2 XL"].word
with_truth = {model: panels[model] | {f"{word} step": real[model].parts} for model in runs}
peaks = {model: real[model].peak for model in runs}
title = f"Answers with s×s matrices are two to four times the {word} peak"
side_by_side(with_truth, title, peaks, real["GPT-2 XL"].provenance, word)

# %%
from course_utils.lessons.calculators.calculators import percent_off

near = {}
for model, run in runs.items():
    sizes, peak = answers(run, "a step"), real[model].peak
    near[model] = [name for name, size in sizes.items() if abs(percent_off(size, peak)) <= 10]
reveal("18.within", len(near["Llama 3.1 8B"]), unit="calculators")
for model, names in near.items():
    print(f"{model}, within 10 %: {', '.join(names)}")

# %% [markdown]
# **The gap.** The lowest bar, the step, has two colors that no calculator has: autocast's 16-bit [weight
# copies](../docs/glossary.md#autocast), and the temporaries of the loss. So no answer can be right in every part.

# %% [markdown]
# ## Near, and why
# llm-analysis comes nearest. But a total's error is the sum of its parts' [signed
# errors](../docs/glossary.md#signed-error).
#
# **Your guess.** Drop the signs of these errors for GPT-2 XL, and add them up: how many GB?

# %%
off = calculator("llm-analysis").total(xl) - real["GPT-2 XL"].peak
print(f"llm-analysis minus {word}, GPT-2 XL: {plus_minus(off / 1e9, 1)} GB")
predict("18.cancel", unit="GB")

# %% [markdown]
# Cut each answer and the simulated peak into the same parts. Their differences are eight terms. They add up to the
# complete gap, to the byte:

# %%
from course_utils.lessons.calculators.calculators import TERMS, gaps

for term in TERMS:
    print(f"{term.name:24s} {term.why}")

# %%
from course_utils.lessons.calculators.figures import gap_map

waits_for("18.cancel")
table = {name: gaps(name, xl, real["GPT-2 XL"]) for name in order}
title = f"GPT-2 XL, answer minus {word} peak in GB: llm-analysis is near because its errors cancel"
gap_map(table, real["GPT-2 XL"].peak, title, provenance=real["GPT-2 XL"].provenance)

# %%
parts = table["llm-analysis"]
reveal("18.cancel", sum(map(abs, parts.values())))
for name, found in table.items():
    error = calculator(name).total(xl) - real["GPT-2 XL"].peak
    wrong = sum(map(abs, found.values())) / abs(error)
    print(
        f"{name:29s} sum of terms − error: {sum(found.values()) - error} bytes; "
        f"errors of parts / error: {wrong:.1f}"
    )

# %% [markdown]
# **The gap.** llm-analysis counts gradients in full, though none exist at the peak, and slightly too much in the
# blocks. It counts too little for the loss, and no copies or temporaries. The two sides cancel. For Llama it counts too
# little in the blocks. A total that fits proves little.

# %% [markdown]
# ## Find the missing term
# Choose a calculator, think about what it was made for, and tick the *one* term that matters most: how does it rank
# among the eight? Then tick more terms until the answer is exact.

# %%
from course_utils.lessons.calculators.widget import mender

cases = {model: (run, real[model]) for model, run in runs.items()}
mender(cases, "EleutherAI cookbook")

# %% [markdown]
# **Your guess.** For Llama 3.1 8B, [ZeRO](../docs/glossary.md#zero) adds up 16 bytes per parameter and $12hbsL$ numbers
# of activations. How many GB is its largest missing term?

# %%
predict("18.zero", unit="GB")

# %%
from course_utils.lessons.calculators.figures import corrected
from course_utils.lessons.calculators.calculators import largest_gap

waits_for("18.zero")
step = real["Llama 3.1 8B"]
worst = largest_gap("ZeRO", llama, step)
lacks = -gaps("ZeRO", llama, step)[worst]
title = (
    "ZeRO with every term corrected: it lacked activations of the blocks, the loss and the copies"
)
corrected("ZeRO", [term.name for term in TERMS], llama, step, title, step.provenance)

# %%
print(f"largest term: {worst}")
reveal("18.zero", lacks)
h, kv, f = llama.model.hidden, llama.model.kv, llama.model.ffn
print(
    f"ZeRO: 24·h = {24 * h:,} bytes per token and block; "
    f"under autocast a Llama keeps 22·h + 4·kv + 8·ffn = {22 * h + 4 * kv + 8 * f:,}"
)

# %% [markdown]
# **The gap** of each, its largest term, and what remains when you correct only that term:

# %%
from course_utils.lessons.calculators.calculators import add_back

found = {name: gaps(name, llama, real["Llama 3.1 8B"]) for name in order}
title = (
    f"Llama 3.1 8B, answer minus {word} peak in GB: one column explains the four highest answers"
)
gap_map(found, real["Llama 3.1 8B"].peak, title, provenance=real["Llama 3.1 8B"].provenance)

# %% tags=["hide-input"]
peak = real["Llama 3.1 8B"].peak
for name in order:
    term = largest_gap(name, llama, real["Llama 3.1 8B"])
    before = percent_off(calculator(name).total(llama), peak)
    after = percent_off(add_back(name, [term], llama, real["Llama 3.1 8B"]), peak)
    print(
        f"{name:29s} {plus_minus(before, 1):>7} %; "
        f"with {term} corrected {plus_minus(after, 1):>6} %"
    )

# %% [markdown]
# Read the columns, too. *Gradients at the peak*: nearly every calculator adds up the largest value of each kind, but
# the peak is the largest sum at one moment. *Number of parameters*: $12h^2 + 13h$ per block describes a GPT. A Llama
# has three wide matrices and fewer keys.

# %% [markdown]
# ## On its home ground
# Was Korthikanti et al.'s formula ever right? Ask about the run that it was made for: a GPT with dropout, eager
# attention, weights and activations in 16 bits. Compare it with what the step keeps for backward once the loss exists.
# **Your guess.** By how many percent is it off, for GPT-2?

# %%
home = TrainingRun("gpt2", micro_batch=8, seq_len=1024, precision="bf16-master", attention="eager")
predict("18.home", unit="%")

# %%
from course_utils.evidence.accuracy import truth_of
from course_utils.estimating.published import FORMULAS

step = measure(home)
by_name = {formula.name: formula for formula in FORMULAS}
off = {}
for name, formula in by_name.items():
    if name != "accelerate":  # it takes only fp32 weights
        off[name] = percent_off(formula.bytes(home), truth_of(formula.counts, step))
reveal("18.home", abs(off["Korthikanti: all"]), unit="%")
s, b, V = home.seq_len, home.micro_batch, home.model.vocab
counted = truth_of("activations and loss", step)
print(f"its blocks only: {plus_minus(off['Korthikanti: blocks'], 2)} %")
more = plus_minus(200 * s * b * V / counted, 1)
print(f"its fp32 logits take 4·s·b·V, the step keeps 2·s·b·V: {more} %")

# %% [markdown]
# **The gap.** The blocks are right to a fraction of a percent. The rest is the loss: the formula has fp32
# [logits](../docs/glossary.md#logits), this step keeps a 16-bit [log-softmax](../docs/glossary.md#log-softmax). The
# same formula missed Llama's peak by a factor of three. The formula did not change. The question did.
#
# And the others on this run, each compared with what *it* counts?

# %%
for name, percent in off.items():
    print(f"{name:29s} {plus_minus(percent, 1):>6} % of {by_name[name].counts}")

# %% [markdown]
# States are right, or too high where a formula adds an fp32 copy of the gradients for the update. Totals lack the
# logits, the gradient of the loss, or eager attention's scores. "12hbsL" is low even at home.

# %% [markdown]
# ## The 60 GB question
# For GPT-2 XL and 32 sequences of 1,024 tokens, a footnote of the ZeRO paper says 12·h·b·s·L numbers, the "60 GB" that
# so many texts repeat ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.2). It does not say which
# twelve. **Your guess.** How many GB does ZeRO's number leave out, with flash attention and everything in 16 bits?

# %%
plain = xl.replace(precision="bf16-master")
b, s, h, a, L = plain.micro_batch, plain.seq_len, 1600, 25, 48
zero = 2 * 12 * h * b * s * L
print(f"12·h·b·s·L in 16 bits: {zero / 1e9:.1f} GB")
predict("18.sixty", unit="GB")

# %%
kept = {}
for attention in ("flash", "eager"):
    step = measure(plain.replace(attention=attention))
    kept[attention] = step.moments["end of forward"]["activations"]
    print(f"{attention}: {kept[attention] / 1e9:.1f} GB kept when forward ends ({step.provenance})")
reveal("18.sixty", kept["flash"] - zero)

# %% [markdown]
# Neither kernel keeps 60 GB. One choice of tensors from [lesson 05](05_activations.ipynb)'s picture gives exactly
# ZeRO's 24 bytes: inputs of four matrices 14, queries, keys and values 6, inputs of two norms 4. What is missing?

# %%
missing = {
    "GELU's input 8, dropout masks 2": 10 * s * b * h * L,
    "norms' statistics, flash's logsumexp": (16 + 4 * a) * s * b * L,
    "outside: a mask 1, inputs of norm and head 2 + 2": 5 * s * b * h + 8 * s * b,
}
missing["left over"] = kept["flash"] - zero - sum(missing.values())
missing["eager: 5·a·s/h more, and no logsumexp"] = (5 * s - 4) * a * s * b * L
missing["left over with eager"] = kept["eager"] - kept["flash"] - list(missing.values())[-1]
for name, size in missing.items():
    print(f"{name:49s} {size / 1e9:8.4f} GB")

# %% [markdown]
# **The gap** is closed. What is left over is the random state that a flash kernel keeps, and eager attention's causal
# mask.
#
# ### Other texts' figures
# A lecture, after the [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), gives more
# figures. For one sequence of 4,096 tokens, Llama-3 8B has 97 GB of [activations](../docs/glossary.md#activations), 17
# GB with [selective recomputation](../docs/glossary.md#selective-recomputation), 1 GB with full, and up to 1,500 GB for
# long sequences. A model of 10⁹ parameters takes 16 GB of states, and 25 GB with 8,192 tokens and selective
# recomputation. Here is where they come from:


# %%
def gpt(L, s, h, a):
    return L * s * (34 * h + 5 * a * s)


said = {  # Llama-3 8B has 32 layers, h = 4,096, 32 heads, kv = 1,024, and ffn = 14,336
    "97: GPT's formula, eager attention": gpt(L=32, s=4096, h=4096, a=32),
    "17: without s²": gpt(L=32, s=4096, h=4096, a=0),
    "1: one input per block": 32 * 2 * 4096 * 4096,
    "… left out, the block that is recomputed": gpt(L=1, s=4096, h=4096, a=32),
    "… left out, the loss: fp32 log-softmax": 4 * 4096 * 128_256,
    "up to 1,500: the first at s = 16,384": gpt(L=32, s=16_384, h=4096, a=32),
    "a real Llama's blocks with flash": 32 * 4096 * (12 * 4096 + 4 * 1024 + 8 * 14_336),
    "25: 16 bytes · 10⁹": 16 * 10**9,
    "… and 34·s·h·L of Llama 3.2 1B": gpt(L=16, s=8192, h=2048, a=0),
    "ZeRO's 60, by GPT's formula, s = 1,000": 32 * gpt(L=48, s=1000, h=1600, a=25),
}
for name, size in said.items():
    print(f"{name:42s} {size / 2**30:8,.1f} GiB = {size / 1e9:8,.1f} GB")

# %% [markdown]
# So the lecture's "GB" are GiB, by the formula of a *GPT* with eager attention. Nearly all of the 97 is 5·a·s²·b, which
# a flash kernel never keeps. A real Llama keeps a fifth, and nothing is recomputed. The sum for 8,192 tokens mixes two
# models: states of 10⁹ parameters, and activations of a larger one.
#
# The lecture also says "over 50 GB" for one sequence of 4,096 tokens of a small Llama, states included. In which
# recipe?

# %%
from course_utils import estimate

small = TrainingRun("llama3.2-1b", micro_batch=1, seq_len=4096)
for kernel in ("eager", "flash"):
    for precision in ("fp32", "amp-bf16", "bf16-master"):
        if kernel == "eager" or precision != "fp32":  # there is no flash kernel for fp32
            total = estimate(small.replace(precision=precision, attention=kernel)).total
            print(f"{precision:11s} {kernel} attention: {total / 1e9:.1f} GB, estimated")

# %% [markdown]
# In fp32 or under autocast, a step with eager attention takes more than 50 GB. With 16-bit weights, or with a fused
# kernel, it takes less. The kernel and the recipe belong to every figure.

# %% [markdown]
# ## Another GB
# Not every difference is a term. [DeepSpeed's documentation](https://deepspeed.readthedocs.io/en/latest/memory.html)
# gives "15.93GB" for a T5 of 2,851 million parameters on 8 GPUs under ZeRO-2. **Your guess.** How many GB is it?

# %%
predict("18.gib", unit="GB")

# %%
from course_utils.estimating.published import deepspeed_zero2_bytes

size = deepspeed_zero2_bytes(2_851_000_000, ranks=8)
gb, gib = format_bytes(size, "GB", 2), format_bytes(size, "GiB", 2)
print(f"4N + 16N/8 = {size:,} bytes = {gb} = {gib}")
reveal("18.gib", size)
units = {"KiB": 2**10 / 1e3, "MiB": 2**20 / 1e6, "GiB": 2**30 / 1e9, "TiB": 2**40 / 1e12}
for unit, factor in units.items():
    less = f"{1 - 1 / factor:.1%}".replace("%", " %")
    print(f"{unit} read as {unit.replace('i', '')}: {less} too little")

# %% [markdown]
# **The difference** is one letter, the i, and it grows with the prefix.

# %% [markdown]
# ## The ledger
# Now make your own account for autocast with a flash kernel, three ways: a *closed form* for paper, the *tensors* alive
# at the peak, one by one, and the *step's peak by kind of memory*.
#
# | part | closed form, bytes |
# |---|---|
# | weights and Adam's moments; no gradients yet | 12·N |
# | a block, Llama | s·b·(22·h + 4·kv + 8·ffn + 4·a + 8) |
# | a block, GPT | s·b·(38·h + 4·a + 16) |
# | outside the blocks | s·b·(6·h + 6·V); with fp32 logits, as in Llama, s·b·(6·h + 4·V) |
# | weight copies | 2 for each number in a matrix |
# | temporaries: gradient of the loss | 4·s·b·V; with fp32 logits 8·s·b·V |
#
# **Your guess.** GPT-2 XL peaks at 134 GB. By how many MB is the closed form off?

# %%
predict("18.ledger", unit="MB")

# %%
from course_utils.lessons.calculators.calculators import three_ways

waits_for("18.ledger")
three_ways(xl, measured["GPT-2 XL"])

# %%
three_ways(llama, measured["Llama 3.1 8B"])

# %%
from course_utils.lessons.calculators.calculators import autocast_formula, outside_blocks
from course_utils.measuring.compare import Comparison

missing = real["GPT-2 XL"].peak - sum(autocast_formula(xl).values())
reveal("18.ledger", missing, unit="MB")
for name, size in outside_blocks(measured["GPT-2 XL"]).items():
    print(f"{name:42s} {size:15,} bytes")
for model, run in runs.items():
    gap = plus_minus(estimate(run).total - real[model].peak)
    print(f"{model}: the course's estimate − {word} = {gap} bytes")
    for term, size in Comparison(run, estimate(run), measured[model]).terms.items():
        print(f"    {term:46s} {plus_minus(size):>7s}")

# %% [markdown]
# **The gap** for GPT-2 XL is the mask of the dropout after the embedding, one byte per number, and the last norm's
# statistics: both in the list above, neither in the table. The rest is rounding to blocks of 512 bytes, and the random
# state that a flash kernel keeps. A handful of lines on paper is right to a thousandth.
#
# `estimate` is such a table, with a line for every tensor of some size
# ([formula.py](../course_utils/estimating/formula.py)). Its own gap is printed term by term: only rounding, and tensors
# of a few numbers.
#
# A real card adds what a simulation cannot see: CUDA's context, and the scratch of some kernels. It also adds cuBLAS's
# workspaces, which a run counts only if it names its `card`.
#
# ## Ask the GPUs
# Only real GPUs can overrule a simulation. Many people publish what their GPUs measured, next to their code. The course
# wrote each step again in plain PyTorch and simulated it. No constant is fitted. Where a source leaves a choice open,
# the row counts as known *in part*.
#
# **Your guess.** Take the rows whose source leaves nothing open, and the counter `max_memory_allocated`. Half of the
# simulation's errors are smaller than how many percent?

# %%
from statistics import median

from course_utils.evidence.published_tables import answered_rows, percent

certain = [row for row in answered_rows() if row.certain and row.counter == "allocated"]
predict("18.cards", unit="%")

# %% tags=["hide-input"]
waits_for("18.cards")
sorted_errors = {}
for counter in ("allocated", "reserved"):
    rows = [row for row in answered_rows() if row.counter == counter and row.certain]
    found = sorted(percent(row, row.said) for row in rows)
    sorted_errors[counter] = (list(range(1, len(found) + 1)), found)
lines(
    sorted_errors,
    "The simulation is within 0.1 % of most published counters",
    "published figures, by error",
    "simulated − measured, %",
    provenance="measured on others' GPUs, cited below",
)

# %%
from course_utils.evidence.published_tables import frozen_summary

reveal("18.cards", round(median(abs(percent(row, row.said)) for row in certain), 5), unit="%")
frozen_summary()

# %% [markdown]
# These ten rows come from different people and models. The counter *driver* is what `nvidia-smi` showed, with CUDA's
# context.

# %%
from course_utils.evidence.published_tables import ten_rows

ten_rows()

# %% [markdown]
# So a program that knows each tensor and each rule of the allocator can predict a card. Can a formula? Ask the nine,
# and `estimate`, our closed form, about the published steps of transformers. Each gets the run nearest to the step. A
# formula that does not cover the run, or counts something else than the GPU, gives no answer.
#
# **Your guess.** Half of the nine's answers are further from the card than how many percent?

# %%
from course_utils.evidence.judged import OURS, ratios

judged = ratios()
predict("18.formulas", unit="%")

# %% tags=["hide-input"]
from course_utils.lessons.calculators.figures import strips

waits_for("18.formulas")
rings = [row.id for row in answered_rows() if row.counter != "allocated"]
title = "Formulas miss the card, ours too; simulating the same code hardly does"
source = "measured on others' GPUs; a ring is reserved memory, which no sum of tensors includes"
strips(judged, title, source, rings)

# %%
from course_utils.evidence.tables import BIAS_HEADINGS, Table, bias_of

off = []
for name, found in judged.items():
    if name not in OURS:
        off += [abs(percent_off(ratio, 1)) for ratio in found.values()]
reveal("18.formulas", median(off), unit="%")
print(f"At the top of this lesson, the nine answers were {spread(llama):.0f} times apart.")
rows = []
for name, found in judged.items():
    bias = bias_of(found.values()) if found else ("–",) * 4
    rows.append((name, len(found), *bias))
headings = ("calculator", "rows answered", *BIAS_HEADINGS)
Table("judged", "Answer / measured", headings, tuple(rows))

# %% [markdown]
# **The gap.** accelerate and ZeRO come near where states are nearly everything. Megatron-LM meets one row by chance: it
# counts 18 bytes per parameter instead of 16, two matrices in the MLP instead of three, and no s×s scores.
#
# Our closed form misses rows, too. It knows torch's kernels, and a norm and a GELU made of single operations, but not a
# handwritten softmax, or another kind of checkpoint ([what each costs](../docs/reference_code.md)). A simulation of the
# row's own code has all of that. So measure your own step.
#
# **Your guess.** The course predicted its own runs, then ran them on an NVIDIA H200. In how many percent of them does
# the simulation, with the allocator's blocks, meet `max_memory_allocated` to the byte?

# %%
from course_utils.evidence.gpu import GPU_TABLES, runs_on_gpus

ours = runs_on_gpus()
by = "simulation and blocks"
predict("18.ours", unit="%")

# %%
exact = sum(run.said[by] == run.counted[by] for run in ours)
reveal("18.ours", 100 * exact / len(ours), unit="%")
GPU_TABLES["gpu"]()[0]

# %% [markdown]
# **The gap.** Tensors agree in every run, kind by kind. What remains is in blocks: among free blocks of equal size,
# addresses decide which one is taken. The simulation's segments lie in ascending order. This driver laid most of them
# in descending order, and this release of PyTorch takes the lowest address.
#
# The same card ran most of the published steps again:

# %%
print("\n".join(GPU_TABLES["gpu-published"]()[0].notes))

# %% [markdown]
# ## What the sources got wrong
# **Your guess.** A lecture says "roughly 100 GB" for the states of an 8B model with mixed-precision Adam. How many GB
# are they?

# %%
predict("18.states", unit="GB")

# %%
from course_utils.lessons.calculators.errata import ERRATA, ErrataTable

reveal("18.states", 16 * llama.model.parameters)
print(f"{len(ERRATA)} claims, each with evidence that is computed now:")
ErrataTable()

# %% [markdown]
# Each claim is an [erratum](../docs/glossary.md#erratum). The table is also [a page of its own](../docs/errata.md).
# Read it twice: once for the numbers, once for the *kinds* of mistake. There are few:
#
# | kind of mistake | how you notice |
# |---|---|
# | a formula outside its range | look up the model, kernel and recipe that it was derived for |
# | the sum of the largest instead of the largest sum | ask when each part exists |
# | GB for GiB | two figures that differ by 7 % |
# | a word for a number ("half", "square root") | recompute it |
# | a number copied from the neighboring row | open the source |
# | right in total, wrong in parts | ask for the parts |
#
# Most of these texts are excellent, and this course is built on them. A claim that can be checked is a gift.
#
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(18)

# %% [markdown]
# ## Take home
# **Remember** Cut every answer into parts and compare part by part: a formula is right for what it was made for, and a
# total can be right by chance.
#
# **Breaks when** you take a formula to another model, kernel or recipe than it was derived for, or add up parts that
# never exist at the same time.
#
# **Cheat-sheet line** autocast, flash, at the peak: 12·N + 2 per matrix number + L·s·b·(38·h GPT; 22·h + 4·kv + 8·ffn
# Llama) + s·b·V·(10 GPT; 12 Llama) · off by 7 %? GB and GiB.
#
# Now solve the [exercises of this lesson](../exercises/18_who_is_right.ipynb).
