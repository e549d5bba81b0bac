# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 35
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Gradient accumulation
#
# **60 minutes.** You should know what lives when in a training step ([lesson 01](01_where_did_the_memory_go.ipynb)) and
# what an optimizer does with a gradient ([lesson 02](02_adam.ipynb)). You need no GPU.
#
# Activations grow with the batch. So cut it into pieces that fit, and add up their gradients before the optimizer
# steps: [gradient accumulation](../docs/glossary.md#gradient-accumulation). It takes ten lines of Python, and its
# well-known bugs raise no error. How large a batch *should* be is [lesson 09](09_large_batches.ipynb).

# %% [markdown]
# ## Three sizes
# A [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is what goes through the network at once. Several
# make the *global batch* of one optimizer step. Large trainings count it in tokens, so that batches of short and of
# long sequences compare.
#
# **Your guess.** A lecture's batch has 400 sequences of 1,024 tokens. How many *thousand* tokens is that?

# %%
import torch

from course_utils import TrainingRun, compare, estimate, format_bytes, gpu, measure
from course_utils import on_gpu, plus_minus
from course_utils.interactive.guesses import predict, reveal

predict("08.tokens", unit="thousand tokens")

# %%
batch = torch.zeros(400, 1024, dtype=torch.int64)  # token ids
parts = batch.split(16)  # change this
print(
    f"{len(parts)} micro-batches, {len(parts[0])} sequences in the first, "
    f"{len(parts[-1])} in the last"
)
print(f"400 sequences · 1,024 = {batch.numel():,} tokens")
reveal("08.tokens", batch.numel() / 1000, unit="thousand tokens")

# %% [markdown]
# The lecture says "about 4 million". Change 16 to 48. Predict: how many sequences does the last micro-batch have?

# %% [markdown]
# ## Gradients add
# `backward()` *adds* to `.grad`. The loss of a batch is a mean over its sequences.
#
# **Your guess.** Call `backward()` on the mean loss of each of 25 micro-batches of 4, and do nothing else. How many
# times as long is `.grad` as the gradient of all 100 sequences?

# %%
predict("08.factor", unit="times")

# %% [markdown]
# Try it on a small GPT with random weights. It predicts characters, on the CPU, because losses need values.

# %%
from torch.nn.functional import cross_entropy

from course_utils.lessons.shared.language_model import batches, language_model


def mean_loss(model, tokens, targets):
    logits = model(tokens)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


k = 25  # change this
model = language_model()
# k micro-batches of 4 sequences: token ids, and the ids that follow them
parts = list(batches(k, 4))

# %%
tokens, targets = map(torch.cat, zip(*parts, strict=True))
mean_loss(model, tokens, targets).backward()  # all sequences at once
large = gradient(model)

for divisor in (k, 1):
    model.zero_grad()
    for tokens, targets in parts:
        loss = mean_loss(model, tokens, targets) / divisor
        loss.backward()
    added = gradient(model)
    factor = added.norm() / large.norm()
    off = (added / added.norm() - large / large.norm()).norm()
    print(f"divided by {divisor:2d}: {factor:.3f} times as long; directions differ by {off:.5f}")
reveal("08.factor", round(factor.item(), 3), unit="times")

# %% [markdown]
# A sum of 25 means is 25 times the mean of all 100. So divide each loss by 25 before its `backward()`. With $L_i$ the
# mean loss of micro-batch i,
#
# $$\nabla L = \frac{1}{k} \sum_{i=1}^{k} \nabla L_i$$
#
# Change k to 8 and run both cells. What do the two lines say?
#
# The two gradients now differ only by rounding: fp32 adds in another order. So 25 micro-batches of 4 *are* a batch of
# 100.
#
# This holds for a loss that is a mean over sequences. Batch norm breaks it, because it looks at all examples of a
# micro-batch together. So does a loss that compares examples: a contrastive loss, or the load balancing of experts.

# %% [markdown]
# ## The loop on a GPU
# Now use `device="cuda"`. `on_gpu()` runs the loop on your GPU, or on a simulated one that counts bytes and holds no
# values. First a Transformer of torch's own modules:

# %%
from torch import nn

with on_gpu():
    options = {"dim_feedforward": 3072, "batch_first": True, "norm_first": True}
    block = nn.TransformerEncoderLayer(768, 12, **options)
    blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
    words, head = nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False)
    network = nn.Sequential(words, blocks, head).to("cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    N = sum(weight.numel() for weight in network.parameters())
    print(f"{N:,} parameters, {torch.cuda.memory_allocated() / 1e9:.2f} GB allocated")

# %%
k = 4  # change this
with on_gpu():
    sequences = torch.randint(50257, (16, 513), device="cuda")
    optimizer.zero_grad()
    for number, part in enumerate(sequences.chunk(k), 1):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            logits = network(part[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / k
        loss.backward()
        held, peak = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
        print(f"micro-batch {number}: peak {peak:.2f} GB, then {held:.2f} GB held")
    optimizer.step()
    del logits, loss

# %% [markdown]
# Why does the second micro-batch have a higher peak? Its forward runs while the first one's gradients wait in `.grad`:
# 4 bytes per parameter. A third adds nothing. Change k to 8. What does the second peak become? Only activations and
# logits halve.
#
# (The memory held includes the last [logits](../docs/glossary.md#logits) and the two workspaces, 8.5 MB each on most
# cards, of cuBLAS, NVIDIA's library for matrix products.)

# %% [markdown]
# ## The common loop
# Many tutorials have this loop, with two bugs.


# %%
def common_loop(model, optimizer, parts, k):
    for number, part in enumerate(parts, 1):
        loss = mean_loss(model, *part)
        loss.backward()
        if number % k == 0:
            optimizer.step()
            optimizer.zero_grad()


# %% [markdown]
# **Your guess.** One epoch has 10 micro-batches, and k = 4. How many does the optimizer never see?

# %%
predict("08.dropped", unit="micro-batches")

# %%
seen = [number for number in range(1, 11) if number % 4 == 0]
print(f"steps after micro-batches {seen}: the last {10 - seen[-1]} are left over")
reveal("08.dropped", 10 - seen[-1], unit="micro-batches")

# %% [markdown]
# You have met the first bug: nobody divides the loss. The second: nobody steps on an incomplete group. Its gradients
# wait in `.grad` and mix with the first group of the next epoch. A correct loop works group by group:


# %%
def right_loop(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        group = parts[first : first + k]  # the last one may be shorter
        optimizer.zero_grad()
        for part in group:
            loss = mean_loss(model, *part) / len(group)
            loss.backward()
        optimizer.step()


def large_batches(model, optimizer, parts, k):  # the reference for both
    for first in range(0, len(parts), k):
        optimizer.zero_grad()
        tokens, targets = map(torch.cat, zip(*parts[first : first + k], strict=True))
        mean_loss(model, tokens, targets).backward()
        optimizer.step()


# %%
from torch.nn.utils import parameters_to_vector


def moved(loop, parts, k, make=torch.optim.SGD, lr=0.1):
    """Return how far one pass moves each parameter."""
    model = language_model(seed=0)
    start = parameters_to_vector(model.parameters()).detach().clone()
    loop(model, make(model.parameters(), lr=lr), parts, k)
    return parameters_to_vector(model.parameters()).detach() - start


# %%
ten, k = list(batches(10, 4)), 4  # change this
reference = moved(large_batches, ten, k)
for loop in (common_loop, right_loop):
    off = (moved(loop, ten, k) - reference).norm() / reference.norm()
    print(
        f"{loop.__name__:11} ends {off:6.1%} off "
        "(100% is how far the large batches move the weights)"
    )

# %% [markdown]
# The last group is divided by *its own* number. Change k to 5. Which bug is left, and how far off is the common loop
# now?
#
# The first bug can hide. Adam divides each gradient by its own size, so a constant factor cancels:

# %%
eight = list(batches(8, 4))
for make, lr in ((torch.optim.SGD, 0.1), (torch.optim.Adam, 1e-3)):
    reference = moved(large_batches, eight, 4, make, lr)
    off = (moved(common_loop, eight, 4, make, lr) - reference).norm() / reference.norm()
    print(f"{make.__name__:4} lr={lr}: the common loop ends {off:.1%} off")
print(f"length of the gradient of 100 sequences: {large.norm():.1f}; undivided: {added.norm():.0f}")

# %% [markdown]
# Under Adam, undivided losses hardly show, until something looks at the gradient's length.
# [Clipping](../docs/glossary.md#gradient-clipping) at 10 would leave the first of these two gradients alone, and
# shorten the second.

# %% [markdown]
# ## Lengths differ
# Now sequences end early. The target of padding is −100, which `cross_entropy` leaves out. So a micro-batch's mean loss
# is a mean over its *real* tokens.
#
# **Your guess.** One micro-batch of 4 sequences has 16 real tokens, another has 128. You average their two mean
# losses. How many times as much does a token of the short one count?

# %%
predict("08.weight", unit="times")

# %%
padded = []
lengths = torch.linspace(4, 32, 10).int()  # change this
for (tokens, targets), length in zip(ten, lengths, strict=True):
    padding = torch.arange(32) >= length
    padded.append((tokens, targets.masked_fill(padding, -100)))
counts = [(targets != -100).sum().item() for _, targets in padded]
print("real tokens in each micro-batch:", counts)
print(f"a token counts 1/{min(counts)} of its micro-batch's mean, or 1/{max(counts)}")
reveal("08.weight", max(counts) / min(counts), unit="times")

# %% [markdown]
# The large batch is a mean over *all* its tokens. So multiply each micro-batch's mean by its share of tokens. With
# $n_i$ tokens in micro-batch i,
#
# $$L = \sum_{i=1}^{k} \frac{n_i}{n_1 + \dots + n_k} \cdot L_i$$
#
# This needs the whole group before its first backward:


# %%
def loop_by_tokens(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        group = parts[first : first + k]
        total = sum((targets != -100).sum() for _, targets in group)
        optimizer.zero_grad()
        for tokens, targets in group:
            share = (targets != -100).sum() / total
            loss = mean_loss(model, tokens, targets) * share
            loss.backward()
        optimizer.step()


# %%
reference = moved(large_batches, padded, 4)
for loop in (common_loop, right_loop, loop_by_tokens):
    off = (moved(loop, padded, 4) - reference).norm() / reference.norm()
    print(f"{loop.__name__:14} {off:6.1%} off")

# %% [markdown]
# `right_loop` is right only if all lengths are equal. The `transformers` library averaged over micro-batches until
# October 2024 ([its own report](https://huggingface.co/blog/gradient_accumulation)). Change the shortest length from 4
# to 32. What do the three lines say?

# %% [markdown]
# ## On several GPUs
# `DistributedDataParallel` (DDP) keeps a copy of the model in each process. `backward()` averages the gradients of all
# processes ([lesson 10](10_data_parallelism.ipynb)). With accumulation it does so k times per step, but only the last
# time is needed. `model.no_sync()` switches it off.
#
# Two real processes on your CPU exchange gradients by *gloo*, torch's library for messages between CPUs. A hook counts
# the bytes.


# %%
def accumulate(k, always):
    from contextlib import nullcontext

    from torch import distributed, nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from course_utils.lessons.shared.language_model import batches, language_model

    def counted(sent, bucket):  # averages as DDP does, and counts the bytes
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(language_model())
    sent = []
    model.register_comm_hook(sent, counted)
    mine = list(batches(2 * k, 4))[distributed.get_rank() :: 2]
    for number, (tokens, targets) in enumerate(mine, 1):
        with nullcontext() if always or number == k else model.no_sync():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (loss / k).backward()
    distributed.destroy_process_group()
    return sum(sent), [weight.grad.flatten().tolist() for weight in model.parameters()]


# %%
from course_utils.ranks.launch import run_ranks

k = 4  # change this
model = language_model()
for tokens, targets in batches(2 * k, 4):  # one process, all 2k micro-batches
    loss = mean_loss(model, tokens, targets) / (2 * k)
    loss.backward()
alone = gradient(model)
for name, always in {"averaged each time": True, "no_sync until the last": False}.items():
    sent, gradients = run_ranks(accumulate, 2, k=k, always=always)[0]
    off = (torch.cat([torch.tensor(one) for one in gradients]) - alone).norm() / alone.norm()
    print(f"{name:22}: {sent:9,} bytes per process and step, gradient off by {off:.5f}")

# %% [markdown]
# Without `no_sync`, k times as many bytes travel. Change k to 8, and predict both lines.
#
# ([FSDP](../docs/glossary.md#fsdp), which splits weights, gradients and states over the GPUs, has the same switch:
# `set_requires_gradient_sync(False)`. There it costs memory: each GPU keeps *all* gradients until the last
# micro-batch.)

# %% [markdown]
# ## Can bf16 add up gradients?
# [bf16](../docs/glossary.md#fp16-and-bf16) has 8 significant bits. Add a number about 256 times smaller than the sum,
# and it is rounded away, like small weight updates in [lesson 03](03_mixed_precision.ipynb). A bf16 `.grad` adds one
# gradient to a sum of k. If all gradients agree, the sum is k times larger. If they are mostly noise, it is about √k
# times larger. Compare bf16 and fp32 with fp64:

# %%
model = language_model()  # change this
kinds = (torch.bfloat16, torch.float32, torch.float64)
sums = {kind: torch.zeros(large.numel(), dtype=kind) for kind in kinds}
for number, part in enumerate(batches(256, 4), 1):
    model.zero_grad()
    mean_loss(model, *part).backward()
    for kind in kinds:
        sums[kind] += gradient(model).to(kind)
    if number in (1, 2, 8, 32, 128, 256):
        bf16, fp32, exact = (one.double() for one in sums.values())
        off = [(one - exact).norm() / exact.norm() for one in (bf16, fp32)]
        print(f"{number:3d} micro-batches: bf16 {off[0]:.2%} off, fp32 {off[1]:.4%}")

# %% [markdown]
# Random weights are the worst case: their gradients nearly agree. Train the model first: import
# `train_language_model` from the module of `language_model`, and take `train_language_model(steps=300).model`. What
# does bf16 lose now?
#
# The recipe `bf16-master-fp32grad` avoids the rounding: for two more bytes per parameter, gradients are fp32.

# %% [markdown]
# ## What it saves
# GPT-2, 100 sequences of 1,024 tokens per step. **Your guess.** The next cell prints the peak with all 100 at once.
# What is it with 25 micro-batches of 4, in GB?

# %%
whole = TrainingRun("gpt2", micro_batch=100, seq_len=1024)
print(f"100 at once: {format_bytes(estimate(whole).total, 'GB', 1)} at the peak (estimated)")
predict("08.memory", unit="GB")

# %% [markdown]
# Estimate every way to cut the batch, and measure four. A *run* is a model with its batch, number formats and
# optimizer. `compare(run)` estimates it, takes your loop's steps, and names the gap between the two.

# %%
sizes = [b for b in range(1, 101) if 100 % b == 0]
by_size = {b: whole.replace(micro_batch=b, accumulation_steps=100 // b) for b in sizes}
peaks = {b: estimate(one) for b, one in by_size.items()}
compared = {b: compare(by_size[b]) for b in (1, 4, 20, 100)}  # change this
found = {b: one.measurement for b, one in compared.items()}
for b, one in found.items():
    gap = peaks[b].total - one.peak
    print(
        f"{100 // b:3d} × {b:3d}: {format_bytes(one.peak, 'GB', 2)}, estimate − {one.word}: "
        f"{plus_minus(gap)} bytes"
    )
print("25 ×   4:", compared[4].explanation())
reveal("08.memory", found[4].peak)

# %% tags=["hide-input"]
from course_utils.figures import lines

word = " or ".join(sorted({one.word for one in found.values()}))
curves = {
    "estimated": ([100 // b for b in sizes], [peaks[b].total / 1e9 for b in sizes]),
    word: ([100 // b for b in found], [one.peak / 1e9 for one in found.values()]),
}
highest, lowest = (format_bytes(peaks[b].total, "GB", 1) for b in (100, 1))
lines(
    curves,
    f"Cutting the batch of 100 lowers the peak from {highest} to {lowest}",
    "number of micro-batches",
    "peak, GB",
    log_x=True,
    log_y=True,
    level=("usable on a T4", gpu("T4-16GB").room / 1e9),
    circles=[word],
    provenance=str(found[100].provenance),
)

# %% [markdown]
# **The gap** has names. The estimate is plain arithmetic, and adds up tensors. The allocator gives each tensor whole
# blocks of 512 bytes, even the loss and the random state of each block's attention, which the formula leaves out. (Is
# the gap the same for 2 and 10? Add them to the tuple.) What does a GPU count? GPT-2 XL in 8 micro-batches of 4 was
# recorded on one:

# %%
run = TrainingRun("gpt2-xl", 4, 1024, "bf16-master", recompute="full", accumulation_steps=8)
real = measure(run, source="recorded", device="NVIDIA H200")
gap = estimate(run).total - real.peak
print(
    f"tensors at the peak, {real.provenance}: {real.peak:,} bytes; "
    f"estimate − {real.word}: {plus_minus(gap)}"
)
print(
    f"its allocator counted {format_bytes(real.counters['allocated'] - real.peak, 'MB', 0)} more, "
    f"and reserved {format_bytes(real.counters['reserved'], 'GB', 1)}"
)

# %% [markdown]
# The GPU had the same tensors, and two of a few numbers in a block of 512 bytes each. Its allocator counts more:
# workspaces, and blocks that are larger than their tensors. It also
# [reserves](../docs/glossary.md#allocated-and-reserved) memory in advance. CUDA's
# [context](../docs/glossary.md#context-cuda), hundreds of MB, is in none of these numbers. [All recorded
# runs](../docs/gpu_results.md) have their gaps in one table.
#
# People say that the peak is "one micro-batch's". Compare 25 micro-batches of 4 with one step on 4 sequences.

# %%
from course_utils.figures import stack

alone = measure(whole.replace(micro_batch=4))
title = "Accumulation keeps all gradients in memory while the next micro-batch runs"
stack({"4 sequences, one step": alone, "25 × 4": found[4]}, title, provenance=str(alone.provenance))

# %%
extra = found[4].peak - alone.peak
print(f"25 × 4 takes {format_bytes(extra, 'MB', 0)} more than 4 alone")
print(f"all gradients, fp32: {format_bytes(4 * whole.model.parameters, 'MB', 0)}")

# %% [markdown]
# With one micro-batch, activations disappear as gradients appear. From the second on, all gradients are already there.
#
# Accumulation costs no [FLOPs](../docs/glossary.md#flops): the arithmetic is the large batch's. It costs time, because
# small matrices keep a GPU less busy. So do not cut finer than you must. How much time? Only a GPU can say:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

times = recorded_times("accumulation")
times

# %%
for (name, ms), k in zip(times.milliseconds.items(), (1, 2, 4, 8), strict=False):
    print(f"{name:15s} {ms / k:5.1f} ms per micro-batch")

# %% [markdown]
# From two micro-batches on, half as many sequences take nearly as long. So arithmetic does not set the pace there. A
# likely reason: the kernels of so small a micro-batch end before Python has launched the next ones, and the GPU waits.
# Nothing else used the CPU during this recording. A larger model, or a slower card, loses less. So do not take the
# factor over: time your own step. (Tokens per second by the size of a micro-batch: [more
# recordings](../docs/evidence.md#memory-against-time).)

# %% [markdown]
# And the puzzle of lesson 01, GPT-2 XL with 32 sequences? One recipe adds up gradients in bf16, the other in fp32. Both
# keep [master weights](../docs/glossary.md#master-weights).

# %%
xl = TrainingRun("gpt2-xl", 32, 1024, precision="bf16-master", recompute="full")
recipes = (xl, xl.replace(precision="bf16-master-fp32grad"))
for k in (1, 2, 4, 8, 16, 32):
    cut = {"micro_batch": 32 // k, "accumulation_steps": k}
    both = [estimate(run.replace(**cut)).total / 1e9 for run in recipes]
    print(
        f"{k:2d} × {32 // k:2d}: "
        f"{both[0]:5.1f} GB with bf16 gradients, {both[1]:5.1f} GB with fp32 gradients"
    )
for card in ("RTX5090-32GB", "RTX3090-24GB", "RTX4090-24GB", "L4-24GB"):
    print(
        f"{card:12s} has {gpu(card).room / 1e9:.2f} GB for 32 × 1 with bf16 gradients, "
        f"{both[0]:.2f} GB"
    )

# %% [markdown]
# As 8 micro-batches of 4, the step fits a 32 GB card even with fp32 gradients, so take them. Each further cut saves
# less, because the states remain. What is the smallest card for 32 sequences per step? Cut as you like:

# %%
from course_utils.interactive.widgets import run_sliders

run_sliders(
    "gpt2-xl",
    gpu="RTX5090-32GB",
    micro_batch=4,
    accumulation_steps=8,
    precision="bf16-master-fp32grad",
    recompute="full",
)

# %% [markdown]
# <details><summary>An answer</summary>
#
# A card with 32 GB. Even with single sequences and bf16 gradients, the step needs a little more than an RTX 4090 gives
# a program. An RTX 3090 has less than 0.05 GB left, too little for CUDA's context. An L4 is too small even for weights,
# gradients and optimizer states alone.
#
# </details>

# %% [markdown]
# ## In your own script
# The accumulation loop with everything in its place: divide each loss, clip once after the last micro-batch, step
# once. An incomplete last group is divided by its own number.

# %%
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(88, 64), torch.randint(10, (88,))  # your data: 11 micro-batches of 8
loader = list(zip(x.split(8), y.split(8), strict=True))
k = 4
for first in range(0, len(loader), k):
    group = loader[first : first + k]
    optimizer.zero_grad(set_to_none=True)
    for inputs, targets in group:
        with torch.autocast(device, torch.bfloat16):
            wanted = targets.to(device)
            loss = nn.functional.cross_entropy(model(inputs.to(device)), wanted) / len(group)
        loss.backward()
    length = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # once, on the sum
    optimizer.step()
    print(f"{len(group)} micro-batches, then one step")

# %% [markdown]
# Run `python3 -m course_utils watch --save before.gz train.py`, change a line, then run `watch --against before.gz
# train.py`. It lists every tensor that came, went or grew, and the effect on the peak.

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(8)

# %% [markdown]
# ## Take home
# **Remember** Gradients add. Many small micro-batches are one large batch, if each counts by its share of tokens and
# the optimizer does not step in between.
#
# **Breaks when** losses are not divided, the last group is left over, lengths differ and you average over
# micro-batches, or a bf16 `.grad` adds up hundreds.
#
# **Cheat-sheet line** global batch = b · k · ranks · loss × (tokens of the micro-batch / tokens of the group) · peak:
# one micro-batch and all gradients · DDP: `no_sync()` until the last micro-batch.
#
# This lesson corrects claim 15 of [what the sources got wrong](../docs/errata.md).
#
# Now solve [exercises 1 and 2](../exercises/08_gradient_accumulation.ipynb). Then, if you like, [lesson
# 09](09_large_batches.ipynb): large batches and their learning rate.
