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
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.2). You will see it happen, find out why, and
# cure it.

# %% [markdown]
# ## Out of memory with a third free
# Here is a training with [autocast](../docs/glossary.md#autocast): GPT-2, 8 sequences of 512 tokens, two steps. Later
# cells change three of its lines: how the loss is computed, what is prepared, and what looks at the memory.

# %%
import torch
from torch import nn
from torch.nn import functional as F

from course_utils import TrainingRun, on_gpu
from course_utils.networks import network_for

run = TrainingRun("gpt2", micro_batch=8, seq_len=512)
MiB = 2**20


def whole_loss(model, tokens):  # the targets are not shifted: only sizes matter here
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def nothing(*_):
    pass


# %%
def train(loss_of=whole_loss, prepare=nothing, look=nothing):
    model = network_for(run).to("cuda")  # the course's GPT-2, in plain torch.nn
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(50257, (run.micro_batch, run.seq_len), device="cuda")
    prepare(model, optimizer)
    for step in (1, 2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, tokens)
        look(f"step {step}: the loss is known")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        look(f"after step {step}")


# %% [markdown]
# How much does it need? `_record_memory_history` also notes every allocation. We keep these notes for later.

# %%
noted = {}


def note(moment):
    noted[moment] = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()


with on_gpu():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    train(look=note)
    torch.cuda.memory._record_memory_history(enabled=None)
stats, history = noted["after step 2"]
peak = stats["allocated_bytes.all.peak"]
print(f"at most {peak / 1e9:.2f} GB allocated; a card of 6 GiB has {6 * 2**30 / 1e9:.2f} GB")

# %% [markdown]
# On a card of 6 GiB, the second step fails nevertheless, with almost a third of the card free.
#
# **Your guess.** How large a tensor would still have fitted?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("12.largest", unit="GB")

# %% [markdown]
# Take a snapshot of all blocks at four moments of each step, with a hook for the logits:

# %%
snapshots = {}


def look(moment):
    snapshots[moment] = torch.cuda.memory._snapshot()


def look_at_logits(model, optimizer):
    def hook(*_):
        look(f"step {2 if 'after step 1' in snapshots else 1}: the logits are there")

    model.head.register_forward_hook(hook)


# %%
waits_for("12.largest")
snapshots.clear()
card = 6 * 1024 * MiB  # change this
with on_gpu(card):
    torch.cuda.empty_cache()
    try:
        train(prepare=look_at_logits, look=look)
    except torch.OutOfMemoryError as error:
        print(error)
        look("out of memory")  # before the failed step's tensors are freed

# %% [markdown]
# The last snapshot lists all blocks. How large is the largest free one? And does the driver still have more?

# %%
waits_for("12.largest")
segments = list(snapshots.values())[-1]["segments"]
blocks = [block for segment in segments for block in segment["blocks"]]
hole = max(block["size"] for block in blocks if block["state"] == "inactive")
left = card - sum(segment["total_size"] for segment in segments)
free = left + sum(block["size"] for block in blocks if block["state"] == "inactive")
print(f"{free / card:.0%} of the card is free, the largest hole has {hole / MiB:.0f} MiB,")
print(f"and the driver has {left / MiB:.0f} MiB left. The request was for 786 MiB.")
reveal("12.largest", max(hole, left))

# %% [markdown]
# (Give the card 100 MiB more. Predict, and run both cells.)
#
# Is that real? An H200 trained the same run with less and less memory ([all 20
# runs](../docs/evidence.md#the-smallest-card-that-works)):

# %%
# recorded: NVIDIA H200, torch 2.11, 2026-11-27
fails, works = 6_446_288_699, 6_455_033_856
print(f"the H200 fails with {fails / MiB:,.0f} MiB and works with {works / MiB:,.0f} MiB;")
print(f"a card of 6 GiB has {6 * 1024:,} MiB")

# %% [markdown]
# So a card must hold what is *[reserved](../docs/glossary.md#allocated-and-reserved)*, not what your tensors add up to.
# Who reserves, and why so much?

# %% [markdown]
# ## Why PyTorch keeps what you free
# CUDA's own calls are the reason. `cudaMalloc` asks the driver for memory, which is slow. `cudaFree` can be worse: it
# may wait until *all* GPUs have done everything that is queued ([Paszke et
# al. 2019](https://arxiv.org/abs/1912.01703), section 5.3). The processor could then no longer run ahead of the GPU.
# So PyTorch's *[caching allocator](../docs/glossary.md#caching-allocator)* asks rarely, asks for much, and keeps what
# it gets. Count it in your history:

# %%
from collections import Counter

traces = [noted[moment][1]["device_traces"][0] for moment in ("after step 1", "after step 2")]
for step, trace in {1: traces[0], 2: traces[1][len(traces[0]) :]}.items():
    actions = Counter(entry["action"] for entry in trace)
    print(f"step {step}: {actions['alloc']:,} tensors, {actions['segment_alloc']} times cudaMalloc")

# %% [markdown]
# (Step 1 includes the set-up.) The paper's figure 2 shows the same on a real GPU: the first step is slow because of
# `cudaMalloc`, later ones are not.
#
# How can memory be reused at once, while the GPU may still compute with it? Because a CUDA *stream* runs its kernels in
# order: the next tensor's kernel comes after the last one that reads the old tensor. This holds for one stream only. So
# each stream has *pools* of its own, and another stream cannot use their free memory. That costs memory as soon as
# something has a stream of its own: FSDP's gathers, a prefetcher's copies, a CUDA graph, whose tensors must stay where
# they were captured ([a private
# pool](https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management)). If you use a tensor on another
# stream yourself, tell the allocator by
# [`tensor.record_stream(stream)`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html), or
# it may be overwritten.

# %% [markdown]
# ## How memory is handed out
# | rule | what it does |
# |---|---|
# | round | a request becomes a [*block*](../docs/glossary.md#block-and-segment): a multiple of 512 bytes |
# | two pools | blocks of up to 1 MiB come from the small pool, others from the large one |
# | segments | the driver gives 2 MiB (small pool), 20 MiB (blocks < 10 MiB), or the block's size, rounded up to 2 MiB |
# | best fit | before it asks the driver, PyTorch takes the smallest free block that is large enough |
# | split | the rest of a block becomes free: in the small pool always, in the large one if it is over 1 MiB |
# | join | a freed block joins free neighbors, but only in its own segment |
# | keep | only empty segments go back to the driver: when memory runs out, or by `empty_cache()` |
#
# (From `CUDACachingAllocator.cpp` in PyTorch 2.13. Its
# [documentation](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) says how to change the rules.)
#
# A rest that is not split off belongs to the block and counts as *allocated*. All memory from the driver is *reserved*.
#
# **Your guess.** A fresh process makes three tensors of 4 MiB. How many MiB does it take from the driver?

# %%
predict("12.three", unit="MiB")

# %%
with on_gpu(card="T4-16GB"):  # another card, on which nothing has run
    three = [torch.empty(4 * MiB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    taken = torch.cuda.memory_reserved()
    del three
reveal("12.three", taken, unit="MiB")

# %% [markdown]
# Blocks and segments of single requests, each with an empty cache:

# %%
with on_gpu(card="T4-16GB"):
    for size in (1, 1_200, MiB, MiB + 1, 10 * MiB, 11 * MiB, 786 * MiB + 1):  # change this
        torch.cuda.empty_cache()
        one = torch.empty(size, dtype=torch.uint8, device="cuda")
        block, segment = torch.cuda.memory_allocated(), torch.cuda.memory_reserved() // MiB
        print(f"{size:11,} bytes → a block of {block:11,} in a segment of {segment:3} MiB")
        del one

# %% [markdown]
# Which block is 1 MiB larger than its request, because the rest was not split off? Add `13 * MiB` to the list, predict
# block and segment, run.
#
# **Play allocator.** Move the slider event by event, and say what happens before you look. Then change the requests:
# `a=4` allocates 4 MiB, `b=512K` 512 KiB, `-a` frees. Red hatching is free memory next to a tensor, gray hatching an
# empty segment, which could go back.

# %%
from course_utils.lessons.allocator.widget import allocator_player

allocator_player("a=4 b=4 c=4 d=12 e=512K -b f=2 -a -f g=7 -d h=11 i=13", event=7)  # change this

# %% [markdown]
# At event 10, `g` asks for 7 MiB and gets 8. At 9 and 11, memory is freed, but reserved does not fall. At 13, two other
# segments have free memory, but no piece is large enough.

# %% [markdown]
# ## Why pieces do not add up
# Twenty tensors of 4 MiB fill a GPU of 80 MiB. Twelve live long (`L`), eight are short-lived (`s`) and freed. So 32 MiB
# are free. In the order below, a request for 8 MiB fails. Each line is a segment of 20 MiB.
#
# **Your turn.** Write another order of the same twenty tensors, so that 8 MiB fit.

# %%
order = "LsLsL" * 4  # write another order
tensors, verdict = None, "Right."
try:
    with on_gpu("80 MiB", card="T4-16GB"):
        torch.cuda.empty_cache()
        tensors = [torch.empty(4 * MiB, dtype=torch.uint8, device="cuda") for _ in order]
        tensors = [tensor for tensor, life in zip(tensors, order, strict=True) if life == "L"]
        for segment in torch.cuda.memory._snapshot()["segments"]:
            marks = {"active_allocated": "████", "inactive": "····"}
            blocks = segment["blocks"]
            print("".join(marks[one["state"]] * (one["size"] // (4 * MiB)) for one in blocks))
        torch.empty(8 * MiB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    verdict = f"Not yet: {error}"
tensors = None
print(verdict if sorted(order) == sorted("LsLsL" * 4) else "Not yet: twelve L and eight s.")

# %% [markdown]
# <details><summary>An order</summary>
#
# `"LssLL" * 4`, for example: two holes side by side are one. `"L" * 12 + "s" * 8` even leaves a whole segment empty.
#
# </details>
#
# For 8 MiB, PyTorch asks the driver for 20. A request fails when no free block is large enough, and the driver has no
# room for a new segment, even after all *empty* ones went back. PyTorch never asks how much is free in total.
#
# ZeRO's section 6.3 names this pattern: with [recomputation](../docs/glossary.md#activation-recomputation), checkpoints
# stay, and the tensors between them are freed.

# %% [markdown]
# ## Four counters
# Back to the training without a limit. After a step, only weights and Adam's states are left, 12 bytes per parameter.
#
# **Your guess.** How many GB are *reserved* then?

# %%
predict("12.kept", unit="GB")

# %%
from course_utils.figures import bars

waits_for("12.kept")
counters = {"estimated: 12·N": 12 * run.model.parameters}
for name in ("requested", "allocated", "reserved", "inactive_split"):
    counters[name] = stats[f"{name}_bytes.all.current"]
reveal("12.kept", counters["reserved"])
gap = counters["estimated: 12·N"] - counters["requested"]
print(f"the gap, 12·N − requested: {gap:,} bytes; two workspaces: {2 * 8.125 * MiB:,.0f} bytes")
times = counters["reserved"] / counters["allocated"]
title = f"Reserved is {times:.1f} times what the tensors take"
bars(counters, title, provenance="memory_stats() after step 2")

# %% [markdown]
# | counter | what it counts | it answers |
# |---|---|---|
# | requested | bytes of tensors | what do my tensors add up to? |
# | allocated | blocks that hold tensors; its maximum is the peak | how does the peak depend on the batch? |
# | reserved | memory from the driver | why am I out of memory with room left? |
# | inactive split | free memory in segments that hold a tensor | what can `empty_cache()` not return? |
#
# **The gap** is cuBLAS's [workspaces](../docs/glossary.md#workspace), which never go back: one for forward and one for
# backward, 8.125 MiB each (32 MiB on Hopper). The rest are the token ids, 8 bytes each, and the last loss, a block of
# 512. Allocated adds rests of blocks that were not split off.
#
# The driver's figure, which `nvidia-smi` shows, is larger: it includes the *[context](../docs/glossary.md#context-cuda)*
# that CUDA needs in each process (549 MB on an H200, [recorded](../docs/gpu_results.md)), and what NCCL takes.

# %% [markdown]
# ## The story in four panels
# Where did a third of the card go? Here are four of your snapshots, without segments that are smaller than the logits.
# Tensors are recognized by their bytes: T = 8 · 512 tokens, V = 50,257 words, h = 768.

# %%
from course_utils.lessons.allocator.figures import snapshot_panels

waits_for("12.largest")
T, V, h = run.micro_batch * run.seq_len, 50257, 768
names = {
    2 * T * V: ("T·V in 16 bits", "temporaries"),
    4 * T * V: ("T·V in fp32", "temporaries"),
    4 * V * h: ("V·h in fp32", "optimizer_states"),
    2 * V * h: ("V·h in 16 bits", "weight_copies"),
}
moments = ["step 1: the loss is known", "after step 1", "step 2: the logits are there"]
four = {moment: snapshots[moment] for moment in [*moments, "out of memory"] if moment in snapshots}
title = "Small states move into large segments, and the next step finds no room"
snapshot_panels(four, names, title, 2 * T * V, "blocks of torch.cuda.memory._snapshot()")

# %% [markdown]
# 1. In step 1, two segments of 394 MiB held the [logits](../docs/glossary.md#logits) (freed by now) and the
#    log-probabilities, both in [bf16](../docs/glossary.md#fp16-and-bf16): T·V·2 bytes. A segment of 786 MiB holds the
#    log-probabilities in fp32. Their gradient will take another.
# 2. All four are empty when the *first* `optimizer.step()` makes Adam's states. Best fit puts two states of the
#    embedding, V·h·4 bytes each, into the smallest that can hold them, for the whole training.
# 3. In step 2, the logits no longer fit there. They share a segment of 786 MiB with the last blocks' tensors, and with
#    autocast's bf16 copy of the head's weight (dark blue).
# 4. When the loss is known, the logits are freed: a hole of over 600 MiB. The bf16 log-probabilities have the other
#    segment of 786 MiB, and leave half of it empty. Their fp32 copy gets a new one. And its gradient, 786 MiB, finds no
#    room.
#
# The tensors of both steps are the same. What differs is who was there first.
#
# A state takes a segment of the logits as long as it fits: V·h·4 ≤ T·V·2, or T ≥ 2h. Below how many sequences of 512
# tokens do the states move into the larger two? Change `micro_batch` at the top to one less, and run all cells to here.

# %% [markdown]
# ## Cures, and what they cost
# In this order:
#
# | | cure | it costs |
# |---|---|---|
# | 1 | order: long-lived tensors before short-lived ones | a few lines |
# | 2 | [expandable segments](../docs/glossary.md#expandable-segments): `expandable_segments:True`. A segment grows page by page, every rest is split off, free pages go back one by one | an environment variable. Holes of less than a page, 20 MiB, stay |
# | 3 | a smaller largest tensor: a [loss in chunks](../docs/glossary.md#chunked-loss) | the head's forward runs twice |
# | 4 | `max_split_size_mb:512`: larger blocks are never split, so small tensors stay out of them | large blocks are used less well; PyTorch's documentation calls it a last resort |
# | 5 | `roundup_power2_divisions:8`: sizes become alike, so blocks are reused | up to an eighth of each request |
# | 6 | `garbage_collection_threshold:0.8`: above 80 % of the card, empty segments that were long unused go back *before* memory runs out | `cudaMalloc` later; it saves slow retries, but cures no holes |
#
# All but 1 and 3 are set by `PYTORCH_ALLOC_CONF` (formerly `PYTORCH_CUDA_ALLOC_CONF`), before the process starts. The
# last works only after `torch.cuda.set_per_process_memory_fraction(…)`, and only without expandable segments
# (`CUDACachingAllocator.cpp`). A real card's message recommends number 2 by name.
#
# **Your turn.** Cure 1: make Adam's states before the first forward, without a change of any weight.


# %%
def states_first(model, optimizer):
    pass  # gradients of zero, and a step with a learning rate of zero


small = nn.Linear(3, 3)
adam = torch.optim.AdamW(small.parameters(), lr=3e-4)
before = small.weight.detach().clone()
states_first(small, adam)
problem = "" if len(adam.state) == 2 else "Adam has no states"
if not torch.equal(before, small.weight) or adam.param_groups[0]["lr"] != 3e-4:
    problem = "a weight or the learning rate has changed"
try:
    with on_gpu("6 GiB"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(prepare=states_first)
        most = torch.cuda.max_memory_reserved() / 1e9
except torch.OutOfMemoryError:
    problem = problem or "out of memory"
print(f"Not yet: {problem}." if problem else f"Right: {most:.2f} GB reserved.")

# %% [markdown]
# <details><summary>The lines</summary>
#
# ```python
# for weight in model.parameters():
#     weight.grad = torch.zeros_like(weight)
# optimizer.param_groups[0]["lr"] = 0.0
# optimizer.step()
# optimizer.param_groups[0]["lr"] = 3e-4
# optimizer.zero_grad()
# ```
#
# With a learning rate of zero, weight decay does nothing, either. (Adam's t is one ahead then. Set `state["step"]` back
# if that matters to you.)
#
# </details>
#
# Cure 3, in the same loop: each part's logits are computed, used, and computed again in backward.

# %%
from torch.utils.checkpoint import checkpoint


def chunked_loss(model, tokens, chunks=2):  # change this
    def part_loss(x, targets):
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten(), reduction="sum")

    parts = zip(model.features(tokens).chunk(chunks), tokens.chunk(chunks), strict=True)
    losses = [checkpoint(part_loss, *part, use_reentrant=False) for part in parts]
    return sum(losses) / tokens.numel()


with on_gpu():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    train(chunked_loss)
    in_chunks = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    print(f"in chunks: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")

# %% [markdown]
# On a real card, a setting needs a new process. But `replay` can send the *history* of your run through the allocator's
# rules, under any setting.

# %%
from course_utils import replay


def events(snapshot):
    """The (bytes, address) of each allocation in a snapshot's history, −bytes for a free."""
    sign = {"alloc": 1, "free_completed": -1}
    trace = [entry for entry in snapshot["device_traces"][0] if entry["action"] in sign]
    return [(sign[entry["action"]] * entry["size"], entry["addr"]) for entry in trace]


gap = replay(events(history)).peak_reserved - stats["reserved_bytes.all.peak"]
print(f"your loop, most reserved: replayed − counted is {gap} bytes")

# %% [markdown]
# Does a real card agree? An H200 recorded [twelve trainings twice](../docs/gpu_results.md). Replay the histories *without* expandable segments
# under the setting, and compare with what the H200 counted *with* it:

# %%
from course_utils.evidence.history import recorded_twice

equal = []
for twice in recorded_twice().values():  # NVIDIA H200, torch 2.11, 2026-11-26
    replayed = replay(events(twice.snapshot), expandable_segments=True).peak_reserved
    equal.append(replayed == twice.expandable)
print(f"{sum(equal)} of {len(equal)} are equal to the byte, such as the last:")
print(f"counted without {twice.without:,}, with {twice.expandable:,}, replayed {replayed:,} bytes")

# %% [markdown]
# **Your guess.** How many GB does your loop reserve with expandable segments?

# %%
predict("12.expandable", unit="GB")

# %%
mine, in_parts = events(history), events(in_chunks)
expandable, size = {"expandable_segments": True}, 512  # change this
cures = {
    "as it is": (mine, {}),
    "expandable_segments:True": (mine, expandable),
    "loss in chunks": (in_parts, {}),
    "both": (in_parts, expandable),
    f"max_split_size_mb:{size}": (mine, {"max_split_size_mb": size}),
    "roundup_power2_divisions:8": (mine, {"roundup_power2_divisions": 8}),
}

# %%
reserved, fitting = {}, []
for name, (those, setting) in cures.items():
    if replay(those, "6 GiB", **setting).failure is None:
        fitting.append(name)
    words = "fits" if name in fitting else "fails"
    reserved[f"{name} · {words}"] = replay(those, **setting).peak_reserved
reveal("12.expandable", replay(mine, **expandable).peak_reserved)
title = f"{len(fitting)} of these {len(cures)} ways fit on 6 GiB"
bars(reserved, title, provenance="reserved without a limit: replays of your loop's history")

# %% [markdown]
# With `max_split_size_mb` the run fits, although it reserves as much as before: no small tensor gets into a large
# block, so large blocks can go back. Change the 512 to 1024, predict, run.
#
# No setting moves a tensor. ZeRO sets aside contiguous memory before the training, and copies checkpoints and gradients
# into it as they are made (section 6.3). "We can't do much about [residual
# memory](../docs/glossary.md#model-states-and-residual-memory)", says the blog draft "Where Did All the Memory Go?". It
# was worth gigabytes here.
#
# Your growing script gets no new line from this lesson: its table counts what is allocated, and these cures change what
# is reserved.

# %% [markdown]
# ## Lengths that vary
# Many loaders sort texts from short to long. Here a small model, an embedding and a head, gets such batches.


# %%
def reserved_for(lengths):
    """Bytes reserved after one step on each of these lengths, at the peak, and the retries."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    model = nn.Sequential(nn.Embedding(4000, 32), nn.Linear(32, 4000)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in lengths:
        tokens = torch.randint(4000, (4, length), device="cuda")
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = torch.cuda.memory_stats()
    ends = "reserved_bytes.all.current", "allocated_bytes.all.peak", "num_alloc_retries"
    starts = "reserved_bytes.all.current", "allocated_bytes.all.current", "num_alloc_retries"
    return [after[end] - before[start] for end, start in zip(ends, starts, strict=True)]


# %%
rising = [300, 350, 400, 430, 470, 512]  # change this
with on_gpu():
    reserved, needed, _ = reserved_for(rising)
print(f"the longest batch needs {needed / 1e6:.0f} MB")

# %% [markdown]
# **Your guess.** How many MB are reserved after these six steps?

# %%
predict("12.lengths", unit="MB")

# %%
padded = [-(-length // 128) * 128 for length in rising]
orders = {"short to long": rising, "padded to multiples of 128": padded}
orders["long to short"] = rising[::-1]
with on_gpu():
    found = {order: reserved_for(lengths)[0] for order, lengths in orders.items()}
    torch.cuda.empty_cache()
    pinned = torch.cuda.memory_reserved()  # segments that hold cuBLAS's workspaces
with on_gpu(pinned + round(1.5 * needed)):
    _, _, retries = reserved_for(rising)
print(f"with 1.5 times what the longest batch needs: {retries} retries in {len(rising)} steps")
reveal("12.lengths", reserved, unit="MB")
title = "Let the longest batch come first"
bars(found, title, unit="MB", provenance="memory_reserved() after six steps")

# %% [markdown]
# Each batch is longer than all before it. Its logits fit into no free block, so a new segment comes, and the old one
# stays empty. This is not [fragmentation](../docs/glossary.md#fragmentation): on a full card, a *retry* waits for the
# GPU, returns every empty segment, and asks again. That is slow. If your run slows down, look at `num_alloc_retries`.
# (On your own card, a cuBLAS workspace may pin a large segment. Then the batches use its rest, with fewer retries.)
#
# The longest batch first also shows at once whether memory suffices. Change the lengths to `[512] * 6`, predict, run.

# %% [markdown]
# ## A leak in a snapshot
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
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")  # comes first
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(1024, 512, device="cuda")
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        step(model, optimizer, batch)
        growth = torch.cuda.memory_allocated() - before
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
print(f"in step 4: {growth:+,} bytes; 1,024 rows · 2,048 numbers · 4 bytes = {1024 * 2048 * 4:,}")
reveal("12.leak", growth, unit="MB")

# %% [markdown]
# A [snapshot](../docs/glossary.md#memory-snapshot) has *segments* and *traces*, their history. Each entry has the frames
# of the Python stack, or on a simulated GPU the operation and the line of code. Which lines made the blocks that are
# alive? Frames outside of torch are your own code:

# %%
alive, made = {}, {}
for entry in snapshot["device_traces"][0]:
    if entry["action"] == "alloc":
        alive[entry["addr"]] = entry
    elif entry["action"] == "free_completed":
        alive.pop(entry["addr"], None)
for entry in alive.values():
    frames = [frame for frame in entry["frames"] if frame["line"]]
    own = [frame for frame in frames if "site-packages" not in frame["filename"]]
    line = f"line {own[0]['line']}: {own[0]['name']}" if own else "not by your code"
    made.setdefault(line, []).append(entry["size"])
for line, sizes in sorted(made.items(), key=lambda item: -sum(item[1])):
    print(f"{len(sizes):2d} blocks, {sum(sizes) / 1e6:4.1f} MB: {line}")

# %% [markdown]
# Weights, moments and gradients are there once. `shown.append` has blocks from *each* of four steps. The stored output
# keeps its graph, and the graph keeps what backward would need: here ReLU's output. (512 bytes per step are the mean
# itself.)
#
# The cure is `torch.no_grad()` around the second forward, or `.detach()`. Change the line to
# `shown.append(model(batch).mean().detach())`, predict the growth, and run the cells from there.

# %% [markdown]
# ## A buffer for all gradients at once
# One more thing lies outside of weights, gradients and states. Some operations need all gradients in one piece: a norm,
# or a sum over all GPUs. The simplest code copies them into one fp32 [flat buffer](../docs/glossary.md#flat-buffer).
#
# **Your guess.** How large is that buffer for GPT-2 XL?

# %%
predict("12.buffer", unit="GB")

# %%
N = 50257 * 1600 + 1024 * 1600 + 48 * (12 * 1600**2 + 13 * 1600) + 2 * 1600  # lesson 04
print(f"4 bytes for each of {N:,} gradients; ZeRO rounds: 4 · 1.5·10⁹ = {4 * 1.5:.1f} GB")
reveal("12.buffer", 4 * N)

# %% [markdown]
# ZeRO also names 12 GB for 3 billion parameters, in section 6.2. Who makes such a buffer today? Measure, with the
# gradients of the small GPT-2:


# %%
def extra(operation):
    """Peak bytes that it allocates, on top of those there before, for each of the gradients."""
    weights = list(network_for(run).to("cuda").parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, foreach=True)  # change this
    optimizer.step()  # makes the states
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    operation(weights, optimizer)
    most = torch.cuda.max_memory_allocated() - before
    return round(most / sum(weight.numel() for weight in weights), 3)


operations = {
    "norm of one flat buffer": lambda ws, _: torch.cat([w.grad.flatten() for w in ws]).norm(),
    "norm of the norms": lambda ws, _: torch.stack([w.grad.norm() for w in ws]).norm(),
    "clip_grad_norm_": lambda ws, _: nn.utils.clip_grad_norm_(ws, max_norm=1.0),
    "AdamW's step": lambda _, optimizer: optimizer.step(),
}

# %%
with on_gpu():
    found = {name: extra(operation) for name, operation in operations.items()}
print("bytes per parameter:", found)

# %% [markdown]
# The norm of all gradients is the norm of their norms, $\|g\| = \sqrt{\|g_1\|^2 + \|g_2\|^2 + \dots}$, so
# `clip_grad_norm_` needs no buffer. Foreach is the flat buffer under another name: one temporary per tensor ([lesson
# 02](02_adam.ipynb)). DistributedDataParallel's *buckets* are such a buffer, too, cut in parts
# ([lesson 10](10_data_parallelism.ipynb)). ZeRO's answer is a buffer of *constant* size, filled again and again.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(12)

# %% [markdown]
# ## In your own script
# Record a few steps on CUDA, also if memory runs out in them. <https://pytorch.org/memory_viz> opens the file. Then start
# your training with another setting, one at a time. (Older PyTorch: `PYTORCH_CUDA_ALLOC_CONF`.)

# %%
import torch

# PYTORCH_ALLOC_CONF=expandable_segments:True python train.py
# PYTORCH_ALLOC_CONF=max_split_size_mb:512 python train.py
# PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8 python train.py  # needs a fraction below 1


def record(train, path, fraction=1.0):
    """Call train(), print counters, and write torch's snapshot to `path`; needs CUDA."""
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)  # of the card
    torch.cuda.memory._record_memory_history(max_entries=100_000)  # before the first tensor
    try:
        train()  # a few steps of yours
    finally:  # also after torch.OutOfMemoryError, while its tensors are still there
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)  # stop recording
        stats = torch.cuda.memory_stats()
        for name in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries"):
            print(f"{name} {stats[name]:,}")


# %% [markdown]
# This call writes to a temporary folder, and replays the history under a setting that the process did not have:

# %%
import pickle
import tempfile
from pathlib import Path

from course_utils import on_gpu, replay


def two_products():
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    (x @ x).square().mean().backward()


with on_gpu(card="A100-80GB"), tempfile.TemporaryDirectory() as folder:
    record(two_products, f"{folder}/steps.pickle")
    snapshot = pickle.loads(Path(folder, "steps.pickle").read_bytes())  # only a file of your own
sign = {"alloc": 1, "free_completed": -1}
trace = [entry for entry in snapshot["device_traces"][0] if entry["action"] in sign]
mine = [(sign[entry["action"]] * entry["size"], entry["addr"]) for entry in trace]
print(replay(mine, expandable_segments=True))

# %% [markdown]
# ## Take home
# **Remember** A card must hold what is *reserved* (tensors, buffers, and the holes between them) and the CUDA context.
#
# **Breaks when** you read the wrong counter, or when lifetimes are mixed and one request is large.
#
# **Cheat-sheet line** the card: CUDA context + reserved · reserved ≥ allocated ≥ tensors · flat buffer, foreach: 4·N
# bytes · segments 2 MiB, 20 MiB, own size · out of memory with much free: long-lived first, expandable segments,
# smaller largest tensor, longest batch first · steps get slow on a full card: `num_alloc_retries`.
#
# This lesson corrects claims 14 and 22 of [what the sources got wrong](../docs/errata.md).
#
# `python3 -m course_utils watch train.py` prints three sizes of your script: tensors, allocated, reserved. Now solve
# the [exercises of this lesson](../exercises/12_allocator_and_fragmentation.ipynb).
