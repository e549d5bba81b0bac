# ---
# jupyter:
#   course:
#     minutes: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Where did the memory go?
#
# **60 minutes.** You should know what forward and backward passes are, and have trained a network once. You need no
# GPU.
#
# What fits on one GPU decides how a large model is split. So many inventions are about memory:
# [FlashAttention](../docs/glossary.md#flashattention), [grouped queries](../docs/glossary.md#grouped-queries) and
# [PagedAttention](../docs/glossary.md#pagedattention). Here you account for a training step of GPT-2 XL and settle a
# public disagreement: does it train on a 32 GB card?

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
# Two public texts train this model with Adam on one 32 GB GPU: 32 sequences of 1,024 tokens at a time, 16-bit
# arithmetic, [activation checkpointing](../docs/glossary.md#activation-recomputation). A newsletter's sum is 32–35 GB:
# you *can barely train it*. Slides list 41 GB: it *cannot be trained*. Their terms come from the
# [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)).
#
# **Your guess first.** Weights and gradients are in 16 bits, a copy of the weights and Adam's two states in fp32. All
# 32 sequences are on the card at once. How much is allocated at the step's peak?

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
        print(f"step {number}: {kept / 1e6:.1f} MB after forward, {left / 1e6:.1f} MB left, peak {peak / 1e6:.1f} MB")

# %% [markdown]
# What is left after a step? **Estimate**: the weights, Adam's two states, and the batch.

# %%
with on_gpu():
    weights = sum(weight.nbytes for weight in model.parameters())
    states = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
print(f"weights {weights / 1e6:.1f} MB, Adam's states {states / 1e6:.1f} MB, batch {x.nbytes / 1e6:.1f} MB")
gap = weights + states + x.nbytes - left
print(f"the gap: {plus_minus(gap)} bytes, 512 for the loss and 2 times {(-gap - 512) // 2:,}")

# %% [markdown]
# **The gap.** The loss is one number, in the smallest block. The rest is two
# [workspaces](../docs/glossary.md#workspace) of cuBLAS, the library that multiplies matrices: one from the first
# forward, one from the first backward, both counted as allocated. On an H100 each is 32 MiB.
#
# So steps 1 and 2 differ by Adam's states, which appear at the end of step 1, and by one small workspace, not by
# "preparatory work", as some say.
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
print(f"weights, gradients, Adam's two states, 4 bytes each: {format_bytes(16 * small.model.parameters, 'GB', 1)}")
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
# last layer to the first, and [gradients](../docs/glossary.md#gradients) take their place. The dark wedge is
# [autocast](../docs/glossary.md#autocast)'s 16-bit copy of each matrix.

# %%
peaks, word = four_steps.timeline.step_peaks(), four_steps.word
for number in (1, 2, 3, 4):
    print(f"step {number}: {word} peak {peaks[number]:,} bytes")
estimated = 20 * small.model.parameters + 2 * 8 * small.micro_batch * small.seq_len
print(f"20 bytes · N, plus tokens and targets of 8 bytes: {estimated:,}, the gap {plus_minus(estimated - peaks[1])}")
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
    for name, operation in {"linear": linear, "GELU": gelu, "residual addition": lambda x: x + x}.items():
        before = torch.cuda.memory_allocated()
        y = operation(torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16) + zero)
        kept = (torch.cuda.memory_allocated() - before - y.nbytes) // b
        total += kept
        del y
        print(f"{name} keeps {kept / 1e6:.2f} MB")
    del zero, linear
reveal("01.kept", total, unit="MB")

# %% [markdown]
# The linear layer keeps its input. So does GELU: its slope depends on it. The addition, with slope 1 everywhere, keeps
# nothing. **Activations are not "the outputs of the layers": they are what some backward will need.** ReLU can read its
# slope off its *output*. Change `nn.GELU()` to `nn.ReLU()`: predict, run.

# %% [markdown]
# ## How much do the states take?
# The ZeRO paper counts mixed-precision Adam like this (section 3.1): weights and gradients in 16 bits, and in fp32 a
# [*master copy*](../docs/glossary.md#master-weights) of the weights, [momentum](../docs/glossary.md#momentum) and
# variance.
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
# block](../docs/glossary.md#transformer-block) in backward, and copies all gradients to fp32 in the optimizer
# (`adamw-foreach`). At the end of backward only weights, gradients and states are left.

# %%
from course_utils.interactive.ledgers import show_ledger

puzzle = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master", optimizer="adamw-foreach", recompute="full")
step = measure(puzzle)
claimed = {"parameters": 2 * N, "gradients": 2 * N, "optimizer_states": 12 * N}
show_ledger(claimed, {kind: step.moments["end of backward"][kind] for kind in claimed}, columns=("estimate", step.word))
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
    print(f"{changes}: states, weights and gradients are {part:.0%} of {format_bytes(at_peak.total, 'GB', 1)}")

# %% [markdown]
# That depends on how many tokens are on the GPU at once, and on what is recomputed.

# %% [markdown]
# ## The stack of 41 GB
# The slides list eight terms: 3 + 3 + 6 + 6 + 6 for weights, gradients and states, 8 for activations, 6 for a *flat
# fp32 buffer* of all gradients, 3 for fragmentation. Do they ever exist at the same time?

# %% tags=["hide-input"]
from course_utils.figures import stack

waits_for("01.puzzle")
slides = {"parameters": 3, "gradients": 3, "optimizer_states": 18, "activations": 8, "temporaries": 6, "cached": 3}
rows = {"the slides' sum": {kind: size * 10**9 for kind, size in slides.items()}}
rows |= {f"peak of {name}": step.phase_peaks[name] for name in ("forward", "loss", "backward", "optimizer")}
title = f"Activations never meet the fp32 buffer: 41 GB on paper, {format_bytes(step.peak, 'GB', 0)} in the step"
stack(rows, title, capacity=card, provenance=str(step.provenance))

# %% [markdown]
# Each term is real. But *a [peak](../docs/glossary.md#peak) is the largest sum of what is alive at once, not the sum of
# the largest*. Backward begins with all activations and no gradient. The optimizer runs with all gradients and no
# activation. What, then, fills the fullest moment?

# %%
for item in step.largest(3):  # change this
    print(f"{format_bytes(item.bytes, 'GB', 2)}  {item.kind:12s} {item.dtype} {item.shape} from {item.operation}")

# %% [markdown]
# The loss does, with three tensors of s·b·V numbers, one per token and word of the vocabulary. The slides' 8 GB include
# the first, [log-softmax](../docs/glossary.md#log-softmax), but not the other two, gradients on the way to the
# [logits](../docs/glossary.md#logits). Change 3 to 6: what comes next, states or activations?

# %% [markdown]
# ## Who is right about 32 GB?
# Now defend your first guess.

# %%
reveal("01.puzzle", step.peak)
print(step.summary())
real = measure(puzzle, source="recorded", device="NVIDIA H200")
print(f"{format_bytes(real.counters['allocated'], 'GB', 2)} allocated, {real.provenance}")
print(f"{format_bytes(real.counters['allocated'] - step.peak, 'MB', 0)} more than the tensors")

# %% [markdown]
# A larger, real card took this very step (last two lines). Its `max_memory_allocated()` includes cuBLAS's workspaces
# and what blocks have beyond their tensors.
#
# The puzzle's card is too small. Two phases cross its line in the figure: *backward* with the loss's three tensors, and
# the *optimizer* with fp32 copies of all gradients. Neither text says how it computes the loss or steps its optimizer.
# Must all copies exist at once?

# %%
with on_gpu():
    gradients = [torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(24)]  # change this
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
# * *one gradient at a time*;
# * *[micro-batches](../docs/glossary.md#micro-batch-and-global-batch)*: 8 of 4 sequences, gradients added up, then one
#   step (lesson 07);
# * a *[chunked loss](../docs/glossary.md#chunked-loss)*: 1/8 of the tokens at a time, so no tensor of s·b·V numbers
#   ever exists (lesson 05).

# %%
one_gradient, in_pieces = {"optimizer": "adamw"}, {"micro_batch": 4, "accumulation_steps": 8}  # change this
choices = {
    "the puzzle": puzzle,
    "one gradient at a time": puzzle.replace(**one_gradient),
    "8 micro-batches of 4": puzzle.replace(**in_pieces),
    "both": puzzle.replace(**one_gradient, **in_pieces),
    "one gradient, loss in 8 chunks": puzzle.replace(**one_gradient, loss_chunks=8),
    "autocast, one gradient": puzzle.replace(**one_gradient, precision="amp-bf16"),
}
ran = {name: measure(run) for name, run in choices.items()}
stack(ran, "The recipe decides: all 32 sequences at once fit, with loss and optimizer in pieces", capacity=card,
      provenance=str(step.provenance))  # fmt: skip

# %% [markdown]
# Each change alone lowers one of the two peaks. One gradient at a time plus either of the others fits. Autocast does
# not help: its weights and gradients are fp32. Would 2 micro-batches of 16 be enough for "both"? Predict, change both
# numbers, run.
#
# **The recipe decides.** The slides are right if the loss takes all 32 sequences at once. The newsletter's 32–35 GB is
# what 8 micro-batches need if all gradients are still upcast together. (Lesson 05 examines their 60 GB of activations,
# lesson 06 their "about 8 GB" with checkpointing.)
#
# And the estimates? The *closed form* is arithmetic for a pencil ([formula.py](../course_utils/estimating/formula.py)).
# The *exact engine* goes through the step tensor by tensor.

# %%
for name, run in choices.items():
    closed, exact, truth = estimate(run, method="formula").total, estimate(run).total, ran[name].peak
    off, gap = plus_minus(100 * (closed / truth - 1), 3), plus_minus(exact - truth)
    print(f"{name:30s} closed form {off} %, exact engine {gap} bytes")

# %% [markdown]
# **The gap** of 0 says that we understand the *simulation*. A card has more ([lesson 13](13_who_is_right.ipynb)):
# CUDA's [context](../docs/glossary.md#context-cuda) (hundreds of MB, never counted as allocated), cuBLAS's workspaces,
# and what PyTorch has [reserved](../docs/glossary.md#allocated-and-reserved) beyond its tensors (lesson 10).

# %% [markdown]
# ## On your own card
# `twin` shrinks a run until it fits your card, or a simulated one of 16 GB: first the micro-batch, then the model.
# Change 1024 tokens to 512: will twice as many sequences fit?

# %%
from course_utils import card_here, compare, twin

large = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")  # change this
compare(twin(large, card_here()))

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
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            print(f"step {number}: {allocated / 1e9:.3f} GB allocated, {reserved / 1e9:.3f} GB reserved")


# %% [markdown]
# Run it here. Tensors left from earlier cells count, too:

# %%
from course_utils import on_gpu

with on_gpu():
    torch.cuda.empty_cache()
    train()

# %% [markdown]
# `python3 -m course_utils watch train.py` gives this lesson's account of an unchanged script ([lesson
# 14](14_will_it_fit.ipynb)).

# %% [markdown]
# ## Take home
# **Remember** A peak is the largest sum of what is alive at once: states stay, activations and gradients take turns.
#
# **Breaks when** you size a run by its first step: Adam's states appear at its end, and step 2 runs out of memory.
#
# **Cheat-sheet line** states 16·N bytes (Adam: fp32, autocast, or 16-bit with fp32 masters) · loss: 3 tensors of s·b·V,
# 2 bytes each (fp32 logits: 4).
#
# This lesson corrects claims 1, 2, 13 and 26 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/01_where_did_the_memory_go.ipynb).
