# ---
# jupyter:
#   course:
#     minutes: 75
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Allocator and fragmentation
#
# **75 minutes.** You should know what is in memory at each moment of a step ([lesson
# 01](01_where_did_the_memory_go.ipynb)) and how an optimizer steps ([lesson 02](02_adam.ipynb)). You need no GPU:
# `on_gpu()` simulates one.
#
# A GPU can be [out of memory](../docs/glossary.md#out-of-memory) although the tensors would fit. The
# [ZeRO](../docs/glossary.md#zero) paper reports it, "in some extreme cases" with over 30 % of memory still available
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.2). The same section counts a buffer that most
# texts leave out.

# %% [markdown]
# ## A buffer for all gradients at once
# Some operations need all gradients in one piece: a norm, or a sum over all GPUs, an
# [all-reduce](../docs/glossary.md#all-reduce). The simplest code copies them into one fp32 [flat
# buffer](../docs/glossary.md#flat-buffer). It is soon freed, but it counts at the peak.
#
# **Your guess.** How large is that buffer for GPT-2 XL?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("12.buffer", unit="GB")

# %% [markdown]
# The buffer has 4 bytes for each of N gradients:

# %%
from course_utils import PRESETS, format_bytes, plus_minus

N = PRESETS["gpt2-xl"].parameters
print(f"ZeRO's figures: 4 · 1.5·10⁹ = {4 * 1.5:.1f} GB and 4 · 3·10⁹ = {4 * 3:.1f} GB")
print(f"GPT-2 XL has {N:,} parameters: 4·N = {format_bytes(4 * N, 'GB', 2)}")
reveal("12.buffer", 4 * N)

# %% [markdown]
# ZeRO rounds N to 1.5 billion, and its 12 GB are in section 6.2. Now make such a buffer, for weights and gradients of
# the small GPT-2 as they are after backward. Only sizes matter:

# %%
import torch
from torch import nn

from course_utils import on_gpu
from course_utils.models import parameter_shapes

name = "gpt2"  # change this
with on_gpu():
    shapes = parameter_shapes(PRESETS[name]).values()
    weights = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
    gradients = [torch.zeros_like(weight) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    n = sum(weight.numel() for weight in weights)
    print(
        f"N = {n:,}; weights and gradients, 8·N: {torch.cuda.memory_allocated():,} bytes allocated"
    )

# %% [markdown]
# How much does an operation need for itself? Reset the peak, run it, read the peak:


# %%
def extra(operation):
    """Peak bytes that `operation()` allocates, on top of the bytes that were there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    operation()
    return torch.cuda.max_memory_allocated() - before


with on_gpu():
    flat = extra(lambda: torch.cat([g.flatten() for g in gradients]).norm())
    lean = extra(lambda: torch.stack([g.norm() for g in gradients]).norm())
    torchs = extra(lambda: nn.utils.clip_grad_norm_(weights, max_norm=1.0))
print(f"the norm by a flat buffer: {flat:,} bytes; the gap, 4·N − this: {plus_minus(4 * n - flat)}")
print(f"the norm of the norms:     {lean:,} bytes\nclip_grad_norm_:           {torchs:,} bytes")

# %% [markdown]
# The gap is one block of 512 bytes, for the norm itself. Change the model to `"gpt2-medium"` (355 million parameters),
# predict the first line, and run both cells.
#
# The norm of all gradients is the norm of their norms, as in `clip_grad_norm_`:
#
# $$\|g\| = \sqrt{\|g_1\|^2 + \|g_2\|^2 + \dots}$$
#
# Is it the same number? Values need the CPU:

# %%
torch.manual_seed(0)
some = [torch.randn(size) for size in (1_000, 250, 4_000)]
of_norms = torch.stack([g.norm() for g in some]).norm()
print(f"flat: {torch.cat(some).norm():.3f}, norm of norms: {of_norms:.3f}")

# %% [markdown]
# ## Who makes such a buffer today?
# PyTorch names no such buffer. But its AdamW has [three ways to step](../docs/glossary.md#foreach-for-loop-fused):
# tensor by tensor (the *for-loop*), all at once (*foreach*), or in one kernel (*fused*). How much does each need?

# %%
with on_gpu():
    largest = max(weight.numel() for weight in weights)
    ways = (({"foreach": False}, 8 * largest), ({"foreach": True}, 4 * n), ({"fused": True}, 0))
    for way, formula in ways:
        optimizer = torch.optim.AdamW(weights, lr=1e-4, amsgrad=False, **way)  # change this
        optimizer.step()  # the first step makes the states, 8·N bytes
        found = extra(optimizer.step)
        print(
            f"{way!s:18s} {found:11,} bytes, {found / n:.2f} per parameter; "
            f"estimated {formula:11,}, the gap {plus_minus(formula - found)}"
        )
        del optimizer

# %% [markdown]
# Foreach is the flat buffer under another name: one temporary per tensor. The for-loop has two temporaries of the
# largest tensor, the embedding, a third of GPT-2's parameters. Its gap exists because blocks can be larger than
# tensors. `amsgrad=True` makes a third state. Will the temporaries grow? Predict, run.
#
# And with fp32 [master weights](../docs/glossary.md#master-weights) next to 16-bit gradients? The optimizer's step
# first copies all gradients to fp32. Predict how many such buffers that makes, and run:

# %%
with on_gpu():
    for weight in weights:
        weight.grad = None  # the weights now play fp32 masters
    halves = [gradient.bfloat16() for gradient in gradients]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=True)

    def master_step():
        for weight, half in zip(weights, halves, strict=True):
            weight.grad = half.float()
        optimizer.step()
        optimizer.zero_grad()

    master_step()  # the first step makes the states
    each = extra(master_step) / n
    print(f"fp32 copies of all gradients, then foreach: {each:.1f} bytes per parameter")
    optimizer = halves = None

# %% [markdown]
# Two: 4·N for the copies, and 4·N for foreach's temporaries. DistributedDataParallel copies gradients into *buckets* to
# send them ([lesson 10](10_data_parallelism.ipynb)). ZeRO's answer: a buffer of *constant* size, filled again and again
# (section 6.2).
#
# ## How memory is handed out
# Asking the driver for memory is slow. So PyTorch's *[caching allocator](../docs/glossary.md#caching-allocator)* asks
# rarely, asks for much, and keeps what it gets:
#
# | rule | what it does |
# |---|---|
# | round | a request becomes a [*block*](../docs/glossary.md#block-and-segment): a multiple of 512 bytes |
# | two pools | blocks of up to 1 MiB come from the small pool, others from the large one |
# | segments | the driver gives 2 MiB (small pool), 20 MiB (blocks < 10 MiB), or the block's size, rounded up to 2 MiB |
# | best fit | before it asks the driver, PyTorch takes the smallest free block that is large enough |
# | split | the rest of a block becomes free: in the small pool always, in the large one if it is over 1 MiB |
# | join | a freed block joins free neighbors, but only in its own segment |
# | streams | a free block serves only the CUDA stream that it was allocated for |
# | keep | only empty segments go back to the driver: when memory runs out, or by `empty_cache()` |
#
# (From `CUDACachingAllocator.cpp` in PyTorch 2.13. Its
# [documentation](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) says how to change the rules.)
#
# A rest that is not split off belongs to the block and counts as
# *[allocated](../docs/glossary.md#allocated-and-reserved)*. All memory from the driver is *reserved*.
#
# **Your guess.** A fresh process makes three tensors of 4 MiB. How many MiB does it take from the driver?

# %%
predict("12.three", unit="MiB")

# %%
MiB = 2**20
weights = weight = gradients = gradient = None
with on_gpu():
    print(f"the gradients are gone; still reserved: {torch.cuda.memory_reserved() / MiB:,.0f} MiB")
    torch.cuda.empty_cache()
    print(f"after empty_cache():                    {torch.cuda.memory_reserved() / MiB:,.0f} MiB")
    three = [torch.empty(4 * MiB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    taken = torch.cuda.memory_reserved()
    print(
        f"three tensors: {torch.cuda.memory_allocated() / MiB:.0f} MiB allocated, "
        f"{taken / MiB:.0f} MiB reserved"
    )
    del three
reveal("12.three", taken, unit="MiB")

# %% [markdown]
# Blocks and segments of single requests, each with an empty cache:

# %%
with on_gpu():
    for size in (1, 1_200, MiB, MiB + 1, 4 * MiB, 10 * MiB, 11 * MiB, 786 * MiB + 1):  # change this
        torch.cuda.empty_cache()
        one = torch.empty(size, dtype=torch.uint8, device="cuda")
        block, segment = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(f"{size:11,} bytes → a block of {block:11,} in a segment of {segment / MiB:3.0f} MiB")
        del one

# %% [markdown]
# Which block is 1 MiB larger than its request, because the rest was not split off? Add `13 * MiB` to the list, predict
# block and segment, run.
#
# ## Play allocator
# Move the slider event by event, and say what happens before you look. Then change the requests: `a=4` allocates 4 MiB,
# `b=512K` 512 KiB, `-a` frees. Green is allocated, red hatching is free memory next to a tensor, gray hatching an empty
# segment, which could go back.

# %%
from course_utils.lessons.allocator.widget import allocator_player

allocator_player("a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13", event=7)  # change this

# %% [markdown]
# At event 10, `g` asks for 7 MiB and gets 8. At 9 and 11, memory is freed, but reserved does not fall. At 13, two other
# segments have free memory, but no piece is large enough.
#
# ## Why pieces do not add up
# In torch, twenty tensors of 4 MiB fill a GPU of 80 MiB. In each group of five, the second and fourth are short-lived
# (`s`) and freed. So 32 MiB are free: does a request for 8 MiB succeed?

# %%
lives = "LsLsL" * 4  # change this
tensors = late = None
try:
    with on_gpu("80 MiB"):
        torch.cuda.empty_cache()
        tensors = [torch.empty(4 * MiB, dtype=torch.uint8, device="cuda") for _ in lives]
        tensors = [tensor for tensor, life in zip(tensors, lives, strict=True) if life == "L"]
        for segment in torch.cuda.memory._snapshot()["segments"]:
            marks = {"active_allocated": "████", "inactive": "····"}
            blocks = segment["blocks"]
            print("".join(marks[one["state"]] * (one["size"] // (4 * MiB)) for one in blocks))
        late = torch.empty(8 * MiB, dtype=torch.uint8, device="cuda")
        print("8 MiB more: there is room")
except torch.OutOfMemoryError as error:
    print(error)

# %% [markdown]
# Each line is a segment. For 8 MiB, PyTorch asks the driver for 20. A request fails when no free block is large enough,
# and the driver has no room for a new segment, even after all *empty* ones went back. PyTorch never asks how much is
# free in total.
#
# ZeRO's section 6.3 names this pattern: with [recomputation](../docs/glossary.md#activation-recomputation), checkpoints
# stay, and the tensors between them are freed. Change the order to `"L" * 12 + "s" * 8`, predict the picture, and run.
#
# ## A real step, and four counters
# First, memory that is in no tensor. cuBLAS, the library that multiplies matrices, keeps a
# [workspace](../docs/glossary.md#workspace) for each thread that calls it: one in forward, another in backward.

# %%
tensors = late = None
with on_gpu():
    torch.cuda.empty_cache()
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    x = None
    workspaces = torch.cuda.memory_allocated()
    print(f"no tensor is left, and {workspaces:,} bytes stay allocated")

# %% [markdown]
# (A workspace has 8.1 MiB here, 32 MiB on Hopper.) Now take two steps of GPT-2 with
# [autocast](../docs/glossary.md#autocast), on 8 sequences of 512 tokens. After a step, only weights and Adam's states
# are left, 12 bytes per parameter: 1.49 GB.
#
# **Your guess.** How many GB are *reserved* after the second step?

# %%
predict("12.kept", unit="GB")

# %%
from course_utils import TrainingRun
from course_utils.networks import network_for

run = TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="amp-bf16")  # change this


def train_step(model, optimizer, tokens):
    # the targets are not shifted: only sizes matter here
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


model = optimizer = None
with on_gpu():
    torch.cuda.empty_cache()
    model = network_for(run).to("cuda")  # the course's GPT-2, in plain torch.nn
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(50257, (run.micro_batch, run.seq_len), device="cuda")

# %%
counters = ("requested_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
with on_gpu():
    for number in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, tokens)
        peak = torch.cuda.max_memory_allocated()
        stats = torch.cuda.memory_stats()
        print(f"step {number}: peak {format_bytes(peak, 'GB', 3)}, after the step:")
        for counter in counters:
            print(f"    {counter:21s} {format_bytes(stats[f'{counter}.all.current'], 'GB', 3)}")
    free, total = torch.cuda.mem_get_info()
    print(f"the driver has handed out {format_bytes(total - free, 'GB', 3)}")
reveal("12.kept", stats["reserved_bytes.all.current"])

# %% [markdown]
# | counter | what it counts | it answers |
# |---|---|---|
# | requested | bytes of tensors | what do my tensors add up to? |
# | allocated | blocks that hold tensors; its maximum is the peak | how does the peak depend on the batch? |
# | reserved | memory from the driver | why am I out of memory with room left? |
# | inactive split | free memory in segments that hold a tensor | what can `empty_cache()` not return? |
# | the driver's figure | the whole GPU; `nvidia-smi` shows it | will another process fit on this card? |
#
# On a GPU, the driver's figure also includes the *[context](../docs/glossary.md#context-cuda)*, which CUDA needs in
# each process, and what libraries such as NCCL take without the allocator. A simulated GPU has neither. A real one,
# recorded:

# %%
from course_utils.evidence.gpu import GPU_TABLES

GPU_TABLES["gpu-hardware"]()[0]

# %% [markdown]
# Scratch is what kernels take for themselves while they run. The two workspaces are larger than 2 · 32 MiB by 1 MiB.
# This H200 was recorded with torch 2.11, where products with a bias had a second workspace of 1 MiB, for the library
# cuBLASLt. From torch 2.12 on, both libraries share one.
#
# Change `micro_batch` to 4 above, predict reserved after step 2, and run both cells.
#
# For any run, `measure` lists the allocations. `replay` sends them through the allocator's policy, rewritten in Python
# and tested against PyTorch's own code.

# %%
from course_utils import measure, replay
from course_utils.figures import lines
from course_utils.lessons.allocator.traces import curves

model = optimizer = tokens = None
run = TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="amp-bf16")
measured = measure(run)
replayed = replay(measured)
print(f"reserved after step 2, {measured.word}: {format_bytes(replayed.reserved[-1], 'GB', 3)}")
gap = plus_minus(replayed.reserved[-1] - stats["reserved_bytes.all.current"])
print(f"replayed − your loop: {gap} bytes")
title = "Allocated memory falls after each step, reserved memory never does"
both, source = curves(replayed), replayed.provenance
lines(both, title, "allocations and frees so far", "GB", markers=False, provenance=source)

# %% [markdown]
# Your loop has one segment of 20 MiB more, for cuBLAS's workspaces. A replay has it if the run names its card:
# `run.replace(card="H100-80GB")`.
#
# ## Out of memory with a third free
# The tensors of this run need less than 5.3 GB. On a card of 6 GiB (6.44 GB), it fails with almost a third free.
#
# **Your guess.** How large a tensor would still have fitted?

# %%
predict("12.largest", unit="GB")

# %%
waits_for("12.largest")
model = optimizer = tokens = None
snapshots = {}
with on_gpu("6 GiB"):  # change this
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        model = network_for(run).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tokens = torch.randint(50257, (run.micro_batch, run.seq_len), device="cuda")
        for number in (1, 2):
            train_step(model, optimizer, tokens)
            snapshots[f"after step {number}"] = torch.cuda.memory._snapshot()
    except torch.OutOfMemoryError as error:
        print(error)
        # before the failed step's tensors are freed
        snapshots["out of memory"] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)

# %% [markdown]
# The failed request came in backward, for the gradient of the fp32 log-probabilities: 4,096 · 50,257 · 4 bytes. Most
# free memory lies in holes next to tensors. The snapshots know which line of code made each neighbor.

# %%
waits_for("12.largest")
for moment, snapshot in snapshots.items():
    used = [segment for segment in snapshot["segments"] if segment["active_size"]]
    # the most free first
    used.sort(key=lambda segment: segment["active_size"] - segment["total_size"])
    for segment in used[:2]:
        free = max(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
        tensors = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        kept = max(tensors, key=lambda block: block["size"])
        frames = [frame for frame in kept["frames"] if frame["line"]]
        own = [frame["name"] for frame in frames if "site-packages" not in frame["filename"]]
        maker = own[0][:28] if own else "torch"
        whole, part = segment["total_size"] / MiB, kept["size"] / MiB
        print(
            f"{moment}: a segment of {whole:.0f} MiB has a hole of {free / MiB:.0f}, "
            f"next to {part:.0f} MiB from {maker}"
        )

# %% [markdown]
# In step 1, the two segments of 394 MiB held the [logits](../docs/glossary.md#logits) and the log-probabilities in
# [bf16](../docs/glossary.md#fp16-and-bf16), 4,096 · 50,257 · 2 bytes each. Two segments of 786 MiB held the
# log-probabilities in fp32, and their gradient. All four are free before the *first* `optimizer.step()` makes Adam's
# states. So best fit puts the embedding's states into the smaller two, for the whole training.
#
# In step 2, the logits and the bf16 log-probabilities no longer fit there. Each takes a segment of 786 MiB:
#
# - The log-probabilities leave half of theirs empty. This is the smaller hole.
# - The logits share theirs with the last blocks' tensors, and with autocast's bf16 copy of the head's weight. The
#   logits are freed when the loss is known. This is the larger hole.
#
# The fp32 log-probabilities get a new segment, and then their gradient has no room.
#
# Change `"6 GiB"` to `"6.1 GiB"`, 102 MiB more. Predict, and run both cells.
#
# A replay with a capacity fails in the same place. Find the two holes in its map of the memory.

# %%
from course_utils import memory_map

waits_for("12.largest")
tight = replay(measured, "6 GiB")
memory_map(tight)

# %%
failed = tight.failure
print(
    f"fails in {tight.moment(tight.failed_at)}; {format_bytes(failed.free, 'GB', 2)} free, "
    f"{failed.free_share:.0%}"
)
driver = failed.capacity - failed.reserved
print(
    f"largest hole {format_bytes(failed.largest_free, 'GB', 3)}, "
    f"left at the driver {format_bytes(driver, 'GB', 3)}: "
    f"{(failed.attempted - driver) / MiB:.0f} MiB too few"
)
reveal("12.largest", max(failed.largest_free, driver))
rest = replayed.peak_reserved - max(replayed.requested)
print(
    f"without a limit: tensors at the peak {format_bytes(max(replayed.requested), 'GB', 3)}, "
    f"reserved {format_bytes(rest, 'GB', 3)} more, {rest / max(replayed.requested):.0%}"
)

# %% [markdown]
# In your loop, the driver had even less: cuBLAS's workspaces have a segment of 20 MiB there. And the replay swaps two
# tensors. The head's weight copy lies in a segment of 394 MiB, and one of the embedding's states in one of 786 MiB. So
# its largest hole is a little larger.

# %% [markdown]
# ## Cures
# 1. **Order**: allocate long-lived tensors before short-lived ones.
# 2. **[Expandable segments](../docs/glossary.md#expandable-segments)**: set the environment variable
#    `PYTORCH_ALLOC_CONF` (formerly `PYTORCH_CUDA_ALLOC_CONF`) to `expandable_segments:True`. A segment grows page by
#    page, every rest is split off, and free pages can go back one by one.
# 3. **Sizes**: make the largest request smaller. A [loss in chunks](../docs/glossary.md#chunked-loss) makes logits for
#    some tokens at a time.
# 4. **Other settings**: `max_split_size_mb` keeps large blocks whole, `roundup_power2_divisions` makes sizes alike.
#
# **Your guess.** Our run of GPT-2 reserves 6.45 GB. How much with expandable segments?

# %%
predict("12.expandable", unit="GB")

# %%
chunked = measure(run.replace(loss_chunks=2))  # change this
settings = (
    ("unchanged", measured, {}),
    ("expandable segments", measured, {"expandable_segments": True}),
    ("loss in chunks", chunked, {}),
    ("both", chunked, {"expandable_segments": True}),
    ("max_split_size_mb:512", measured, {"max_split_size_mb": 512}),
    ("roundup_power2_divisions:8", measured, {"roundup_power2_divisions": 8}),
)
for title, source, setting in settings:
    free = replay(source, **setting)
    least = replay(source, "6 GiB", **setting)
    ends = "fits" if least.failure is None else f"fails with {least.failure.free_share:.0%} free"
    print(f"{title:26s} reserves {format_bytes(free.peak_reserved, 'GB', 2)}; on 6 GiB it {ends}")
reveal("12.expandable", replay(measured, expandable_segments=True).peak_reserved)

# %% [markdown]
# With `max_split_size_mb` the run fits, although it reserves as much as before. No small tensor gets into a large
# block, so large blocks can go back. Change `loss_chunks` to 4, predict, run.
#
# The first cure needs code: a step with gradients and learning rate of 0 makes the optimizer's states before the first
# forward.

# %%
model = optimizer = None
with on_gpu("6 GiB"):
    torch.cuda.empty_cache()
    model = network_for(run).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 3e-4
    for _ in range(2):
        train_step(model, optimizer, tokens)
    stats = torch.cuda.memory_stats()
print(f"both steps fit, {format_bytes(stats['reserved_bytes.all.current'], 'GB', 2)} reserved")

# %% [markdown]
# No setting moves a tensor. Expandable segments give back only whole pages, of 20 MiB, so they do not cure holes of 4
# MiB. ZeRO sets aside contiguous memory before the training, and copies checkpoints and gradients into it as they are
# made (section 6.3). "We can't do much about [residual
# memory](../docs/glossary.md#model-states-and-residual-memory)", says the blog draft "Where Did All the Memory Go?".
# It was worth gigabytes here, and most cures are one line of code.
#
# ## Lengths that vary
# Many loaders sort texts from short to long. Here a small model, an embedding and a head, gets such batches.


# %%
def reserved_for(lengths):
    """Bytes reserved after one step on each of these lengths, and the peak of allocated bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = nn.Sequential(nn.Embedding(4000, 32), nn.Linear(32, 4000)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in lengths:
        tokens = torch.randint(4000, (4, length), device="cuda")
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.memory_reserved() - before, torch.cuda.max_memory_allocated() - workspaces


model = optimizer = tokens = None
rising = [300, 350, 400, 430, 470, 512]  # change this
with on_gpu():
    reserved, needed = reserved_for(rising)
print(f"the longest batch needs {format_bytes(needed, 'MB', 0)}")

# %% [markdown]
# **Your guess.** How many MB are reserved after these six steps?

# %%
predict("12.lengths", unit="MB")

# %%
padded = [-(-length // 128) * 128 for length in rising]
orders = {"short to long": rising, "padded to multiples of 128": padded}
orders["long to short"] = rising[::-1]
with on_gpu():
    for title, lengths in orders.items():
        print(f"{title:26s} {format_bytes(reserved_for(lengths)[0], 'MB', 0)} reserved")
    torch.cuda.empty_cache()
    pinned = torch.cuda.memory_reserved()  # segments that hold cuBLAS's workspaces
with on_gpu(pinned + round(1.5 * needed)):
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    reserved_for(rising)
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
print(
    "on a card with 1.5 times what the longest batch needs: "
    f"{retries} retries in {len(rising)} steps"
)
reveal("12.lengths", reserved, unit="MB")

# %% [markdown]
# Each batch is longer than all before it. Its logits fit into no free block, so a new segment comes, and the old one
# stays empty. This is not [fragmentation](../docs/glossary.md#fragmentation): on a full card, a *retry* waits for the
# GPU, returns every empty segment, and asks again. That is slow. If your run slows down, look at `num_alloc_retries`.
# (On your own card, a cuBLAS workspace may pin a large segment. Then the batches use its rest, with fewer retries.)
#
# So let the longest batch come first. It also shows at once whether memory suffices. Change the lengths to `[512] * 6`,
# predict, run both cells.
#
# ## A snapshot, and a leak in it
# This training step has a small mistake:

# %%
shown = []  # outputs, for a plot at the end of the training


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    shown.append(model(batch).mean())  # change this


# %% [markdown]
# The model is `Linear(512, 2048)`, ReLU, `Linear(2048, 512)`, in fp32. The batch has 1,024 rows. **Your guess.** By how
# many MB does memory grow per step?

# %%
predict("12.leak", unit="MB")

# %%
waits_for("12.leak")
with on_gpu():
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")  # comes first
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(1024, 512, device="cuda")
    for number in (1, 2, 3, 4):
        before = torch.cuda.memory_allocated()
        step(model, optimizer, batch)
        growth = torch.cuda.memory_allocated() - before
        print(f"step {number}: {plus_minus(growth)} bytes")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)

# %% [markdown]
# A [snapshot](../docs/glossary.md#memory-snapshot) has *segments*, which you have read, and *traces*, their history.
# Each entry has the frames of the Python stack, or on a simulated GPU the operation and the line of code. A block is
# alive if it was allocated and not freed since:

# %%
trace = snapshot["device_traces"][0]
alive = {}
for entry in trace:
    if entry["action"] == "alloc":
        alive[entry["addr"]] = entry
    elif entry["action"] == "free_completed":
        alive.pop(entry["addr"], None)
print(f"{len(trace)} entries; {len(alive)} blocks are alive")

# %% [markdown]
# Which lines made them? Frames outside of torch are your own code:

# %%
made = {}
for entry in alive.values():
    frames = [frame for frame in entry["frames"] if frame["line"]]
    own = [frame for frame in frames if "site-packages" not in frame["filename"]]
    line = f"line {own[0]['line']}: {own[0]['name']}" if own else "not by your code"
    made.setdefault(line, []).append(entry["size"])
for line, sizes in sorted(made.items(), key=lambda item: -sum(item[1])):
    print(f"{len(sizes):2d} blocks, {format_bytes(sum(sizes), 'MB', 1):>7s}: {line}")
reveal("12.leak", growth, unit="MB")
print(f"formula: 1,024 rows · 2,048 numbers · 4 bytes = {format_bytes(1024 * 2048 * 4, 'MB', 2)}")

# %% [markdown]
# Weights, moments and gradients are there once. `shown.append` has blocks from *each* of four steps. The stored output
# keeps its graph, and the graph keeps what backward would need: here ReLU's output. (512 bytes per step are the mean
# itself.)
#
# The cure is `torch.no_grad()` around the second forward, or `.detach()`. Change the line to
# `shown.append(model(batch).mean().detach())`, predict the growth, and run the cells from there.
#
# `save_snapshot(replay(measure(run)), "run.pickle")` writes such a snapshot for any run.
#
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(12)

# %% [markdown]
# ## In your own script
# Record a snapshot of one training step on CUDA, in a file that <https://pytorch.org/memory_viz> opens.

# %%
import torch
from torch import nn


def record_a_step(path):
    """Write a memory snapshot of one training step to `path`; needs CUDA."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)  # before the first tensor
    try:
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(64, 1024, device="cuda")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)  # stop recording


# %% [markdown]
# This call writes to a temporary folder:

# %%
import tempfile
from pathlib import Path

from course_utils import on_gpu, read_snapshot

with on_gpu(), tempfile.TemporaryDirectory() as folder:
    record_a_step(str(Path(folder) / "step.pickle"))
    entries = read_snapshot(Path(folder) / "step.pickle")["device_traces"][0]
print(f"{len(entries)} entries, the first: {entries[0]['action']} of {entries[0]['size']:,} bytes")

# %% [markdown]
# ## Take home
# **Remember** A card must hold what is *reserved* (tensors, buffers, and the holes between them) and the CUDA context.
#
# **Breaks when** you read the wrong counter, or when lifetimes are mixed and one request is large.
#
# **Cheat-sheet line** the card: CUDA context + reserved · reserved ≥ allocated ≥ tensors · flat buffer, foreach: 4·N
# bytes · segments 2 MiB, 20 MiB, own size · out of memory with much free: expandable segments, long-lived first,
# longest batch first, smaller largest tensor · steps get slow on a full card: `num_alloc_retries`.
#
# This lesson corrects claims 14 and 22 of [what the sources got wrong](../docs/errata.md).
#
# `python3 -m course_utils watch train.py` prints three sizes of your script: tensors, allocated, reserved. Now solve
# the [exercises of this lesson](../exercises/12_allocator_and_fragmentation.ipynb).
