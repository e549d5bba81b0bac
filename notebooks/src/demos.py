# ---
# jupyter:
#   course:
#     minutes: 31
#     cpu_seconds: 35
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Demos for the stage
#
# **31 minutes** for all seven, three to six for each. The audience should know what lives in a training step. Run each
# cell with Shift+Enter. Let the room guess first: outputs are folded until you run their cell. [In a
# classroom](../docs/classroom.md#demos) says how to try all of it beforehand.

# %% tags=["hide-input"]
from IPython.display import HTML

HTML("""Large type, for this page alone: clear this output to make it small again.<style>
.jp-Notebook { --jp-code-font-size: 18px; --jp-content-font-size1: 21px; }
.course-figure { max-width: 1150px !important; max-height: 54vh; }
.course-figure { object-fit: contain; object-position: left; }
.jp-Notebook h2 { margin: 0 !important; }
</style>""")

# %% [markdown]
# Every run is sized to this machine's GPU. Without one, a T4 is simulated.

# %%
from dataclasses import replace

import torch

from course_utils import TrainingRun, card_here, estimate, expected_out_of_memory
from course_utils import format_bytes, measure, on_gpu, twin
from course_utils.figures import stack, timeline
from course_utils.units import percent

card = card_here()
two_thirds = replace(card, memory=2 * card.room // 3)
with on_gpu():
    print(f"{card.name}: {format_bytes(card.room, 'GB', 1)}")

# %% [markdown]
# ## 1 · One training step
# **Guess.** How much memory does this step take at its peak?

# %%
run = twin(TrainingRun("gpt2-xl", micro_batch=1024, seq_len=512), two_thirds)
print(run)
print(f"{run.model.parameters:,} parameters")

# %% tags=["hide-output"]
found = estimate(run)
title = f"{format_bytes(found.total)} by estimate, in {found.phase}"
stack({"one step": found}, title, capacity=card)

# %% [markdown]
# **Guess.** Which memory rises in forward, which falls in backward, and which stays?

# %% tags=["hide-output"]
measured = measure(run)
kept = format_bytes(measured.moments["end of step 2"].total)
timeline(measured, f"{kept} stay after the step, {measured.word}", capacity=card)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Weights and Adam's states stay. Activations rise in forward and fall in backward, while gradients appear.
#
# </details>

# %% [markdown]
# ## 2 · Out of memory, and back
# This batch is made for a card twice as large. The training is plain PyTorch.

# %%
from course_utils.planning.twin import largest_micro_batch

many = run.replace(micro_batch=4096)
large = run.replace(micro_batch=largest_micro_batch(many, 2 * card.room))
title = f"{large.micro_batch} sequences do not fit, by estimate"
stack({f"b = {large.micro_batch}": estimate(large)}, title, capacity=card)

# %%
from course_utils.networks import network_for


def train(run, steps=2):
    model = network_for(run).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(run.model.vocab, (run.micro_batch, run.seq_len), device="cuda")
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16 if card.has_bf16 else torch.float16):
            logits = model(tokens).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% tags=["hide-output"]
with expected_out_of_memory() as failure, on_gpu(card.room):
    train(large)
print(failure.message)

# %% [markdown]
# **Guess.** Does this kernel still train, or is its memory full for good?

# %% tags=["hide-output"]
with on_gpu(card.room):
    print(f"{format_bytes(torch.cuda.memory_allocated())} allocated after the failure")
    torch.cuda.reset_peak_memory_stats()
    train(run)
    peak = torch.cuda.max_memory_allocated()
print(f"{run.micro_batch} sequences: two steps taken, {format_bytes(peak)} at the peak")

# %% [markdown]
# <details><summary>What it shows</summary>
#
# The failed step's tensors are gone, because no name holds them. So the same process trains on.
#
# </details>

# %% [markdown]
# ## 3 · What Adam remembers
# The same model and batch with SGD. **Guess.** How much less memory, and from which moment on?

# %% tags=["hide-output"]
optimizers = {name: run.replace(optimizer=name) for name in ("sgd", "momentum", "adamw")}
rows = {name: estimate(one) for name, one in optimizers.items()}
more = format_bytes(rows["adamw"].total - rows["sgd"].total)
stack(rows, f"AdamW takes {more} more than SGD, by estimate", capacity=card)

# %% tags=["hide-output"]
sgd = format_bytes(measure(optimizers["sgd"]).peak)
first, second = (format_bytes(measured.timeline.step_peaks()[step]) for step in (1, 2))
title = f"SGD peaks at {sgd}. AdamW's first step peaks at {first}, the second at {second}"
timeline(measured, title, capacity=card)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Momentum keeps one number per parameter, Adam keeps two. The first forward runs before they exist. A batch that passes
# one step may fail in the second: always try two.
#
# </details>

# %% [markdown]
# ## 4 · Recomputation
# One batch, three ways. **Guess.** Full recomputation keeps only each block's input: how much memory is left, and how
# much longer is a step?

# %%
whole = TrainingRun("gpt2", micro_batch=1024, seq_len=1024, loss_chunks=8)
whole = twin(whole, two_thirds)
policies = {name: whole.replace(recompute=name) for name in ("none", "selective", "full")}
print(whole)

# %% tags=["hide-output"]
from course_utils.estimating.step_time import model_flops, recomputed_flops

rows = {name: estimate(one) for name, one in policies.items()}
less = percent(1 - rows["full"].total / rows["none"].total)
more = percent(recomputed_flops(policies["full"]) / model_flops(whole))
stack(rows, f"By estimate {less} less memory, for {more} more arithmetic", capacity=card)

# %% tags=["hide-output"]
rows = {name: measure(one) for name, one in policies.items()}
less = percent(1 - rows["full"].peak / rows["none"].peak)
title, origin = f"{less} less, {rows['full'].word}", str(rows["full"].provenance)
stack(rows, title, capacity=card, provenance=origin)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Memory for time: the blocks' forward runs twice. Selective recomputation keeps the results of matrix products, and
# computes only cheap operations again.
#
# </details>

# %% [markdown]
# ## 5 · Gradient accumulation
# The same batch in four micro-batches. **Guess.** Does it take a quarter of the memory?

# %%
whole = twin(TrainingRun("gpt2", micro_batch=1024, seq_len=1024), two_thirds)
whole = whole.replace(micro_batch=whole.micro_batch // 4 * 4)
parts = whole.replace(micro_batch=whole.micro_batch // 4, accumulation_steps=4)
print(f"{whole}\n{parts}")

# %% tags=["hide-output"]
rows = {"at once": measure(whole), "in 4 parts": measure(parts)}
share = percent(rows["in 4 parts"].peak / rows["at once"].peak)
title = f"{share} of the memory, {rows['at once'].word}"
stack(rows, title, capacity=card, provenance=str(rows["at once"].provenance))

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Activations shrink to a quarter. Weights, gradients and states do not.
#
# </details>
#
# **Guess.** What do ten times as many sequences take?

# %% tags=["hide-output"]
ten = parts.replace(accumulation_steps=40)
once = ten.replace(micro_batch=ten.global_batch, accumulation_steps=1)
rows = {f"{ten.global_batch} at once": estimate(once), "in 40 parts": estimate(ten)}
at_once, in_parts = (format_bytes(row.total) for row in rows.values())
stack(rows, f"{in_parts} instead of {at_once}, by estimate", capacity=card)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Only time grows with the batch.
#
# </details>

# %% [markdown]
# ## 6 · Free, but in pieces
# Four activations come and go. Four of Adam's states come, and stay. **Guess.** Is there room for one more activation?

# %%
share = card.room // 100 // 2**20 * 2**20
activations = [(23 * share, f"activation {number}") for number in (1, 2, 3, 4)]
freed = [(-size, name) for size, name in activations]
states = [(12 * share, f"state {number}") for number in (1, 2, 3, 4)]
events = [*activations, *freed, *states, (20 * share, "one more activation")]
for size, name in events:
    print(f"{format_bytes(size):>9}  {name}")


# %% tags=["hide-output"]
def play(events):
    held = {}
    for size, name in events:
        if size > 0:
            held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            del held[name]


with expected_out_of_memory() as failure, on_gpu(card.room):
    play(events)
print(failure.message)

# %% tags=["hide-output"]
from course_utils import memory_map, replay

in_pieces = replay(events, card.room)
free = percent(in_pieces.failure.free_share)
largest = format_bytes(in_pieces.failure.largest_free)
memory_map(in_pieces, title=f"{free} is free, in pieces of at most {largest}")

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Each state lies in a segment that an activation made, and keeps the rest of it from others.
#
# </details>
#
# `PYTORCH_ALLOC_CONF=expandable_segments:True` makes one segment that grows. **Guess.** Does it fit now?

# %% tags=["hide-output"]
in_one = replay(events, card.room, expandable_segments=True)
if measured.source == "live":
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    play(events)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
title = in_one.message or f"It fits: {format_bytes(in_one.allocated[-1])} allocated"
memory_map(in_one, len(in_one), title)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# The states lie side by side, and there is room after them.
#
# </details>

# %% [markdown]
# ## 7 · ZeRO, by estimate
# A model that is too large for this card. **Guess.** How many cards do you need if each keeps a copy?

# %%
from course_utils import PRESETS

dense = [model for model in PRESETS.values() if not model.experts]
model = min(
    (model for model in dense if 16 * model.parameters > card.room),
    key=lambda model: model.parameters,
)
precision = "bf16-master" if card.has_bf16 else "fp16-master"
print(f"{model.name}: 16 bytes per parameter are {format_bytes(16 * model.parameters)}")

# %% tags=["hide-output"]
one = TrainingRun(model, 1, 512, precision, attention="efficient", recompute="full", world_size=16)
rows = {f"{cards} cards": estimate(one.replace(world_size=cards)) for cards in (16, 1024)}
sizes = [format_bytes(row.total) for row in rows.values()]
stack(rows, f"{' and '.join(sizes)} for each card, by estimate", capacity=card)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# Replicas split the batch, not the model.
#
# </details>
#
# **Guess.** Which of ZeRO's stages fits?

# %% tags=["hide-output"]
stages = {f"ZeRO-{stage}": one.replace(zero_stage=stage) for stage in (1, 2, 3)}
rows = {"replicas": estimate(one)} | {name: estimate(run) for name, run in stages.items()}
fitting = [name for name, row in rows.items() if row.total <= card.room]
stack(rows, f"On 16 cards, these fit: {', '.join(fitting)}, by estimate", capacity=card)

# %% [markdown]
# <details><summary>What it shows</summary>
#
# ZeRO-1 shards the states, ZeRO-2 also the gradients, ZeRO-3 also the weights. Nothing was run: these cards are not
# here.
#
# </details>
