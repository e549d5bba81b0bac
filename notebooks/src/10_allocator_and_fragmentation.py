# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Allocator and fragmentation
#
# **75 minutes.** You should know what lives when in a training step ([lesson
# 01](01_where_did_the_memory_go.ipynb)) and how an optimizer steps ([lesson 02](02_adam.ipynb)). No GPU is needed:
# where a measurement is simulated, it says so.
#
# So far you have added up tensors. But a GPU can be [out of memory](../docs/glossary.md#out-of-memory) when the tensors
# would fit. The [ZeRO](../docs/glossary.md#zero) paper reports it of very large models, "in some extreme cases" with
# over 30 % of memory still available ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.2). The
# same section counts a buffer that most texts leave out. In this lesson you find both, first the buffer, then the
# missing third.

# %% [markdown]
# ## A buffer for all gradients at once
# Some operations want all gradients in one piece: an [all-reduce](../docs/glossary.md#all-reduce) over the ranks, or
# the norm over all of them. The simplest code copies every gradient into one [flat
# buffer](../docs/glossary.md#flat-buffer), in fp32 for accuracy. The buffer is gone when the operation ends, but it
# counts where the memory is fullest.
#
# **Your guess.** How large is that buffer for GPT-2 XL?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("10.buffer", unit="GB")

# %% [markdown]
# The closed form: 4 bytes for each of N gradients. ZeRO rounds N to 1.5 billion, and elsewhere (section 6.2) has 12 GB
# for 3 billion.

# %%
from course_utils import PRESETS, format_bytes
from course_utils.lessons.allocator.buffers import buffer_makers, flat_buffer_bytes

N = PRESETS["gpt2-xl"].parameters
for rounded in (1.5e9, 3e9):
    print(f"ZeRO's figure, 4 · {rounded / 1e9:g}·10⁹: {format_bytes(flat_buffer_bytes(rounded), 'GB', 1)}")
print(f"GPT-2 XL has {N:,} parameters: 4·N = {format_bytes(flat_buffer_bytes(N), 'GB', 2)}")
reveal("10.buffer", flat_buffer_bytes(N))

# %% [markdown]
# ## Who makes such a buffer today?
# PyTorch's own step makes no buffer of that name. So look at what each part of a step allocates beside weights,
# gradients and states, and compare the sizes.

# %%
from course_utils.figures import bars

makers = buffer_makers("gpt2-xl")
full_size = [name for name, size in makers.items() if size > 0.99 * flat_buffer_bytes(N)]
title = f"{len(full_size) - 1} parts of a step today take as much as ZeRO's flat buffer, or twice that (GPT-2 XL)"
bars(makers, title, highlight="a flat fp32 buffer", provenance="estimated from formulas")

# %% [markdown]
# A [foreach](../docs/glossary.md#foreach-for-loop-fused) optimizer is the flat buffer under another name: it works on
# all tensors at once, with one temporary for each. With fp32 [master weights](../docs/glossary.md#master-weights) it
# needs two, the gradients in fp32 and Adam's denominators. DistributedDataParallel copies gradients into *buckets*
# before it sends them; a bucket is 25 MiB, but all of them stay. The for-loop, the fused kernel and bucket views show
# how to do without.
#
# Now measure. GPT-2, AdamW's three ways to step: formula and simulated step, side by side.

# %%
from course_utils import TrainingRun, measure
from course_utils.estimating.exact.update import optimizer_step

small = TrainingRun("gpt2", 1, 128, "fp32", attention="efficient")
for way in ("adamw-loop", "adamw-foreach", "adamw-fused"):
    run = small.replace(optimizer=way)
    stepped, formula = measure(run), optimizer_step(run).get("temporaries", 0)
    peaks = stepped.phase_peaks
    found = peaks["optimizer"]["temporaries"] if "optimizer" in peaks else 0
    print(f"{way:14s} {format_bytes(found, 'MB', 1):>9s} of temporaries, {found / small.model.parameters:.2f} bytes "
          f"a parameter; estimate − {stepped.word} {formula - found:+,} bytes")  # fmt: skip

# %% [markdown]
# No gap is left. The for-loop's two copies of the largest tensor are large here because a third of GPT-2's parameters
# sit in one tensor, its embedding.
#
# ## The same norm, without the buffer
# Clipping needs the norm of all gradients together. Here it is in two ways. The second uses that the norm of all is the
# norm of the norms.

# %%
import torch

from course_utils.lessons.allocator.buffers import gradients_of, taken_by


def flat_norm(gradients):
    return torch.cat([g.flatten() for g in gradients]).norm()


def norm_of_norms(gradients):
    return torch.stack([g.norm() for g in gradients]).norm()


gradients = gradients_of([1_000_000, 250_000, 4_000_000])
flat, flat_bytes = taken_by(flat_norm, gradients)
lean, lean_bytes = taken_by(norm_of_norms, gradients)
whole = sum(4 * g.numel() for g in gradients)
print(f"flat buffer: {format_bytes(flat_bytes)} for gradients of {format_bytes(whole)}")
agree = torch.allclose(flat, lean, rtol=1e-4)
print(f"norm of norms: {format_bytes(lean_bytes)}; both agree to 1 in 10,000: {agree}")

# %% [markdown]
# `torch.nn.utils.clip_grad_norm_` does the second, which is why its bar above is too short to see. For the all-reduce
# ZeRO's answer is a buffer of *constant* size that is filled again and again (its section 6.2): that is a bucket.
#
# ## How memory is handed out
# Asking the driver for memory is slow, and giving it back makes the program wait for the GPU. So PyTorch asks rarely,
# for much, and keeps what it gets. This is the *[caching allocator](../docs/glossary.md#caching-allocator)*, and it has
# few rules.
#
# | rule | what it does |
# |---|---|
# | round | a request becomes a *block*: a multiple of 512 bytes |
# | two pools | blocks of up to 1 MiB come from the small pool, others from the large one |
# | segments | the driver is asked for 2 MiB (small pool), for 20 MiB (blocks under 10 MiB), else for the block's size |
# | best fit | a free block is used before the driver is asked: the smallest one that is large enough |
# | split | the rest becomes a free block: in the small pool always, in the large one if it is more than 1 MiB |
# | join | a freed block joins free neighbors in its own segment, never across segments |
# | streams | a free block serves only the CUDA stream that it was allocated for |
# | keep | nothing goes back to the driver, except empty segments when memory runs out or by `empty_cache()` |
#
# ([Segments](../docs/glossary.md#block-and-segment) of large blocks are rounded up to 2 MiB. The rules are those of
# `c10/cuda/CUDACachingAllocator.cpp` in PyTorch 2.13, and the
# [documentation](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) tells how to change them.)
#
# A rest that is not split off belongs to the block, and counts as allocated. And a program with several streams has a
# cache for each of them. The replays below have one stream.
#
# **Your guess.** A fresh process makes three tensors of 4 MiB. How many MiB does it take from the driver?

# %%
predict("10.three", unit="MiB")

# %%
from course_utils import replay
from course_utils.lessons.allocator.traces import trace_of

three = replay(trace_of("a=4 b=4 c=4"))
print(f"allocated {format_bytes(three.allocated[-1], 'MiB', 0)}, reserved {format_bytes(three.reserved[-1], 'MiB', 0)}")
reveal("10.three", three.reserved[-1], unit="MiB")

# %% [markdown]
# `replay` sends requests through the allocator's policy, written again in Python and tested against PyTorch's own code.
# A table of single requests in fresh processes:

# %%
for request in ("a=0.001K", "a=1.2K", "a=1M", "a=1.001M", "a=9.9M", "a=10M", "a=11M", "a=786.3M"):
    one = replay(trace_of(request))
    block, segment = format_bytes(one.allocated[0], "KiB", 1), format_bytes(one.reserved[0], "MiB", 0)
    print(f"{request[2:]:>7s}  → a block of {block:>12s} in a segment of {segment}")

# %% [markdown]
# ## Play allocator
# Below, each rule shows once. Move the slider event by event, and say what will happen before you look. Then type
# requests of your own: `a=4` allocates 4 MiB, `b=512K` KiB, `-a` frees. Green is allocated, red hatched is free beside
# a tensor, gray hatched is an empty segment that the driver could have back.

# %%
from course_utils.lessons.allocator.widget import allocator_player

allocator_player("a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13", event=7)

# %% [markdown]
# Some events are worth a second look. At 10, `g` asks for 7 MiB and gets 8, since a rest of 1 MiB is not split off. At
# 9 and 11 memory is freed and *[reserved](../docs/glossary.md#allocated-and-reserved)* does not fall. At 13 two other
# segments have free memory, and the driver is asked all the same, since no piece of it is large enough.
#
# ## A real step on the map
# Now a real step: GPT-2, 8 sequences of 512 tokens, [autocast](../docs/glossary.md#autocast), two steps. The simulation
# lists its allocations in order; the replay puts each at an address.
#
# When a step ends, activations are gone, and `zero_grad()` frees the gradients. Weights and Adam's states stay, 12
# bytes per parameter.
#
# **Your guess.** How many GB are *reserved* after the second step, when only weights and states are left?

# %%
run = TrainingRun("gpt2", 8, 512, "amp-bf16")
measured = measure(run)
replayed = replay(measured)
print(f"at the fullest moment {format_bytes(replayed.peak_allocated, 'GB', 2)} are allocated, "
      f"at the end {format_bytes(replayed.allocated[-1], 'GB', 2)}")  # fmt: skip
predict("10.kept", unit="GB")

# %% [markdown]
# Here is the map. Move the slider through the step. (The map is large: give it a moment.)

# %%
from course_utils import memory_map_page

memory_map_page(replayed)

# %% [markdown]
# ## Four counters
# What the allocator had reserved and allocated after each event of the two steps:

# %%
from course_utils.lessons.allocator.traces import counters, curves
from course_utils.figures import lines

lines(
    curves(replayed),
    "What is allocated falls after each step; what is reserved never does",
    "allocations and frees so far", "GB", markers=False, provenance=replayed.provenance,
)  # fmt: skip

# %%
second = next(mark.event for mark in replayed.marks if mark.step == 2)
moments = {"after step 1": second, "at the peak": replayed.peak_event, "after step 2": len(replayed)}
reveal("10.kept", replayed.reserved[-1])
counters(replayed, moments)

# %% [markdown]
# The four counters, and each answers a question of its own:
#
# * *allocated*: blocks that hold tensors. Its maximum, `max_memory_allocated()`, is what this course calls the peak.
# * *reserved*: what the allocator has taken from the driver. It falls only when memory runs out, or by `empty_cache()`.
# * *the driver's figure*: everything on the GPU, of all processes. `nvidia-smi` shows it. It is reserved memory, what
#   libraries take past the allocator, and the contexts.
# * *the [context](../docs/glossary.md#context-cuda)*: what CUDA itself takes in each process, for its kernels
#   among others, before the first tensor.
#
# The last two exist on a GPU only. What is known of them here:

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.allocator.traces import beyond_simulation, live_counters

print(live_counters(measured))
print(beyond_simulation())

# %% [markdown]
# Even *allocated* differs from the sum of the tensors, for two reasons. A block that was not split is larger than its
# tensor. And cuBLAS, the library that multiplies matrices, keeps a [workspace](../docs/glossary.md#workspace) for each
# thread that calls it: forward
# has one thread and backward another, so it has two, of 8.1 MiB on most cards and of 32 MiB on Hopper. A run counts
# them where it names its `card`. `counted` lists the terms:

# %%
from course_utils import counted

on_card = run.replace(card="H100-80GB")
counted(measure(on_card))

# %% [markdown]
# The same counters come out of the *estimate*, without torch and without a step: it lists every tensor in order, and
# the allocator's policy places each.

# %%
counted(on_card)

# %% [markdown]
# Which counter for which question?
#
# | question | counter |
# |---|---|
# | how does the peak depend on the batch? | the *maximum* of allocated, reset before each run |
# | will another process fit beside mine? | the driver's figure |
# | why am I out of memory with room left? | reserved minus allocated |
#
# The maximum is reset with `torch.cuda.reset_peak_memory_stats()`. Exercise 3 has a report in which somebody read the
# wrong counter.
#
# ## Out of memory with a third free
# The tensors of this run need less than 5.3 GB. Give it a card with 6 GiB for them, which is 6.44 GB. It fails, with
# almost a third of that memory free.
#
# **Your guess.** How large is the largest tensor that would still have found room?

# %%
predict("10.largest", unit="GB")

# %%
import textwrap

tight = replay(measured, "6 GiB")
failed = tight.failure
print(f"fails in {tight.moment(tight.failed_at)}, after {len(tight):,} events; step 1 went well")
print(textwrap.fill(tight.message, 110))

# %%
asked_for = measured.allocations[tight.requests[len(tight)].name]
at_driver, shape = failed.capacity - failed.reserved, asked_for.shape
reveal("10.largest", max(failed.largest_free, at_driver))
print(f"asked for       {format_bytes(failed.requested, 'GB', 3)}, {asked_for.dtype} of {shape}: the logits' size")
print(f"free in all     {format_bytes(failed.free, 'GB', 3)}, {failed.free_share:.1%} of the card")
print(f"largest hole    {format_bytes(failed.largest_free, 'GB', 3)}")
print(f"with the driver {format_bytes(at_driver, 'GB', 3)}, {format_bytes(failed.attempted - at_driver)} too few")

# %% [markdown]
# There it is: over 30 % free, and out of memory, in a plain step of GPT-2. The message says what PyTorch's says. Before
# it gave up, the allocator had returned every empty segment to the driver, and what the driver has is nearly enough.
# The larger part of what is free is red in the map: holes beside tensors that are still needed, too small for this one.

# %%
from course_utils import memory_map

memory_map(tight)

# %% [markdown]
# Which tensors keep the largest holes from being given back?

# %%
from course_utils.lessons.allocator.traces import hole_keepers

for line in hole_keepers(tight, count=2):
    print(line)

# %% [markdown]
# Here is the reason why step 1 went well and step 2 does not. Adam makes its states in the *first* `optimizer.step()`.
# By then the [logits](../docs/glossary.md#logits) are gone and their segments are free, so best fit puts the
# embedding's state into one of them. The state lives as long as the training, and from now on that segment can hold no
# logits.
#
# **The gap**, from the tensors' sum to what the card must have:

# %%
print(f"tensors at the peak      {format_bytes(max(replayed.requested), 'GB', 3)}")
print(f"in blocks at the peak    {format_bytes(replayed.peak_allocated, 'GB', 3)}")
print(f"reserved                 {format_bytes(replayed.peak_reserved, 'GB', 3)}, "
      f"{replayed.peak_reserved / max(replayed.requested) - 1:.0%} more than the tensors")  # fmt: skip
worst = max(replayed.fragmentation)
print(f"at the worst moment {worst:.0%} of what is reserved is stuck between tensors")

# %% [markdown]
# ## Why pieces do not add up
# The smallest example that behaves like this. Twenty tensors of 4 MiB fill a GPU of 80 MiB. Of each five, the second
# and the fourth are short-lived and freed. ZeRO's section 6.3 names this pattern: with
# [recomputation](../docs/glossary.md#activation-recomputation), checkpoints stay and what lies between them goes; in
# backward, gradients of weights stay and gradients of activations go.

# %%
from course_utils.lessons.allocator.figures import segments_figure
from course_utils.lessons.allocator.traces import holes

toy = replay(holes(), "80 MiB")
share = 100 * toy.failure.free_share
segments_figure(toy, title=f"{share:.0f} % is free, and a request for 8 MiB fails: no hole is larger than 4 MiB")

# %% [markdown]
# A request fails when no free block is large enough, and the driver cannot give a new segment even after all *empty*
# segments went back to it. The sum of free bytes is in neither condition.
#
# ## Cures
# 1. **Order**: allocate what lives long before what lives short.
# 2. **[Expandable segments](../docs/glossary.md#expandable-segments)**: set the environment variable
#    `PYTORCH_ALLOC_CONF` (its older name is `PYTORCH_CUDA_ALLOC_CONF`) to `expandable_segments:True`. A segment grows
#    page by page, so the whole pool is one range of addresses. Every rest is split off, and free pages can go back one
#    by one.
# 3. **Sizes**: make the largest request smaller, here by a loss in two chunks.
# 4. **Other settings**: `max_split_size_mb` keeps large blocks whole, `roundup_power2_divisions` makes sizes alike.
#
# **Your guess.** Our run of GPT-2 reserves 6.45 GB. How much with expandable segments?

# %%
predict("10.expandable", unit="GB")

# %%
chunked = measure(run.replace(loss_chunks=2))
trials = {
    "as it is": (measured, {}),
    "expandable segments": (measured, {"expandable_segments": True}),
    "loss in 2 chunks": (chunked, {}),
    "both": (chunked, {"expandable_segments": True}),
    "max_split_size_mb:512": (measured, {"max_split_size_mb": 512}),
    "roundup_power2_divisions:8": (measured, {"roundup_power2_divisions": 8}),
}
reserved = {name: replay(source, **choices).peak_reserved for name, (source, choices) in trials.items()}
bars(reserved, "Expandable segments help, a smaller largest tensor helps more, and one setting makes it worse",
     provenance=f"most ever reserved, replayed; {replayed.provenance}")  # fmt: skip

# %%
from course_utils.lessons.allocator.traces import states_first, times

reveal("10.expandable", reserved["expandable segments"])
for name, (source, choices) in trials.items():
    result = replay(source, "6 GiB", **choices)
    verdict = "fits 6 GiB" if result.failure is None else f"fails with {result.failure.free_share:.0%} free"
    retries = f", after giving back empty segments {times(result.retries)}" if result.retries else ""
    print(f"{name:27s} {verdict}{retries}")

# %% [markdown]
# With `max_split_size_mb` the run reserves as much as before where there is room, and fits all the same: blocks above
# the limit are never split, so no small tensor gets into them, and they can go back when memory is short.
#
# The first cure, order, can be tried on the real step, too: let the optimizer make its states before the first forward.

# %%
early = replay(states_first(measured), "6 GiB")
verdict = "fits 6 GiB" if early.failure is None else f"fails with {early.failure.free_share:.0%} free"
print(f"states first: {verdict}, after giving back empty segments {times(early.retries)}")

# %% [markdown]
# A retry is slow: it waits for the GPU, returns every empty segment, and those have to be asked for again. If your run
# slows down when memory gets tight, look at `num_alloc_retries` in `torch.cuda.memory_stats()`.
#
# And the toy? Try the cures on it.

# %%
for name, events, expandable in (
    ("as it is", holes(), False),
    ("expandable segments", holes(), True),
    ("long-lived first", holes(long_first=True), False),
):
    result = replay(events, "80 MiB", expandable_segments=expandable)
    print(f"{name:20s} {'fits' if result.failure is None else f'fails with {result.failure.free_share:.0%} free'}")

# %% [markdown]
# Expandable segments do not cure the toy. They give back whole pages, of 20 MiB, and the toy's holes are 4 MiB between
# tensors that stay. No setting moves a tensor. Order does: ZeRO's own cure is to set one contiguous piece aside for
# checkpoints and gradients, and to copy them there as they are made (its section 6.3).

# %% [markdown]
# ## Lengths that vary
# Texts differ in length, and many loaders sort them, from short to long, so that each batch has texts of about one
# length. Here is a small model, an embedding and a head, on six such batches.

# %%
from course_utils.lessons.allocator.buffers import trained_on

rising = [300, 350, 400, 430, 470, 512]
sorted_up = trained_on(rising)
print(f"at its peak, in the longest batch, it has {format_bytes(sorted_up.peak, 'MB', 0)} of tensors")

# %% [markdown]
# **Your guess.** How many MB are reserved after these six steps?

# %%
predict("10.lengths", unit="MB")

# %%
sorted_down, padded = trained_on(rising[::-1]), trained_on(rising, multiple=128)
orders = {
    "short to long": replay(sorted_up),
    "… expandable segments": replay(sorted_up, expandable_segments=True),
    "… padded to multiples of 128": replay(padded),
    "long to short": replay(sorted_down),
}
factor = orders["short to long"].peak_reserved / sorted_up.peak
bars({name: result.peak_reserved for name, result in orders.items()},
     f"Sorted from short to long, six batches reserve {factor:.1f} times what the largest one needs", unit="MB",
     provenance=f"most ever reserved, replayed; {sorted_up.provenance}")  # fmt: skip

# %%
result = orders["short to long"]
reveal("10.lengths", result.peak_reserved, unit="MB")
free = result.reserved[-1] - result.allocated[-1]
print(f"stuck beside tensors at the end: {format_bytes(result.stuck[-1])} of {format_bytes(free)} free")
card = round(1.3 * sorted_up.peak)
print(f"on a card with {format_bytes(card, 'MB', 0)}: {replay(sorted_up, card).retries} retries in six steps")

# %% [markdown]
# **The gap.** Each batch is a little longer than all before it. Its logits fit into no free block, so a new segment
# comes, and the old one is empty from now on. That is no [fragmentation](../docs/glossary.md#fragmentation): hardly
# anything is stuck, and a full card gets the empty segments back, with a retry for nearly every batch. But no other
# process can use them, and retries cost time. From long to short each batch fits into the first one's segments. So let
# the longest batch come first: it also tells you at once whether memory suffices.

# %% [markdown]
# ## A snapshot, and a leak in it
# On a GPU, PyTorch can write down every allocation with the line of code that made it:
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=1_000_000)  # before the first tensor
# ...                                                              # a few steps
# torch.cuda.memory._dump_snapshot("steps.pickle")                 # drop this file on https://pytorch.org/memory_viz
# ```
#
# `read_snapshot` reads such a file, and `save_snapshot` writes one from a replay, here with the operation and the
# module, the kind and step, and the line of code. Below is a training step with a small mistake. Read it, then guess.

# %%
from collections import OrderedDict

from torch import nn

shown = []  # outputs, for a plot at the end of the training


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    shown.append(model(batch).mean())


layers = {"up": nn.Linear(512, 2048), "act": nn.ReLU(), "down": nn.Linear(2048, 512)}
model, batch = nn.Sequential(OrderedDict(layers)), torch.randn(1024, 512)

# %% [markdown]
# **Your guess.** By how many MB does memory grow with each step?

# %%
predict("10.leak", unit="MB")

# %%
import tempfile
from pathlib import Path

from course_utils import read_snapshot, save_snapshot

adamw = torch.optim.AdamW(model.parameters())
steps = measure(step=step, model=model, optimizer=adamw, batch=batch, steps=4, source="cpu")
path = save_snapshot(replay(steps), Path(tempfile.mkdtemp()) / "steps.pickle")
snapshot = read_snapshot(path)
print(f"{path.name}: {', '.join(snapshot)}")
print(f"{len(snapshot['segments'])} segments, a history of {len(snapshot['device_traces'][0])} entries")

# %% [markdown]
# A [snapshot](../docs/glossary.md#memory-snapshot) has two halves: the *segments* as they are at the end, with their
# blocks, and the *history* that led there. For a leak the first half is enough. Who is still alive, and since when?

# %%
alive = [
    block
    for segment in snapshot["segments"]
    for block in segment["blocks"]
    if block["state"] == "active_allocated" and block["size"] > 100_000
]
for block in sorted(alive, key=lambda block: block["frames"][1]["filename"]):
    made_by, kind, *_ = block["frames"]
    print(f"{format_bytes(block['size'], 'MB', 1):>7s}  {kind['filename']:16s} {kind['name']:16s} "
          f"{made_by['name']} in {made_by['filename']}")  # fmt: skip

# %% [markdown]
# Weights are from step 0, the set-up, Adam's moments from step 1, gradients from the last step. But one activation is
# there from *each* step. The output that is stored carries its graph, and the graph keeps what backward would need.

# %%
leaked = [block["size"] for block in alive if block["frames"][0]["name"] == "relu"]
reveal("10.leak", leaked[0], unit="MB")
print(f"formula: 1,024 rows · 2,048 numbers · 4 bytes = {format_bytes(1024 * 2048 * 4, 'MB', 2)}")
print(f"in the snapshot: {format_bytes(leaked[0], 'MB', 2)} a step, in {len(leaked)} steps {format_bytes(sum(leaked))}")

# %% [markdown]
# The cure is `.detach()`, or `torch.no_grad()` around the second forward, or `.item()`. Check:

# %%
shown.clear()


def mended(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        shown.append(model(batch).mean())


again = measure(step=mended, model=model, optimizer=adamw, batch=batch, steps=4, source="cpu")
for name, result in (("before", steps), ("mended", again)):
    ends = [result.moments[f"end of step {number}"].total for number in (2, 4)]
    print(f"{name}: {format_bytes(ends[1] - ends[0])} more after step 4 than after step 2")

# %% [markdown]
# What is left of the growth is a scalar a step, in a block of 512 bytes each.
#
# ## What the sources say
# | claim | what you computed here |
# |---|---|
# | a flat fp32 buffer of 6 GB at 1.5 B parameters | 4·N; foreach and DDP's buckets take as much today |
# | out of memory with over 30 % free | reproduced in a plain step of GPT-2, and explained by the map |
# | "we can't do much about residual memory" | it is worth gigabytes, and most cures of it are one line of code |
# | expandable segments cure fragmentation | whole pages only; holes between tensors stay |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(10)

# %% [markdown]
# ## Take home
# **Remember** A card must hold what is *reserved*: tensors, buffers, and the holes between them.
#
# **Breaks when** you read the wrong counter; or when lifetimes are mixed and one request is large.
#
# **Cheat-sheet line** reserved ≥ allocated ≥ tensors · flat buffer, foreach: 4·N bytes · segments 2 MiB, 20 MiB, own
# size · out of memory with much free: expandable segments, long-lived first, longest batch first, smaller largest
# tensor.
#
# **In your own script** `python3 -m course_utils watch train.py` gives three sizes: tensors, allocated, reserved. On a
# card, `torch.cuda.max_memory_allocated()` and `max_memory_reserved()` are the last two.
#
# Now solve the [exercises of this lesson](../exercises/10_allocator_and_fragmentation.ipynb).
