# ---
# jupyter:
#   course:
#     minutes: 65
#     cpu_seconds: 30
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Where did the memory go?
#
# **65 minutes.** You should know what forward and backward passes are, and have trained a network once. You need no
# GPU.
#
# This lesson accounts for a training step of GPT-2 XL. Then you judge a public disagreement: does it train on a 32 GB
# card?

# %% [markdown]
# ## Why count bytes?
# Larger models that read more text are better, but with diminishing returns ([Kaplan et al.
# 2020](https://arxiv.org/abs/2001.08361)). Meta trained Llama 3.1 70B on about 15 trillion tokens, in 7.0 million hours
# of H100 GPUs ([model
# card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)). How long would one GPU
# take? How many tokens per second did each train on?

# %%
gpu_hours, tokens = 7.0e6, 15e12  # change this
print(f"on one GPU: {gpu_hours / 24 / 365.25:,.0f} years")
print(f"throughput: {tokens / gpu_hours / 3600:,.0f} tokens per second on each GPU")

# %% [markdown]
# So one lifetime is too short, and a training needs many GPUs. What fits on one decides how the model is split. Two
# more levers raise the *throughput*, and both are about memory. One is a better implementation:
# [FlashAttention](../docs/glossary.md#flashattention) computes the same attention without writing its largest matrices,
# and [PagedAttention](../docs/glossary.md#pagedattention) wastes little when a model is served. The other is a better
# design: [grouped queries](../docs/glossary.md#grouped-queries) need fewer keys and values, and a [mixture of
# experts](../docs/glossary.md#mixture-of-experts) computes with only a part of its parameters for each token. (The
# 405B model took 30.84 million hours. Change the number.)

# %% [markdown]
# ## The puzzle
# GPT-2 XL's weights are small:

# %%
from course_utils import PRESETS, format_bytes, gpu, plus_minus

model_size, card = PRESETS["gpt2-xl"], gpu("RTX5090-32GB")  # change this
N = model_size.parameters
print(f"N = {N:,} parameters in {model_size.layers} layers of h = {model_size.hidden:,}")
print(f"weights in 16-bit: 2 bytes · N = {format_bytes(2 * N)}")
print(f"a card sold as 32 GB ({card.name}): {format_bytes(card.memory, 'GB', 1)}")
print(f"what a program gets: {format_bytes(card.room, 'GB', 1)}")

# %% [markdown]
# A card "of 32 GB" has about 32 *GiB* ([lesson 00](00_start_here.ipynb)). The driver keeps a part, and the weights fill
# a tenth. Does a program get as much of a `"V100-32GB"`? Predict, change the card, run, change it back.
#
# Two public texts train this model with Adam on one 32 GB GPU: 32 sequences of about 1,000 tokens at a time, 16-bit
# arithmetic, [activation checkpointing](../docs/glossary.md#activation-recomputation). A newsletter's sum is 32–35 GB:
# you *can barely train it*. Slides list parts that add up to 41 GB: it *cannot be trained*. Their terms come from the
# [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)).
#
# **Your guess first.** Weights and gradients are in 16 bits, a copy of the weights and Adam's two states in fp32. All
# 32 sequences of 1,024 tokens are on the card at once. The texts name no kernel: take flash attention. How much is
# allocated at the step's peak?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("01.puzzle", unit="GB")

# %% [markdown]
# ## What lives when?
# In this training loop, `memory_allocated()` is what tensors take now, and `max_memory_allocated()` the most since the
# reset. Inside `with on_gpu():`, `"cuda"` is your GPU or a *simulated* one: the same operators, but no memory behind
# the tensors. Predict: what will differ between steps 1 and 2?

# %%
import torch
from torch import nn

from course_utils import on_gpu

with on_gpu():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4096, 1024, device="cuda")  # change this
    for number in (1, 2, 3):
        torch.cuda.reset_peak_memory_stats()
        loss = (model(x) - x).pow(2).mean()  # + activations, kept for backward
        kept = torch.cuda.memory_allocated()
        loss.backward()  # + gradients, − activations, one layer after the other
        optimizer.step()  # + Adam's states, in the first step only
        optimizer.zero_grad()  # − gradients
        left, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        print(
            f"step {number}: {kept / 1e6:.1f} MB after forward, {left / 1e6:.1f} MB left, "
            f"peak {peak / 1e6:.1f} MB"
        )

# %% [markdown]
# What is left after a step? **Estimate**: the weights, Adam's two states, and the batch.

# %%
with on_gpu():
    weights = sum(weight.nbytes for weight in model.parameters())
    moments = ("exp_avg", "exp_avg_sq")
    states = sum(state[name].nbytes for state in optimizer.state.values() for name in moments)
print(
    f"weights {weights / 1e6:.1f} MB, "
    f"Adam's states {states / 1e6:.1f} MB, batch {x.nbytes / 1e6:.1f} MB"
)
gap = weights + states + x.nbytes - left
print(f"the gap: {plus_minus(gap)} bytes, 512 for the loss and 2 times {(-gap - 512) // 2:,}")

# %% [markdown]
# **The gap.** The loss is one number, in the smallest block. The rest is two
# [workspaces](../docs/glossary.md#workspace) of cuBLAS, the library that multiplies matrices: one from the first
# forward, one from the first backward, both counted as allocated. On an H100 each is 32 MiB.
#
# So the memory of steps 1 and 2 differs by two things: Adam's states, which appear at the end of step 1, and one small
# workspace. Some texts see "preparatory work" in step 1. No counted byte belongs to it. Time is another matter: in step
# 1 a real card also loads kernels and gets its first memory from the driver.
#
# Change 4096 to 8192 rows: what grows, and by how many MB? Predict, run both cells.
#
# Counters do not say which tensors they count. `measure` does, with a copy of a model on the CPU.

# %%
from course_utils import measure


def train_step(model, optimizer, x):
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


mine = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
adamw = torch.optim.AdamW(mine.parameters(), lr=1e-3)
batch = torch.randn(4096, 1024)
measure(step=train_step, model=mine, optimizer=adamw, batch=batch, card="A100-80GB")

# %% [markdown]
# This is step 2's peak again, kind by kind. Without `card`, `measure` leaves out cuBLAS's workspaces.
#
# ### The same for any run
# A *run* is a training written down: model, batch, number formats, optimizer, kernels, but no tensor. `measure(run)`
# takes the steps of the loop above and watches every allocation.
#
# Take Llama 3.2 1B, four sequences of 1,024 tokens, autocast to [bf16](../docs/glossary.md#fp16-and-bf16), AdamW.
#
# **Your guess.** How high are the peaks of steps 1 and 2? How much is left after `zero_grad`?

# %%
from course_utils import TrainingRun

small = TrainingRun("llama3.2-1b", micro_batch=4, seq_len=1024)
print(
    "weights, gradients, Adam's two states, 4 bytes each: "
    f"{format_bytes(16 * small.model.parameters, 'GB', 1)}"
)
predict("01.first_step", asks="first step")
predict("01.second_step", asks="second step")
predict("01.left", asks="left afterwards")

# %%
from course_utils.figures import timeline

waits_for("01.left")
four_steps = measure(small, steps=4)
timeline(four_steps, "Optimizer states arrive at the end of step 1 and never leave")

# %% [markdown]
# In **forward** the [activations](../docs/glossary.md#activations) pile up. In **backward** they are freed, from the
# last layer to the first, and [gradients](../docs/glossary.md#gradients) take their place. The *weight copies* are
# [autocast](../docs/glossary.md#autocast)'s 16-bit copy of each matrix.

# %%
peaks, word = four_steps.timeline.step_peaks(), four_steps.word
for number in (1, 2, 3, 4):
    print(f"step {number}: {word} peak {peaks[number]:,} bytes")
estimated = 20 * small.model.parameters + 2 * 8 * small.micro_batch * small.seq_len
print(
    "20 bytes · N, plus tokens and targets of 8 bytes: "
    f"{estimated:,}, the gap {plus_minus(estimated - peaks[1])}"
)
reveal("01.first_step", peaks[1])
reveal("01.second_step", peaks[2])
reveal("01.left", four_steps.moments["end of step 4"].total)

# %% [markdown]
# Step 1 peaks in its optimizer phase, with five numbers per parameter: the four above and, for a moment, the square
# root of Adam's variance, which a [*foreach* optimizer](../docs/glossary.md#foreach-for-loop-fused) computes for all
# parameters at once. Step 2 peaks higher, in backward: activations now meet the states.
#
# Four lifetimes explain the figure: *[temporary](../docs/glossary.md#temporaries)* (a part of one phase), *from forward
# to backward* (activations), *from backward to zero_grad* (gradients), *the whole training* (parameters and [optimizer
# states](../docs/glossary.md#optimizer-states)).

# %% [markdown]
# ## Why are activations kept at all?
# Take one linear layer, $y = x W^T$. Backward has dL/dy and needs dL/dW:
#
# $$\frac{dL}{dW} = \left(\frac{dL}{dy}\right)^T x$$
#
# So the layer's *input* x must still be there in backward. Check this with values, on the CPU.

# %%
torch.manual_seed(0)
layer, tokens = nn.Linear(64, 16, bias=False), torch.randn(32, 64)
y = layer(tokens)
dy = torch.randn_like(y)
y.backward(dy)
by_hand = dy.T @ tokens
off = (by_hand - layer.weight.grad).abs().max()
print(f"largest difference from autograd's dL/dW: {off:.4f}, expected 0")

# %% [markdown]
# Take three operations of GPT-2 XL's width, on one sequence of 1,024 tokens in bf16: a linear layer, a GELU and the
# addition of a [residual connection](../docs/glossary.md#residual-connection).
#
# **Your guess.** How many MB do they keep together?

# %%
s, b, h = 1024, 32, model_size.hidden
print(f"s·h numbers in bf16: {format_bytes(2 * s * h, 'MB')}")
predict("01.kept", unit="MB")

# %% [markdown]
# Only `y` has a name, so autograd holds everything else that stays allocated. (Adding `zero` makes the input need a
# gradient. The bytes are per sequence.)

# %%
total = 0
with on_gpu():
    zero = torch.zeros((), device="cuda", requires_grad=True)
    linear = nn.Linear(h, h, bias=False, device="cuda", dtype=torch.bfloat16)
    gelu = nn.GELU()  # change this
    operations = {"linear": linear, "GELU": gelu, "residual addition": lambda x: x + x}
    for name, operation in operations.items():
        before = torch.cuda.memory_allocated()
        y = operation(torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16) + zero)
        kept = (torch.cuda.memory_allocated() - before - y.nbytes) // b
        total += kept
        del y
        print(f"{name} keeps {kept / 1e6:.2f} MB")
    del zero, linear, operations
reveal("01.kept", total, unit="MB")

# %% [markdown]
# The linear layer keeps its input. So does GELU: its slope depends on it. The addition, with slope 1 everywhere, keeps
# nothing. **Activations are not "the outputs of the layers": they are what some backward will need.** ReLU can read its
# slope off its *output*. Change `nn.GELU()` to `nn.ReLU()`: predict, run.

# %% [markdown]
# ## How much do the states take?
# The ZeRO paper counts mixed-precision Adam like this (section 3.1): weights and gradients in 16 bits, and in fp32 a
# [*master copy*](../docs/glossary.md#master-weights) of the weights, [momentum](../docs/glossary.md#momentum) and
# variance. The paper calls all these [*model states*](../docs/glossary.md#model-states-and-residual-memory). The rest
# is *residual memory*: activations, temporary buffers, and fragments that no tensor fits.
#
# **Your guess.** How many GB is that for GPT-2 XL's 1.56 billion parameters?

# %%
predict("01.states", unit="GB")

# %%
n = 2**24
with on_gpu():
    before = torch.cuda.memory_allocated()
    weights = torch.randn(n, device="cuda", dtype=torch.bfloat16)  # change this
    gradients = torch.zeros_like(weights)
    master = weights.float()
    momentum, variance = torch.zeros_like(master), torch.zeros_like(master)
    each = (torch.cuda.memory_allocated() - before) / n
    del weights, gradients, master, momentum, variance
print(f"{each:.2f} bytes per parameter, expected 2 + 2 + 4 + 4 + 4")
reveal("01.states", each * N)

# %% [markdown]
# The rule "16 GB per billion parameters" is these five tensors: no activations, no loss, no temporaries. Change
# `torch.bfloat16` to `torch.float32`: predict, run. (`float()` of fp32 weights makes no copy.)
#
# Does a real step agree? The puzzle uses this recipe (`bf16-master`), recomputes every [transformer
# block](../docs/glossary.md#transformer-block) in backward, and copies all gradients to fp32 in the optimizer. At the
# end of backward only weights, gradients and states are left.
#
# A run's `adamw` means two things. With fp32 weights, so also under autocast, it is PyTorch's own choice on a GPU:
# foreach, all parameters at once. Under `bf16-master`, `adamw` copies and updates one parameter after the other, and
# `adamw-foreach` all at once. The puzzle uses `adamw-foreach`.

# %%
from course_utils.interactive.ledgers import show_ledger

waits_for("01.states")
puzzle = TrainingRun(
    "gpt2-xl", micro_batch=32, precision="bf16-master", optimizer="adamw-foreach", recompute="full"
)
step = measure(puzzle)
print(puzzle)
claimed = {"parameters": 2 * N, "gradients": 2 * N, "optimizer_states": 12 * N}
held = {kind: step.moments["end of backward"][kind] for kind in claimed}
show_ledger(claimed, held, columns=("estimate", step.word))
print(step.provenance)

# %% [markdown]
# **The gap** is rounding: PyTorch's [caching allocator](../docs/glossary.md#caching-allocator) hands out multiples of
# 512 bytes, and most of GPT-2 XL's vectors have a size in between.
#
# Texts after ZeRO say that large models need most memory for states. Do they? `estimate(run)` computes a peak without
# running anything:

# %%
from course_utils import estimate

waits_for("01.puzzle")
for changes in ({"micro_batch": 1}, {"micro_batch": 32}, {"micro_batch": 32, "recompute": "full"}):
    at_peak = estimate(TrainingRun("gpt2-xl", precision="bf16-master", **changes))
    part = sum(at_peak[kind] for kind in claimed) / at_peak.total
    peak = format_bytes(at_peak.total, "GB", 1)
    print(f"{changes}: states, weights and gradients are {part:.0%} of {peak}")

# %% [markdown]
# That depends on how many tokens are on the GPU at once, and on what is recomputed.

# %% [markdown]
# ## The stack of 41 GB
# The slides list eight terms: 3 + 3 + 6 + 6 + 6 for weights, gradients and states, 8 for activations, 6 for a *flat
# fp32 buffer* of all gradients, 3 for fragmentation. Do they ever exist at the same time?

# %% tags=["hide-input"]
from course_utils.figures import stack

waits_for("01.puzzle")
slides = {"parameters": 3, "gradients": 3, "optimizer_states": 18}
slides |= {"activations": 8, "temporaries": 6, "cached": 3}
rows = {"the slides' parts": {kind: size * 10**9 for kind, size in slides.items()}}
for name in ("forward", "loss", "backward", "optimizer"):
    rows[f"peak of {name}"] = step.phase_peaks[name]
peak = format_bytes(step.peak, "GB", 0)
title = f"Activations never meet the fp32 buffer: 41 GB on paper, {peak} in the step"
line = f"{card.name}: a program gets {format_bytes(card.room, 'GB', 1)}"
stack(rows, title, capacity=card.room, capacity_label=line, provenance=str(step.provenance))

# %% [markdown]
# A *breakdown* is a mapping from kinds of memory to bytes. Six lines of matplotlib draw one. `show` gives the figure a
# description for those who do not see it.

# %%
import matplotlib.pyplot as plt

from course_utils.figures import COLOURS, show

fig, ax = plt.subplots(figsize=(7, 2.5))
for kind, size in step.phase_peaks["backward"].items():  # change this: "loss"
    ax.barh(kind, size / 1e9, color=COLOURS[kind])
ax.axvline(card.room / 1e9, color="red")
ax.set(title="The peak of backward by kind", xlabel="GB")
show(fig, "Optimizer states are the longest of the bars; none alone reaches the card's line.")

# %% [markdown]
# Each term is real. But *a [peak](../docs/glossary.md#peak) is the largest sum of what is alive at once, not the sum of
# the largest*. Backward begins with all activations and no gradient. The optimizer runs with all gradients and no
# activation. What, then, fills the fullest moment?

# %%
for item in step.largest(3):  # change this
    size = format_bytes(item.bytes, "GB", 2)
    print(f"{size}  {item.kind:12s} {item.dtype} {item.shape} from {item.operation}")

# %% [markdown]
# The loss does, with three tensors of s·b·V numbers, one per token and word of the vocabulary:
# [log-softmax](../docs/glossary.md#log-softmax), and two gradients on the way to the
# [logits](../docs/glossary.md#logits). No text counts them. The slides' 8 GB are ZeRO's: the square root of all
# activations, a rule of thumb (lesson 06). Change 3 to 6: what comes next, states or activations?

# %% [markdown]
# ## Who is right about 32 GB?
# Now defend your first guess.

# %%
reveal("01.puzzle", step.peak)
print(step.summary())
real = measure(puzzle, source="recorded", device="NVIDIA H200")
print(f"{format_bytes(real.counters['allocated'], 'GB', 2)} allocated, {real.provenance}")
print(f"{format_bytes(real.counters['allocated'] - step.peak, 'MB', 0)} more than the tensors")
extra = step.phase_peaks["optimizer"]["temporaries"]
print(
    f"optimizer: {format_bytes(extra, 'GB', 1)} of temporaries, {extra / N:.1f} bytes per parameter"
)

# %% [markdown]
# A larger, real card took this very step (lines 2 and 3). Its `max_memory_allocated()` includes cuBLAS's workspaces
# and what blocks have beyond their tensors.
#
# The puzzle's card is too small. In the figure only forward stays below what a program gets. *Loss* and *backward* hold
# the loss's tensors. The *optimizer* holds two fp32 numbers per parameter for a moment: the copies of all gradients,
# and the square roots of all variances, which foreach computes at once. Neither text says how it computes the loss or
# steps its optimizer. Must all copies exist at once?

# %%
with on_gpu():
    how_many = 24  # change this
    shape, dtype = (4096, 4096), torch.bfloat16
    gradients = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(how_many)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    copies = [gradient.float() for gradient in gradients]
    at_once = torch.cuda.max_memory_allocated() - before
    del copies
    torch.cuda.reset_peak_memory_stats()
    for gradient in gradients:
        copy = gradient.float()
    one_by_one = torch.cuda.max_memory_allocated() - before
    del gradients, gradient, copy
print(f"all at once: {at_once / 1e6:,.1f} MB; one by one: {one_by_one / 1e6:,.1f} MB")

# %% [markdown]
# "One by one" needs two copies, because the name `copy` holds the last one until the next exists. Change 24 to 48:
# which number doubles? Predict, run.
#
# You can change three things. Which do you need?
#
# * *one gradient at a time*: copy it, update its parameter, free the copy (`adamw` in this recipe). In PyTorch,
#   `AdamW(..., fused=True)` is half of this cure in one word: no square roots, but a loop that copies all gradients
#   first still does (lesson 02);
# * *[micro-batches](../docs/glossary.md#micro-batch-and-global-batch)*: 8 of 4 sequences, gradients added up, then one
#   step (lesson 08);
# * a *[chunked loss](../docs/glossary.md#chunked-loss)*: 1/8 of the tokens at a time, so no tensor of s·b·V numbers
#   ever exists (lesson 05).

# %%
one_gradient = {"optimizer": "adamw"}
in_pieces = {"micro_batch": 4, "accumulation_steps": 8}  # change this
choices = {
    "the puzzle": puzzle,
    "one gradient at a time": puzzle.replace(**one_gradient),
    "8 micro-batches of 4": puzzle.replace(**in_pieces),
    "both": puzzle.replace(**one_gradient, **in_pieces),
    "one gradient, loss in 8 chunks": puzzle.replace(**one_gradient, loss_chunks=8),
    "autocast": puzzle.replace(optimizer="adamw", precision="amp-bf16"),
}
estimates = {name: estimate(run) for name, run in choices.items()}
title = "The recipe decides: all 32 sequences at once fit, with loss and optimizer in pieces"
waits_for("01.puzzle")
stack(estimates, title, capacity=card.room, capacity_label=line, provenance="estimated")

# %% [markdown]
# Each change alone lowers one of the two peaks. One gradient at a time plus either of the others fits. Would 2
# micro-batches of 16 be enough for "both"? Predict, change both numbers, run.
#
# These bars are estimates. Simulated steps check them below.
#
# Two things are still hidden in the figure. All its bars use *flash attention*. [Eager
# attention](../docs/glossary.md#eager-attention) writes matrices of s·s numbers for each head, and backward needs them
# for the block that it recomputes. And what makes autocast's bar so long?

# %%
waits_for("01.puzzle")
for name in ("one gradient at a time", "autocast"):
    weights = estimates[name]["parameters"] + estimates[name]["optimizer_states"]
    kept = estimates[name]["activations"]
    print(
        f"{name}: weights and states {format_bytes(weights, 'GB', 1)}, "
        f"activations {format_bytes(kept, 'GB', 1)}"
    )
chunks, both = choices["one gradient, loss in 8 chunks"], choices["both"]
others = {
    "loss in 8 chunks, eager attention": chunks.replace(attention="eager"),
    "both, eager attention": both.replace(attention="eager"),
    "8 micro-batches, autocast": both.replace(precision="amp-bf16"),
}
for name, run in others.items():
    print(f"{name}: {format_bytes(estimate(run).total, 'GB', 1)} estimated")

# %% [markdown]
# Autocast's weights and states are smaller: it has no 16-bit weights next to the fp32 ones. Its checkpoints and its
# loss are wider. In 8 micro-batches there are few of both, and it fits, too.
#
# **The recipe decides.** With flash attention, the slides are right if the loss takes all 32 sequences at once. With
# eager attention, chunks of the loss are not enough. ZeRO's authors had no other kind: FlashAttention is from
# [2022](https://arxiv.org/abs/2205.14135). In micro-batches, one gradient at a time, the step fits with either kernel.
# The newsletter's 32–35 GB is what 8 micro-batches need if all gradients are still upcast together, and that is more
# than a program gets. (Lesson 05 examines their 60 GB of activations, lesson 06 their "about 8 GB" with checkpointing.)
#
# And the estimates? They are a *closed form*, arithmetic for a pencil
# ([formula.py](../course_utils/estimating/formula.py)). The puzzle's step was simulated above. All blocks are alike, so 2
# of the 48 are enough to check a recipe that peaks in backward. One that peaks in the optimizer's step gets 6: with 2, its
# peak is at the loss. `compare` says where the gap comes from.

# %%
from dataclasses import replace

from course_utils import compare

gap = plus_minus(estimates["the puzzle"].total - step.peak)
print(f"the puzzle, 48 blocks: estimated − {step.word} {gap} bytes")
for name, run in choices.items():
    layers = 6 if estimates[name].phase == "optimizer" else 2  # change this
    short = compare(run.replace(model=replace(puzzle.model, layers=layers)))
    print(f"\n{name}, {layers} blocks, peak in {short.measurement.peak_phase}:")
    print(short.explanation())

# %% [markdown]
# **The gap** is a few thousand bytes, and most of it has a name. The closed form rounds only the states up to blocks of
# 512 bytes, and it leaves out tensors of a few numbers. *Elsewhere* are gradients of vectors. In backward the formula
# leaves out those of the last norm. In the optimizer step it still has the rounding of 16-bit gradients that are freed.
#
# So we understand the *simulation*. A card has more ([lesson 18](18_who_is_right.ipynb)): CUDA's
# [context](../docs/glossary.md#context-cuda) (hundreds of MB, never counted as allocated), cuBLAS's workspaces, and what
# PyTorch has [reserved](../docs/glossary.md#allocated-and-reserved) beyond its tensors (lesson 12). So "fits" needs more
# than a bar that ends just below the line.
#
# The slides name TensorFlow, too. Weights, gradients and states take the same bytes there and in JAX. Activations
# depend on what the framework's compiler fuses or recomputes, and the rest on its allocator: JAX's takes [75 % of a
# GPU](https://docs.jax.dev/en/latest/gpu_memory_allocation.html) at once.

# %% [markdown]
# ## One layer more
# The newsletter says that one more layer can cost several GB. **Your guess.** GPT-2 XL with 49 layers instead of 48, 32
# sequences, nothing recomputed, flash attention: how much higher is the peak?

# %%
predict("01.layer", unit="GB")

# %%
keep_all = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master")
deeper = replace(keep_all.model, layers=keep_all.model.layers + 1)  # change this
reveal("01.layer", estimate(keep_all.replace(model=deeper)).total - estimate(keep_all).total)
for changes in ({}, {"attention": "eager"}, {"recompute": "full"}):
    run = keep_all.replace(**changes)
    more = estimate(run.replace(model=deeper)).total - estimate(run).total
    print(f"{changes}: {format_bytes(more, 'GB', 2)} more, estimated")

# %% [markdown]
# With everything kept, it is gigabytes. With recomputation a layer adds its weights, its states and one checkpoint.
# Which kind of memory grows most? Does the 13th layer add less than the 49th? Use the controls.

# %%
from course_utils.lessons.one_step.widget import layer_slider

waits_for("01.layer")
layer_slider(keep_all)

# %% [markdown]
# ## On your own card
# `twin` shrinks a run for your card, or for a simulated T4 of 16 GB. A T4 has no bf16 and no flash kernel, so the run
# first gets fp16 under autocast and the *efficient* kernel. Then the micro-batch shrinks, and last the model, until the
# *tensors* fit. Do their blocks fit, too? `verdict` asks three in turn: the closed form, a simulated step, and the
# allocator, which places the step's blocks in what CUDA's context leaves of the room (lesson 12).

# %%
from course_utils import card_here, twin, verdict

large = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")  # change this
here = card_here()
mine = twin(large, here)
batches = (mine.micro_batch, max(1, mine.micro_batch - 1))
verdicts = [verdict(mine.replace(micro_batch=sequences), here) for sequences in batches]
for found in verdicts:
    print(f"{found.run.micro_batch} sequences of {found.run.model.name}\n{found}\n")
compare(verdicts[0].run)

# %% [markdown]
# `twin` compares tensors alone with all of the room. So its choice can run [out of
# memory](../docs/glossary.md#out-of-memory), as the first verdict says on a T4: then take a sequence less. In the table
# *reserved* may be more than a card has, because `compare`'s simulated card has no limit. A real one first gives free
# blocks back to the driver, as in `verdict`. Change 1024 tokens to 512: will twice as many sequences fit?

# %% [markdown]
# ## Five questions
# A question counts for your score if your first answer is right.

# %%
from course_utils.lessons import quiz

quiz(1)

# %% [markdown]
# ## In your own script
# Reset the peak before a training step and print it after: how much your tensors took at once, and how much PyTorch
# held for them.

# %%
import torch
from torch import nn


def train(steps=3):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(1, steps + 1):
        x = torch.randn(4096, 256, device=device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            allocated = torch.cuda.max_memory_allocated() / 1e9
            reserved = torch.cuda.max_memory_reserved() / 1e9
            print(f"step {number}: {allocated:.3f} GB allocated, {reserved:.3f} GB reserved")


# %% [markdown]
# Run it here. Tensors left from earlier cells count, too:

# %%
from course_utils import on_gpu

with on_gpu():
    torch.cuda.empty_cache()
    train()

# %% [markdown]
# `python3 -m course_utils watch train.py` gives this lesson's account of an unchanged script ([lesson
# 19](19_will_it_fit.ipynb)).

# %% [markdown]
# ## Take home
# **Remember** A peak is the largest sum of what is alive at once: states stay, activations and gradients take turns.
#
# **Breaks when** you size a run by its first step: Adam's states appear at its end, and step 2 runs out of memory.
#
# **Cheat-sheet line** states 16·N bytes (Adam: fp32, autocast, or 16-bit with fp32 masters) · loss: s·b·V logits at 6
# bytes each in 16 bits, 10 under autocast, 12 in fp32.
#
# This lesson corrects claims 1, 2, 13 and 26 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/01_where_did_the_memory_go.ipynb).
