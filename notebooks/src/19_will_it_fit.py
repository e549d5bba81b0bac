# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 40
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 · Will it fit?
#
# **60 minutes.** You should know states ([lesson 02](02_adam.ipynb)), activations ([lesson 05](05_activations.ipynb)),
# recomputation ([lesson 06](06_recomputation.ipynb)), accumulation ([lesson 08](08_gradient_accumulation.ipynb)), and
# how an allocator runs out ([lesson 12](12_allocator_and_fragmentation.ipynb)). No GPU is needed.
#
# Can one GPU with 32 GB train GPT-2 XL, with 32 sequences per step? The course opened with that question, and now you
# decide it. You also predict a peak and are graded, fit an 8B model on one card and on eight, and find out why six runs
# broke.

# %% [markdown]
# ## The room on a card
# Four numbers are called "the memory of the card": the label's, what the driver lists, what a program gets after the
# driver has kept its part, and what is left for tensors once CUDA has made its
# [context](../docs/glossary.md#context-cuda) in that program.
#
# **Your guess.** How many GB of an "A100 80GB" does a program get?

# %%
from course_utils import estimate, fit, format_bytes, gpu, measure, plus_minus
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("19.room", unit="GB")

# %%
from course_utils.lessons.will_it_fit.fit_figures import catalog

waits_for("19.room")
catalog()

# %%
a100 = gpu("A100-80GB")
reveal("19.room", a100.room)
kept = a100.memory - a100.room
print(
    f"driver lists {format_bytes(a100.memory, 'GB', 1)}, "
    f"a program does not get {format_bytes(kept, 'GB', 1)} of it"
)

# %% [markdown]
# **Two causes** pull in opposite directions. Memory cells come in GiB, 7 % larger than GB, and the driver keeps some
# for itself. The third column comes from real programs' out-of-memory messages, in the GitHub issues of the last
# column. Drivers differ: the RTX 4080's message names nearly the whole card, as Windows tells programs. On Linux it is
# probably less. `a100.rates.source` names the maker's document for bandwidth and arithmetic.
#
# An estimate adds up tensors. Libraries' workspaces, kernels' scratch and rounding come on top. So a
# [plan](../docs/glossary.md#plan) counts as fitting only with 5 % in [reserve](../docs/glossary.md#reserve): 1.05 ·
# peak ≤ what a program gets. The reserve does *not* cover the holes between the allocator's blocks
# ([fragmentation](../docs/glossary.md#fragmentation)), nor CUDA's context, several hundred MB that are still part of
# what a program gets ([lesson 12](12_allocator_and_fragmentation.ipynb) has a recorded one). Lesson 12 trains GPT-2 on
# a card with 6 GiB for tensors. Does it fit by the rule? Does it fit?

# %%
from course_utils import TrainingRun, replay
from course_utils.planning.twin import SAFETY

gpt2 = TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="amp-bf16")
tensors = 6 * 2**30
peak = estimate(gpt2).total
step = measure(gpt2)
sizes = [format_bytes(round(size), "GB", 2) for size in (peak * SAFETY, tensors)]
rule = "fits" if peak * SAFETY <= tensors else "does not fit"
print(f"by the rule it {rule}: {sizes[0]} of {sizes[1]}")
for name, setting in {"as it is": {}, "expandable segments": {"expandable_segments": True}}.items():
    reserved = replay(step, **setting).peak_reserved
    ends = "out of memory" if replay(step, tensors, **setting).failure else "fits"
    print(
        f"{name:20s} reserves {format_bytes(reserved, 'GB', 2)}, "
        f"{reserved / peak:.2f} times the peak: {ends}"
    )

# %% [markdown]
# **The rule is a first test, for tensors and workspaces.** A run that passes it can still run out of memory, because
# the allocator reserves more than tensors need. Before you rely on a plan, ask `verdict(run, card)`. It simulates the
# step, and replays its allocations with the room that CUDA's context leaves. An H200 tried 20 runs with less and less
# memory: [the rule, the replay, and what worked](../docs/evidence.md#the-smallest-card-that-works). In this lesson,
# *fits* means: by the rule.
#
# cuBLAS, which multiplies matrices, takes a part, too: torch gives it a [workspace](../docs/glossary.md#workspace) for
# each thread that multiplies, and never takes it back. Forward runs on your thread, backward on autograd's, so there
# are two. A run that names its `card` counts them.
#
# **Your guess.** GPT-2, one sequence of 1,024 tokens, on an H100. What share of the step's peak are the two workspaces?

# %%
predict("19.workspaces", unit="%")

# %%
small = TrainingRun("gpt2", micro_batch=1, seq_len=1024)
for card in ("A100-80GB", "RTX4090-24GB", "RTX5090-32GB", "H100-80GB"):
    peak = estimate(small.replace(card=card))
    share = 100 * peak["workspaces"] / peak.total
    print(f"{card:14}{format_bytes(peak['workspaces'], 'MiB', 2):>12}{share:6.1f} % of the peak")
reveal("19.workspaces", round(share, 1), unit="%")

# %% [markdown]
# **Why do the cards differ?** By torch's rule: 32 MiB per thread on Hopper and, from torch 2.12 on, on Blackwell; 8.125
# MiB on every other card. `CUBLAS_WORKSPACE_CONFIG` changes it.

# %%
import torch

from course_utils import on_gpu

with on_gpu():
    x = torch.randn(512, 512, device="cuda")  # change this
    before = torch.cuda.memory_allocated()
    y = x @ x
    print(
        f"{torch.cuda.memory_allocated() - before - y.nbytes:,} bytes: the workspace of this thread"
    )

# %% [markdown]
# Run the cell again with another size: what does it print, and why? (The workspace is there already.) Workspaces matter
# only to small runs, so the plans below leave them to the reserve.

# %% [markdown]
# ## The course's first question
# GPT-2 XL, 32 sequences of 1,024 tokens per step, an RTX 5090 with 32 GB. `fit` searches everything that keeps the
# training the same, such as the micro-batch, recomputation, the attention kernel, and
# [chunks](../docs/glossary.md#chunked-loss) of the loss. Each choice costs time: arithmetic done again, weights read
# again, bytes sent over the link. The time follows from [data-sheet rates](../docs/glossary.md#data-sheet-rate), the
# maker's maximum per second.
#
# **Your guess.** `fit` takes the plan that loses the least time. How many sequences are in its
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch)?

# %%
predict("19.micro", unit="sequences")

# %%
from course_utils.lessons.will_it_fit.fit_figures import plan_figure

waits_for("19.micro")
plan = fit("gpt2-xl", "RTX5090-32GB", global_batch=32, seq_len=1024)
title = "It trains on 32 GB, with small micro-batches and only cheap operations recomputed"
plan_figure(plan, title)

# %% [markdown]
# Many more configurations need no estimate: where two sequences at once do not fit, four do not either. Of the dots
# that fit, the leftmost loses the least time. The blue path goes there as an expert would: first what saves bytes for
# free, then what saves most per second lost, last what only saves time.

# %%
from course_utils.lessons.will_it_fit.fit_figures import path_table

waits_for("19.micro")
path_table(plan)

# %%
reveal("19.micro", plan.best.run.micro_batch, unit="sequences")
print(plan.best.run.code())

# %% [markdown]
# **Why so few?** Why not the largest micro-batch under *full*
# [recomputation](../docs/glossary.md#activation-recomputation)? Look at the lost seconds:

# %%
from course_utils.estimating.step_time import step_seconds

full = plan.best.run.replace(micro_batch=4, recompute="full", global_batch=32)
print(f"{'seconds of a step':20s} {'the plan':>9s} {'full, 4 at a time':>18s}")
plans = [step_seconds(run, plan.card) for run in (plan.best.run, full)]
for cause in plans[0]:
    print(f"{cause:20s} {plans[0][cause]:9.3f} {plans[1][cause]:18.3f}")
of_plan, of_full = (format_bytes(size, "GB", 1) for size in (plan.best.peak, estimate(full).total))
print(f"peaks: {of_plan} and {of_full}")

# %% [markdown]
# Running all blocks again costs arithmetic. Reading the weights sixteen times costs bandwidth, and the card has plenty.
# (Data-sheet rates without overlap rank plans; never quote them as times.)
#
# Could a pencil find this peak? Yes: `estimate` is a closed form that looks at a few moments of the step
# ([formula.py](../course_utils/estimating/formula.py)). The peak is the largest:

# %%
from course_utils import moments

found = moments(plan.best.run)
for name, moment in sorted(found.items(), key=lambda item: -item[1].total)[:5]:
    print(f"{name:42s} {format_bytes(moment.total, 'GB', 3)}")
print(f"{'the estimated peak':42s} {format_bytes(plan.best.peak, 'GB', 3)}")

# %% [markdown]
# ## The recipe, too
# The course's opening question had 16-bit weights with [master weights](../docs/glossary.md#master-weights), an fp32
# copy that the optimizer updates. The run above uses [autocast](../docs/glossary.md#autocast): fp32 weights, copied to
# 16 bits for each product. Another recipe rounds gradients differently, so `fit` changes it only if you allow that.
#
# **Your guess.** Allow master weights. How much recomputation does the best plan need, in percent of forward (100 is
# full)?

# %%
predict("19.recipe", unit="%")

# %%
waits_for("19.recipe")
masters = fit("gpt2-xl", "RTX5090-32GB", global_batch=32, may_change=("precision",))
path_table(masters)

# %%
from course_utils.estimating.step_time import model_flops, recomputed_flops

best = masters.best.run
reveal("19.recipe", 300 * recomputed_flops(best) / model_flops(best), unit="%")
print(best.code())

# %% [markdown]
# The rule says that this plan fits. Do the allocator's blocks fit, too?

# %%
from course_utils import verdict

checked = verdict(best, masters.card)
print(checked)
print(f"left over: {format_bytes(checked.room - checked.reserved, 'GB', 2)}")

# %% [markdown]
# **What do the texts leave out?** The newsletter and the slides recompute every block, with all 32 sequences at once.
# With two at a time you need no recomputation. But must 32 at once fail? Try each recipe, with the loss in one piece
# and in chunks ([lesson 05](05_activations.ipynb)).

# %%
puzzle = TrainingRun("gpt2-xl", 32, 1024, recompute="full")
pieces = puzzle.replace(micro_batch=4, accumulation_steps=8)
room = plan.card.room
ways = {
    "32 at once, the loss in one piece": puzzle,
    "32 at once, the loss in 8 chunks": puzzle.replace(loss_chunks=8),
    "… and a checkpoint for every 2 blocks": puzzle.replace(loss_chunks=8, recompute="every-2"),
    "8 micro-batches of 4, the loss in one piece": pieces,
}
for name, way in ways.items():
    found = []
    for recipe in ("bf16-master", "amp-bf16"):
        total = estimate(way.replace(precision=recipe)).total
        by_rule = "fits" if total * SAFETY <= room else "too large"
        found.append(f"{recipe} {format_bytes(total, 'GB', 1)} {by_rule:9s}")
    print(f"{name:44s} {'   '.join(found)}")

# %% [markdown]
# Who is right about 32 GB? The recipe decides. The slides are right if the loss takes all 32 sequences in one piece.
# With the loss in chunks all 32 fit at once. Under autocast that takes fewer checkpoints, because those are fp32. In
# micro-batches the training fits under either recipe. (With flash attention, and by the rule.)

# %% [markdown]
# ## Predict, lock, run
# Now without `fit`. Take the run that it found, but with one sequence at a time, and work out its peak on paper. The
# cheat sheet at the end of this notebook may help. Which moment of the step is the fullest? What is in memory then? You
# are graded:
#
# | grade | error |
# |---|---|
# | A | at most 1 % |
# | B | at most 5 %: within the reserve |
# | C | at most 15 % |
# | D | at most 50 % |
# | E | more |

# %%
single = best.replace(micro_batch=1, global_batch=32)
model = single.model
print(single.code())
print(
    f"N = {model.parameters:,}, "
    f"L = {model.layers}, h = {model.hidden}, a = {model.heads}, V = {model.vocab:,}"
)
predict("19.peak")

# %% [markdown]
# Locked? Then run it, on your GPU if it is large enough, else simulated.

# %%
from course_utils.lessons.will_it_fit.fit_figures import grade
from course_utils.figures import timeline

waits_for("19.peak")
measured = measure(single)
grade("19.peak", measured.peak, measured.word)
title = "The second step peaks where the blocks' activations meet gradients and states"
line = f"what a program gets: {format_bytes(room, 'GB', 1)}"
timeline(measured, title, steps=[2], capacity=room, capacity_label=line)

# %%
from course_utils.figures import compare_bars

reveal("19.peak", measured.peak)
gap = format_bytes(abs(estimate(single).total - measured.peak))
compare_bars(estimate(single), measured, f"The estimate and the step that ran differ by {gap}")

# %%
from course_utils.measuring.compare import Comparison

for term, size in Comparison(single, estimate(single), measured).terms.items():
    print(f"{term:46s} {plus_minus(size):>7s}")

# %% [markdown]
# The closed form counts the allocator's rounding for states alone, and leaves out tensors of a few numbers.
#
# **The gap** of your own prediction: compare it part by part with the bars, as [lesson 18](18_who_is_right.ipynb) does
# with nine public calculators. Usual causes:
#
# - Gradients of earlier micro-batches are there in every forward except the first.
# - In 16-bit recipes the states include master weights.
# - The loss has several tensors of $sbV$ numbers, not one. They take 4 bytes per number where the code copies the
#   [logits](../docs/glossary.md#logits) to fp32, as Llama's does below ([lesson 05](05_activations.ipynb)).

# %% [markdown]
# ## Llama-3 8B on one card
# 80 GB, 8 sequences of 4,096 tokens per step, all weights trained with AdamW under autocast.
#
# **Your guess.** How low can the peak go if the training stays the same?

# %%
predict("19.one")

# %%
waits_for("19.one")
eight_b = {"model": "llama3-8b", "card": "H100-80GB", "global_batch": 8, "seq_len": 4096}
alone = fit(**eight_b)
by_rule = "It fits" if alone.best else "Nothing fits"
lowest = format_bytes(alone.nearest.peak, "GB", 0)
plan_figure(alone, f"{by_rule}: the lowest of {len(alone.tried)} estimates needs {lowest}")

# %%
reveal("19.one", alone.nearest.peak)
states = format_bytes(16 * alone.start.model.parameters, "GB", 1)
print(f"16·N = {states}: no choice on that list changes it")

# %% [markdown]
# So the training itself has to change. Give one permission at a time:

# %%
from course_utils.figures import stack

words = {"precision": "master weights", "pure-bf16": "all in bf16"}
words |= {"optimizer": "Adafactor", "lora": "LoRA"}
allowed = {name: fit(**eight_b, may_change=(name,)) for name in words}
chosen = {name: found.best or found.nearest for name, found in allowed.items()}
yes = [words[name] for name, found in allowed.items() if found.best]
no = [words[name] for name, found in allowed.items() if not found.best]
title = f"One change at a time: {', '.join(yes)} fit; {', '.join(no)} do not"
shown = {words[name]: estimate(one.run) for name, one in chosen.items()}
stack(
    shown,
    title,
    capacity=round(alone.card.room / SAFETY),
    capacity_label="the card, less 5 %",
    provenance="estimated: the fastest plan that fits, else the smallest",
)

# %%
for name, one in chosen.items():
    by_rule = "fits" if allowed[name].best else "does not fit"
    print(f"{words[name]:14s} {by_rule}, {one.lost:.2f} s lost per step")
    print(f"{'':14s} {one.run.code()}")

# %% [markdown]
# Each has a price. Pure [bf16](../docs/glossary.md#fp16-and-bf16) rounds small updates away ([lesson
# 03](03_mixed_precision.ipynb)). [Adafactor](../docs/glossary.md#adafactor) is another optimizer ([lesson
# 02](02_adam.ipynb)). [LoRA](../docs/glossary.md#lora) freezes the weights and trains two thin matrices next to each
# ([lesson 16](16_lora.ipynb)). `fit` knows bytes and seconds, but not what the model learns.
#
# ## … and on eight
# Eight such cards, linked, 64 sequences per step. The training need not change, because states can be *sharded*: each
# card keeps 1/8 of every weight, gradient and moment, and gathers a block's weights when it needs them
# ([ZeRO](../docs/glossary.md#zero)-3). PyTorch does that with [FSDP](../docs/glossary.md#fsdp): `fully_shard`. Take 16
# layers on eight ranks, one process per card. How many bytes per parameter does a rank hold on top of its shards when
# forward ends?

# %%
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def after_forward(**options):
    with on_gpu(ranks=8):
        layers = (torch.nn.Linear(4096, 4096, bias=False) for _ in range(16))
        network = torch.nn.Sequential(*layers).to("cuda")
        for part in (*network, network):
            fully_shard(part, **options)
        shards = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=not options):
            y = network(torch.randn(8, 4096, device="cuda"))
        return shards, torch.cuda.memory_allocated() - shards - y.nbytes


policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # change this
for name, options in {"autocast": {}, "FSDP2's policy": {"mp_policy": policy}}.items():
    shards, more = (size / (16 * 4096**2) for size in after_forward(**options))
    print(f"{name}: {shards:.2f} bytes per parameter in shards, {more:.2f} more after forward")

# %% [markdown]
# Autocast casts each gathered weight to 16 bits and keeps the copy for backward: 2 bytes per parameter, sharded or not.
# (Not the first layer's: nobody needs the gradient of its input.) FSDP's own [mixed-precision
# policy](../docs/glossary.md#mixed-precision-policy) gathers in bf16 and keeps nothing. Change `param_dtype` to
# `torch.float32`: what is held then, and what is sent?
#
# Under the policy, the fp32 shards are the master weights, and gradients are summed in fp32. What persists between
# steps is as under autocast. But more is rounded: `param_dtype` casts *every* parameter and the input, so norms and
# the residual stream are bf16, and so is a loss that gets bf16 logits. Autocast computes norms and the loss in fp32.
# `fit` counts this as the same training and takes the policy without asking, as `precision="bf16-master"` with
# `zero_stage` 2 or 3. If your norms need fp32, say no to such a plan. (Unsharded, that recipe also sums gradients in 16
# bits. There, `fit` needs permission.)
#
# **Your guess.** `fit` looks for the least time, and a free byte earns nothing. How much does the best plan need on
# *each* card?

# %%
predict("19.eight")

# %%
from time import process_time

waits_for("19.eight")
began = process_time()
eight = fit("llama3-8b", "H100-80GB", global_batch=64, seq_len=4096, world_size=8)
took = process_time() - began
run = eight.best.run
how = f"ZeRO-{run.zero_stage}, FSDP2's policy, {run.micro_batch} sequences at once"
plan_figure(eight, f"On eight cards it fits: {how}")

# %%
waits_for("19.eight")
path_table(eight)

# %% tags=["nbval-ignore-output"]
print(
    f"{eight.covered:,} configurations, "
    f"decided by {len(eight.tried)} estimates in {took:.2f} s of processor time"
)

# %%
reveal("19.eight", eight.best.peak)
N, D = run.model.parameters, run.world_size
states, peak = format_bytes(16 * N // D, "GB", 1), format_bytes(eight.best.peak, "GB", 1)
print(f"16·N/D = {states} of the {peak}")

# %% tags=["hide-input"]
plans = {
    "the plan": run,
    "8 at once, recomputed": run.replace(micro_batch=8, accumulation_steps=1, recompute="full"),
}
recipes = {"FSDP2's policy": "bf16-master", "autocast": "amp-bf16"}
rows = {}
for name, plan_run in plans.items():
    for label, recipe in recipes.items():
        rows[f"{name}, {label}"] = estimate(plan_run.replace(precision=recipe))
copies = format_bytes(rows["the plan, autocast"]["weight_copies"], "GB", 0)
stack(
    rows,
    f"Autocast keeps {copies} of weight copies on each card; FSDP2's policy keeps none",
    capacity=eight.card.room,
    capacity_label="what a program gets",
    provenance="estimated",
)

# %% [markdown]
# **The rest of the peak**, beyond 16·N/D, is a choice. `fit` fills the card with activations: under ZeRO-3 every
# micro-batch gathers all weights again, and recomputing costs arithmetic. With all eight sequences at once and
# everything recomputed, the same training needs less than half.
#
# Under autocast this plan would not fit. Autocast keeps a bf16 copy of the whole model, gathers fp32, twice the bytes,
# and its checkpoints are fp32 ([lesson 11](11_zero_and_fsdp.ipynb)).

# %% [markdown]
# ## An old card
# A T4: 16 GB on the label, no bf16, no [flash](../docs/glossary.md#flashattention) kernel, little bandwidth. So `fit`
# begins with autocast in fp16 and the [efficient kernel](../docs/glossary.md#efficient-attention).
#
# **Your guess.** GPT-2 comes with 124, 355, 774 and 1,558 million parameters. Which is the largest that a T4 can train,
# all weights, with 32 sequences per step?

# %%
predict("19.t4", unit="million parameters")

# %%
waits_for("19.t4")
names = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
found = {name: fit(name, "T4-16GB", global_batch=32) for name in names}
fits = [name for name, one in found.items() if one.best]
rows = {name: estimate((one.best or one.nearest).run) for name, one in found.items()}
room = gpu("T4-16GB").room
stack(
    rows,
    f"A T4 gives a program {format_bytes(room, 'GB', 1)} and trains up to {fits[-1]}",
    capacity=round(room / SAFETY),
    capacity_label="the T4, less 5 %",
    provenance="estimated: the fastest plan that fits, else the smallest",
)

# %%
reveal("19.t4", round(found[fits[-1]].start.model.parameters / 1e6), unit="million parameters")
path_table(found[fits[-1]])

# %% [markdown]
# **The limit** is 16·N again. For XL that is more than the card. For large it leaves little room, so this plan pays
# with recomputation.

# %% [markdown]
# ## Six runs that did not fit
# When a plan fails, all you have is a message and, if you were careful, a timeline. Here are six simulated runs. A
# replay sent their allocations through the allocator of a card that is too small, until one found no room: [out of
# memory](../docs/glossary.md#out-of-memory). Their owners know the model and the batch, but not their mistake.
#
# **Your guess.** Read this message. How many bytes per token and vocabulary entry did the failed request have?

# %%
import textwrap

from course_utils.lessons.will_it_fit.detective import case

first = case(1)
print(textwrap.fill(f"{first.told} {first.message}", 110))
predict("19.request", unit="bytes")

# %%
seen = first.evidence
tokens = seen.micro_batch * seen.seq_len
reveal("19.request", seen.requested / (tokens * seen.vocab), unit="bytes")
request = format_bytes(seen.requested, "GiB", 2)
print(f"{request} = 4 bytes · {tokens:,} tokens · {seen.vocab:,} vocabulary entries")

# %% [markdown]
# So divide the request by what you know. Other clues:
#
# | clue | ask |
# |---|---|
# | the size of the request | is it a multiple of s·b·V? Of b·a·s²? |
# | the moment | forward, loss, backward, update; first step or later |
# | what is alive | are the states complete? Are gradients there together with activations? |
# | where steps begin | does the third begin with more than the second? (The second has the optimizer's states) |
# | what is free | more than the request, and by much? A few percent are crumbs, whatever the message says |
#
# Choose a case and name the cause. Four of the six messages mention fragmentation. How many are right?

# %%
from course_utils.lessons.will_it_fit.widget import detective

detective()

# %% [markdown]
# ## A script of your own
# `watch` runs a training script unchanged, for two optimizer steps on the simulated GPU. It neither writes nor deletes
# your files.

# %%
import tempfile
from pathlib import Path

script = Path(tempfile.mkdtemp()) / "train.py"
_ = script.write_text("""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    x = torch.randn(8192, 1024, device="cuda")
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")

# %%
import subprocess
import sys


def watch(*arguments):
    command = [sys.executable, "-m", "course_utils", "watch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parent).stdout


print(watch("--save", "before.gz", "train.py"))

# %% [markdown]
# **Your guess.** AdamW with `fused=True` makes no temporaries of its own. By how many MB does it lower this script's
# peak?

# %%
predict("19.fused", unit="MB")

# %% tags=["nbval-ignore-output"]
waits_for("19.fused")
_ = script.write_text(script.read_text().replace("lr=1e-3", "lr=1e-3, fused=True"))
said = watch("--against", "before.gz", "--save", "after.gz", "train.py")
print(said.strip().rpartition("\n\n")[2])  # its last part: the difference

# %%
from course_utils import read_measurement

before, after = (read_measurement(script.parent / name) for name in ("before.gz", "after.gz"))
reveal("19.fused", max(0, before.peak - after.peak), unit="MB")
gap = plus_minus(after.peak - before.peak)
print(f"after − before: {gap} bytes: one step counter per tensor, on the GPU when fused")

# %% [markdown]
# **Nothing is saved.** The peak is in backward, and the fused update saves memory only in the optimizer's step. `watch`
# said so the first time: its list of what would help names half the batch and 8-bit states, not a fused update. The
# last table names every tensor that came or went, and adds up to the peaks' difference, to the byte. In Python,
# `difference(before, after)` does the same.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(19)

# %% [markdown]
# ## Take home
# **Remember** First find the bytes that no choice touches, then take the cheapest choice that saves enough: fewer
# sequences at once, chunks of the loss, cheap recomputation, sharding; change the training last.
#
# **Breaks when** the allocator's holes and CUDA's context need more than the reserve, or when lengths vary from batch
# to batch. It also breaks when the card is shared, or when you quote a plan's data-sheet time as a real time.
#
# **Cheat-sheet line** first test: 1.05 · peak ≤ what a program gets; covers tensors and workspaces, not the allocator's
# holes or CUDA's context: replay · peak = the fullest moment, never the sum of the largest · out of memory: divide the
# request by s·b·V and by b·a·s², look at the moment, and at where steps begin.
#
# Now solve the [exercises of this lesson](../exercises/19_will_it_fit.ipynb). For your own runs, the
# [Explorer](explorer.ipynb) has all choices on one page. Below are the lines of all lessons. [A page to
# print](../docs/cheat_sheet.md) adds what to remember and what breaks it.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.shared.cheat_sheet import cheat_sheet

cheat_sheet()
