# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 20
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
# decide it: from a plan to a formula, a simulated step, the allocator, and the card. You also see where a recorded GPU
# disagrees, read real error messages, and fit an 8B model on one card and on eight.

# %% [markdown]
# ## The room on a card
# Four numbers are called "the memory of the card": the label's, what the driver lists, what a program gets after the
# driver has kept its part, and what is left for tensors once CUDA has made its
# [context](../docs/glossary.md#context-cuda).
#
# **Your guess.** How many GB of an "A100 80GB" are left for tensors?

# %%
import torch

from course_utils import on_gpu
from course_utils.interactive.guesses import predict, reveal

predict("19.room", unit="GB")

# %%
rooms = {}
for card in ("A100-80GB", "RTX5090-32GB"):  # change this
    with on_gpu(card=card):
        rooms[card], total = torch.cuda.mem_get_info()
    print(f"{card}: a program gets {total / 1e9:.2f} GB, tensors {rooms[card] / 1e9:.2f} GB")
reveal("19.room", rooms["A100-80GB"])

# %% [markdown]
# Two causes pull in opposite directions. Memory cells come in GiB, 7 % larger than GB. The driver and the context take
# some away. What a program gets is from real programs' out-of-memory messages
# ([gpus.toml](../course_utils/gpus.toml) names each). The context is one that an H200 showed
# ([GPU results](../docs/gpu_results.md)). Yours may differ: `torch.cuda.mem_get_info()` asks your card.

# %% [markdown]
# ## A plan
# A [plan](../docs/glossary.md#plan) chooses micro-batch, recomputation, attention kernel,
# [chunks](../docs/glossary.md#chunked-loss) of the loss, and more. `fit` searches all that keep the training the same.
# Each choice costs time: arithmetic done again, weights read again. The time follows from [data-sheet
# rates](../docs/glossary.md#data-sheet-rate), the maker's maximum per second. Among the plans that fit, `fit` takes
# the one that loses the least time.
#
# An estimate adds up tensors. So `fit` keeps 5 % in [reserve](../docs/glossary.md#reserve). Its rule: 1.05 · estimate ≤
# what a program gets.
#
# **Your guess.** GPT-2 XL, 32 sequences of 1,024 tokens per step, an RTX 5090. How many sequences are in the plan's
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch)?

# %%
predict("19.micro", unit="sequences")

# %%
from course_utils import fit
from course_utils.lessons.will_it_fit.figures import plan_figure

plan = fit("gpt2-xl", "RTX5090-32GB", global_batch=32, seq_len=1024)  # change this
reveal("19.micro", plan.best.run.micro_batch, unit="sequences")
print(plan)
title = f"Micro-batches of {plan.best.run.micro_batch} fit the {plan.card.name}"
plan_figure(plan, title)

# %% [markdown]
# Each dot is a plan. The blue path, row by row above, goes as an expert would: first what saves bytes for free, then
# what saves most per second lost. Reading the weights 16 times costs bandwidth, and this card has plenty. Recomputing
# whole blocks would cost more. (These seconds rank plans. Never quote them as times.) Change the card to "T4-16GB" and
# the model to "gpt2-large": a card that old has no bf16 and no flash kernel, so `fit` begins with autocast in fp16 and
# the [efficient kernel](../docs/glossary.md#efficient-attention).
#
# The rule says yes. Does the allocator say yes, too? To find out, follow a smaller training all the way down.

# %% [markdown]
# ## From the formula to the card
# GPT-2, 8 sequences of 512 tokens, autocast, AdamW, flash attention. Here is every line of it.

# %%
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)  # flash
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)), 0.1)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1)


# %%
class GPT(nn.Module):
    def __init__(self, h, L, a, V=50257):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks = nn.Sequential(*(Block(h, a) for _ in range(L)))
        self.norm = nn.LayerNorm(h)

    def forward(self, ids):
        x = F.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]], 0.1)
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


# %%
def train(b=8, s=512, h=768, L=12, a=12, steps=3):
    model = GPT(h, L, a).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        ids = torch.randint(50257, (b, s), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% [markdown]
# ### Estimate
# The closed form, and the rule's answer for a card with 6 GiB for tensors:

# %%
from course_utils import TrainingRun, estimate

run = TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="amp-bf16")
estimated = estimate(run).total
print(
    f"1.05 · {estimated / 1e9:.2f} GB = {1.05 * estimated / 1e9:.2f} GB of {6 * 2**30 / 1e9:.2f} GB"
)

# %% [markdown]
# **Your guess.** By the rule it fits with ease. The allocator hands out memory in segments. How many GB does it reserve
# for this training on a card with plenty?

# %%
predict("19.reserved", unit="GB")

# %% [markdown]
# ### Measure
# The simulated card is an H200, because an H200 tried the same training.

# %%
with on_gpu(card="H200-141GB"):
    torch.cuda.empty_cache()
    train()
    stats = torch.cuda.memory_stats()
requested, allocated, reserved = (
    stats[f"{what}_bytes.all.peak"] for what in ("requested", "allocated", "reserved")
)
print(f"requested {requested / 1e9:.3f} GB, allocated {allocated / 1e9:.3f} GB")
print(f"reserved {reserved / 1e9:.3f} GB, {reserved / estimated:.2f} times the estimate")
reveal("19.reserved", reserved)

# %% [markdown]
# ### Explain the gap
# Four terms separate the estimate from what is reserved.

# %%
workspaces = 2 * 32 * 2**20
terms = {
    "cuBLAS's workspaces": workspaces,
    "what else was requested": requested - estimated - workspaces,
    "blocks beyond requests": allocated - requested,
    "segments beyond blocks": reserved - allocated,
}
for name, size in terms.items():
    print(f"{name:24s}{size / 1e6:9.2f} MB")

# %% [markdown]
# cuBLAS, which multiplies matrices, takes a [workspace](../docs/glossary.md#workspace) for each thread: yours runs
# forward, autograd's runs backward. Each is 32 MiB on a Hopper card, 8.125 MiB on an A100. A run that names its card
# counts them: `run.replace(card="H200-141GB")`. The second term is nearly nothing, and negative: the formula rounds
# states up to whole blocks, requests are not rounded. (Before torch 2.12, it also has 1 MiB of cuBLASLt.)
#
# The last term, [fragmentation](../docs/glossary.md#fragmentation), is larger than the others together. So what happens
# on a card that has room for the tensors, but not for the segments?


# %%
def works(size):
    """Take three steps with `size` bytes for tensors, as `set_per_process_memory_fraction` does."""
    with on_gpu(size, card="H200-141GB"):
        torch.cuda.empty_cache()
        try:
            train()
        except torch.OutOfMemoryError as error:
            print(f"{size / 1e9:.4f} GB: {str(error).partition('. Of the')[0]}")
            return False
        print(
            f"{size / 1e9:.4f} GB: works, {torch.cuda.memory_stats()['num_alloc_retries']} retries"
        )
        return True


_ = works(6 * 2**30)  # change this

# %% [markdown]
# A few MiB short. A *retry* means that the allocator found no room, returned its empty segments to the driver, and
# asked again. So the card needs a little less than what was reserved with plenty.
#
# **Your turn.** How small may the card be? A size of `low` fails, one of `high` works. Two lines of this search are
# wrong.


# %%
def smallest(works, low, high, tries):
    for _ in range(tries):
        middle = (low + high) // 2
        if works(middle):
            low = middle  # write this line again
        else:
            high = middle  # and this one
    return high


def at_least(limit):
    return lambda size: size >= limit


found = [smallest(at_least(limit), 0, 1024, tries=10) for limit in (700, 3)]
right = found == [700, 3]
print("Right." if right else f"Not yet: for cards of at least 700 and 3 bytes you find {found}.")

# %% [markdown]
# <details><summary>The lines</summary>
#
# If the middle works, the limit is there or below: `high = middle`. Else it is above: `low = middle`.
#
# </details>
#
# Now search with real steps, as soon as your lines are right.

# %%
if right:
    needed = smallest(works, 6 * 2**30, reserved, tries=4)  # change this
    print(f"the smallest card: {needed / 1e9:.4f} GB, {needed / estimated:.2f} times the estimate")

# %% [markdown]
# ## What did the GPU say?
# An H200 did the same search for 20 trainings. A memory fraction made it smaller and smaller until three steps ran out
# of memory. For GPT-2 with 8 × 512 tokens, 6.446 GB were too few and 6.455 GB worked.
#
# **Your guess.** In how many of the 20 does the rule of `fit` accept a card on which the GPU ran out of memory?

# %%
predict("19.wrong", unit="runs")

# %%
from course_utils.lessons.will_it_fit import limits

reveal("19.wrong", sum(one.rule <= one.too_small for one in limits.LIMITS), unit="runs")
limits.figure()

# %% [markdown]
# Near the limit, yes and no look like this. Each training has two rows: the largest card that was too small, and the
# smallest that worked.

# %%
print(limits.PROVENANCE)
limits.table()

# %% [markdown]
# The rule is blind to segments, so it says yes too early. The replay sends a simulated step's allocations through the
# allocator's rules. It misses by 1 % at most, and here it errs to the safe side. (All 20 runs and the script that
# recorded them: [the smallest card that works](../docs/evidence.md#the-smallest-card-that-works).) Change the rule's
# factor until it is never wrong: how much of each card would it waste?

# %%
factor = 1.05  # change this
estimates = [(estimate(one.run).total, one) for one in limits.LIMITS]
wrong = sum(factor * size <= one.too_small for size, one in estimates)
waste = max(factor * size / one.works - 1 for size, one in estimates)
print(f"factor {factor}: {wrong} cards too small, at worst {waste:.0%} more than needed")

# %% [markdown]
# ## The verdict
# So use the rule to find a plan, and the replay to decide. `verdict` does what you did: the closed form, a simulated
# step, and the allocator in what the card leaves after the driver's share and CUDA's context. Here is the course's
# first question again.
#
# **Your guess.** The plan for GPT-2 XL on the RTX 5090 has the tensors of the estimate. How many GB remain of the card?

# %%
predict("19.left", unit="GB")

# %%
from course_utils import verdict

decided = verdict(plan.best.run, "RTX5090-32GB")  # change this
print(decided)
reveal("19.left", decided.room - decided.reserved, unit="GB")

# %% [markdown]
# It fits, by a hair. A desktop on the same card would take that much. If you want more room, take one sequence at a
# time, or run with `PYTORCH_ALLOC_CONF=expandable_segments:True`
# ([lesson 12](12_allocator_and_fragmentation.ipynb)).
#
# The question that opened the course had 16-bit weights with [master weights](../docs/glossary.md#master-weights). This
# plan has [autocast](../docs/glossary.md#autocast). `fit` changes the recipe only with your permission:

# %%
masters = fit("gpt2-xl", "RTX5090-32GB", global_batch=32, may_change=("precision",))
print(masters)

# %% [markdown]
# No recomputation at all: with few sequences at a time it fits anyway, and below the limit only time counts. And must
# 32 at once fail? [Lesson 01](01_where_did_the_memory_go.ipynb) weighed that: it depends on the recipe and on the
# logits. Here are the four ways, by the rule, in GB of the card's 33.7:

# %%
whole = TrainingRun("gpt2-xl", 32, 1024, recompute="full")
ways = {
    "32 at once": {},
    "32 at once, loss in 8 chunks": {"loss_chunks": 8},
    "and a checkpoint per 2 blocks": {"loss_chunks": 8, "recompute": "every-2"},
    "8 micro-batches of 4": {"micro_batch": 4, "accumulation_steps": 8},  # change this
}
print(f"{'1.05 · estimate, GB':32s}{'bf16-master':>12s}{'amp-bf16':>12s}")
for way, choices in ways.items():
    runs = [whole.replace(precision=name, **choices) for name in ("bf16-master", "amp-bf16")]
    print(f"{way:32s}" + "".join(f"{1.05 * estimate(run).total / 1e9:12.1f}" for run in runs))

# %% [markdown]
# Who is right about 32 GB? The recipe decides. The slides are right if the loss takes all 32 sequences in one piece.
# With the loss in chunks, 32 fit at once under master weights. Under autocast that takes fewer checkpoints, because
# those are fp32. In micro-batches the training fits under either recipe. All that is by the rule: ask `verdict` before
# you buy the card.

# %% [markdown]
# ## Read the message
# `works` printed what a program on a card of that size would: torch's own error, with the allocator's numbers. The
# request was 786 MiB.
#
# **Your guess.** How many bytes per token and vocabulary entry is that?

# %%
predict("19.request", unit="bytes")

# %%
b, s, V = 8, 512, 50257
reveal("19.request", 786 * 2**20 / (b * s * V), unit="bytes")

# %% [markdown]
# Four bytes: a tensor of the loss in fp32. (Autocast copies the bf16 log-softmax to fp32, and the allocator rounds
# requests up.) So divide the request by what you know. Other clues:
#
# | clue | ask |
# |---|---|
# | the request | is it a multiple of s·b·V? Of b·a·s²? |
# | the line of the traceback | model, loss, `backward`, `optimizer.step`? |
# | the step | the first one, the second, or a late one? |
# | what is free or unallocated | more than the request, and by much? A few percent are crumbs |
#
# Here are three trainings that break. Predict before you run the cell: which line fails, and in which step?


# %%
def eager():
    q = torch.randn(8, 12, 2048, 64, device="cuda", requires_grad=True)
    return (q @ q.transpose(2, 3)).softmax(-1) @ q


def large_states():
    layer = nn.Linear(12000, 12000, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(8, 12000, device="cuda")).sum().backward()
    optimizer.step()


def leak():
    layer, losses = nn.Linear(4096, 4096, device="cuda"), []
    for step in range(1, 100):
        print(f"step {step}")
        x = torch.randn(8192, 4096, device="cuda")
        losses.append(layer(x).square().mean())  # keeps its graph: .item() is missing


# %% [markdown]
# `python3 -m course_utils oom train.log` reads such a message with its traceback. The cell sends it the log of `leak`.

# %%
import contextlib
import io
import traceback


def log_of(broken, memory):
    """Return what a training printed, with its traceback."""
    with contextlib.redirect_stdout(io.StringIO()) as log, on_gpu(memory):
        torch.cuda.empty_cache()
        try:
            broken()
        except torch.OutOfMemoryError:
            log.write(traceback.format_exc())
    return log.getvalue()


for broken in (eager, large_states, leak):
    log = log_of(broken, "2 GB")  # change this: how much does eager need?
    print(f"{broken.__name__:13s}", log.strip().splitlines()[-1].partition(" GPU 0")[0])

# %%
import subprocess
import sys

command = [sys.executable, "-m", "course_utils", "oom"]
said = subprocess.run(command, input=log, capture_output=True, text=True).stdout
print(said.partition("\nPredict it")[0])

# %% [markdown]
# The first request is 4·b·a·s² bytes: a score matrix in fp32. The second is one of the weight's own size, in the update:
# a state. The third says little by itself, but a late step that fails is a leak, or a long batch. The reader sees the
# step in the log. So print the step.
#
# Now everything in one picture:

# %%
from course_utils.lessons.will_it_fit.figures import decision_tree

decision_tree()

# %% [markdown]
# ## Predict, lock, run
# Now without `fit`. Take the training above with GPT-2 medium: h = 1,024, L = 24, a = 16, 4 sequences of 1,024 tokens.
# Work out its peak of allocated bytes on paper. Which moment of the second step is the fullest? What is in memory then?
# Within 1 % of it is an A, within 5 % a B, within 15 % a C.

# %%
h, L, V, s, b = 1024, 24, 50257, 1024, 4
print(f"N = {V * h + s * h + L * (12 * h * h + 13 * h) + 2 * h:,}")
predict("19.peak", unit="GB")

# %% [markdown]
# Locked? Then run it.

# %%
with on_gpu():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(b=4, s=1024, h=1024, L=24, a=16)  # change this
    peak = torch.cuda.max_memory_allocated()
reveal("19.peak", peak)
by_formula = estimate(TrainingRun("gpt2-medium", 4, 1024)).total
print(f"simulated {peak / 1e9:.2f} GB, the closed form {by_formula / 1e9:.2f} GB")

# %% [markdown]
# **The gap** of your prediction usually has one of these causes:
#
# - The fullest moment is the loss's backward. Weights and two moments take 12 bytes per parameter. Their gradients come
#   later.
# - The loss has three tensors of s·b·V numbers then: the log-softmax in bf16, its copy in fp32, and the copy's gradient.
# - Autocast keeps a 16-bit copy of each weight that multiplies.

# %% [markdown]
# ## Llama-3 8B on one card
# 80 GB, 8 sequences of 4,096 tokens per step, all weights trained with AdamW under autocast.
#
# **Your guess.** How low can the peak go if the training stays the same?

# %%
predict("19.one")

# %%
eight_b = {"model": "llama3-8b", "card": "H100-80GB", "global_batch": 8, "seq_len": 4096}
alone = fit(**eight_b)
states = 16 * alone.start.model.parameters
print("a plan fits" if alone.best else "nothing fits", f"16·N = {states / 1e9:.1f} GB", sep="; ")
reveal("19.one", alone.nearest.peak)

# %% [markdown]
# No choice on that list changes 16·N. So the training itself has to change. Give one permission at a time:

# %%
permissions = {"master weights": "precision", "bf16 alone": "pure-bf16"}
permissions |= {"Adafactor": "optimizer", "LoRA": "lora"}
for name, permission in permissions.items():
    found = fit(**eight_b, may_change=(permission,))
    chosen = found.best or found.nearest
    says = f"fits, {chosen.lost:.2f} s lost" if found.best else "does not fit"
    print(f"{name:15s}{chosen.peak / 1e9:6.1f} GB: {says}")

# %% [markdown]
# Each has a price. Pure [bf16](../docs/glossary.md#fp16-and-bf16) rounds small updates away ([lesson
# 03](03_mixed_precision.ipynb)). [Adafactor](../docs/glossary.md#adafactor) is another optimizer ([lesson
# 02](02_adam.ipynb)). [LoRA](../docs/glossary.md#lora) freezes the weights and trains two thin matrices next to each
# ([lesson 16](16_lora.ipynb)). `fit` knows bytes and seconds, not what the model learns.
#
# With 24 GB, 16-bit frozen weights take most of the card. `fit` then trades bits for seconds: frozen weights in 4 bits
# ([QLoRA](17_quantization.ipynb)) leave room for activations, so less is recomputed. Would you? Exercise 4 keeps the
# bits instead.

# %%
small = fit("llama3-8b", "RTX4090-24GB", global_batch=8, seq_len=4096, may_change=("lora",))
print(small)

# %% [markdown]
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
        layers = (nn.Linear(4096, 4096, bias=False) for _ in range(16))
        network = nn.Sequential(*layers).to("cuda")
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
# `zero_stage` 2 or 3. If your norms need fp32, say no to such a plan.
#
# **Your guess.** `fit` looks for the least time, and a free byte earns nothing. How much does the best plan need on
# *each* card?

# %%
predict("19.eight")

# %%
eight = fit("llama3-8b", "H100-80GB", global_batch=64, seq_len=4096, world_size=8)
reveal("19.eight", eight.best.peak)
print(eight)
print(f"16·N/D = {2 * eight.start.model.parameters / 1e9:.1f} GB")

# %% [markdown]
# **The rest of the peak**, beyond 16·N/D, is a choice. `fit` fills the card with activations: under ZeRO-3 every
# micro-batch gathers all weights again, and recomputing costs arithmetic. With everything recomputed, the same training
# needs less than half:

# %%
changes = {"the plan": {}, "all recomputed": {"recompute": "full"}}  # change this
changes["under autocast"] = {"precision": "amp-bf16"}
for name, change in changes.items():
    print(f"{name:16s}{estimate(eight.best.run.replace(**change)).total / 1e9:5.1f} GB")

# %% [markdown]
# Under autocast this plan would not fit: a bf16 copy of the whole model stays on each card, and its checkpoints are
# fp32 ([lesson 11](11_zero_and_fsdp.ipynb)). `verdict` simulates rank 0 of such a plan as well. NCCL's buffers are not
# in it: leave room for them.

# %% [markdown]
# ## The script, complete
# One script went through the course. Each row is what one lesson changed. The columns are your evidence: the formula,
# the simulation (what `max_memory_allocated()` would say, by `watch`), their gap, and what a GPU counted, if one did.

# %%
from course_utils.lessons.shared.growing_script import all_stages

all_stages()

# %% [markdown]
# You leave with that script (`my_train.py`, in this folder, if you made the changes), this table, and a way to fill in
# its next row before you pay for a GPU: `python3 -m course_utils watch my_train.py`.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(19)

# %% [markdown]
# ## In your own script
# Before a long training, take three steps on less of the card than there is. What works with 90 % will work when
# lengths vary a little, or when a desktop opens a window. If it fails, a snapshot of the allocator is there for
# [pytorch.org/memory_viz](https://pytorch.org/memory_viz).

# %%
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(64, 64, device=device)  # yours
optimizer = torch.optim.AdamW(model.parameters())
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(0.9)
    torch.cuda.memory._record_memory_history()
try:
    for _ in range(3):  # the optimizer's states are complete from the second on
        x = torch.randn(8, 64, device=device)  # yours: the longest batch that you have
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
except torch.OutOfMemoryError:
    torch.cuda.memory._dump_snapshot("out_of_memory.pickle")
    raise
if device == "cuda":
    print(f"reserved at most {torch.cuda.max_memory_reserved():,} bytes")

# %% [markdown]
# ## Take home
# **Remember** First find the bytes that no choice touches, then take the cheapest choice that saves enough: fewer
# sequences at once, chunks of the loss, cheap recomputation, sharding; change the training last.
#
# **Breaks when** lengths vary from batch to batch, the card is shared, or a plan is trusted that nobody replayed. It
# also breaks when you quote a plan's data-sheet time as a real time.
#
# **Cheat-sheet line** first test: 1.05 · estimate ≤ what a program gets · the verdict: replayed segments ≤ that, less
# CUDA's context · out of memory: divide the request by s·b·V and by b·a·s², look at the line, and at the step.
#
# Now solve the [exercises of this lesson](../exercises/19_will_it_fit.ipynb). For your own runs, the
# [Explorer](explorer.ipynb) has all choices on one page. The lines of all lessons are on [a page to
# print](../docs/cheat_sheet.md).
