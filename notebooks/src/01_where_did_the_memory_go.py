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
# **60 minutes.** You should know what a forward and a backward pass are, and have trained some network once. No GPU is
# needed: where a measurement is simulated, it says so.
#
# Why care? Llama 3.1 405B took 30.84 million GPU-hours to train ([model
# card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)). Each H100 did 380 to 430
# TFLOP/s, 38 to 43 % of its peak ([Llama 3 paper](https://arxiv.org/abs/2407.21783), Table 4). How such a model is cut
# into pieces, and how many tokens it takes at a time, is decided by what fits on one GPU. Many well-known inventions
# are about memory: [FlashAttention](../docs/glossary.md#flashattention) never writes the largest matrices, [grouped
# queries](../docs/glossary.md#grouped-queries) and [PagedAttention](../docs/glossary.md#pagedattention) shrink and pack
# what attention remembers, a [mixture of experts](../docs/glossary.md#mixture-of-experts) spends memory on parameters
# to save arithmetic. To judge any of them you need an account of where the bytes are now.
#
# You will account for a whole training step of GPT-2 XL, byte by byte, find out what is alive when, and settle a public
# disagreement: does it train on a 32 GB card or not?

# %% [markdown]
# ## The puzzle
# GPT-2 XL's weights are small. Here is how small.

# %%
from course_utils import PRESETS, format_bytes, gpu

model, card = PRESETS["gpt2-xl"], gpu("RTX5090-32GB")
N = model.parameters
print(f"N = {N:,} parameters in {model.layers} layers of h = {model.hidden:,}")
print(f"weights in 16-bit: 2 bytes · N = {format_bytes(2 * N)}")
print(f"a card sold as 32 GB ({card.name}): {format_bytes(card.memory, 'GB', 1)}")
print(f"what a program gets of it: {format_bytes(card.room, 'GB', 1)}")

# %% [markdown]
# A card "of 32 GB" has about 32 *GiB*, of 2³⁰ bytes each; [lesson 00](00_start_here.ipynb) tells the two units apart.
# The driver keeps a part of it.
#
# So the weights fill a tenth of the card. Two public texts then train this model with Adam, 32 sequences of 1,024
# tokens at a time, 16-bit arithmetic and [activation checkpointing](../docs/glossary.md#activation-recomputation), on
# one 32 GB GPU. A newsletter adds up to 32–35 GB and says that one *can barely train it*. A set of slides lists eight
# terms, 41 GB together, and says that it *cannot be trained*. Their terms go back to the
# [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)).
#
# **Your guess first.** Take it as the texts do: weights and gradients in 16 bits, one copy of the weights and Adam's
# two states in fp32, all 32 sequences at once. How much is allocated when that step is at its fullest?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("01.puzzle", unit="GB")

# %% [markdown]
# Keep it. You will look at the answer when you can defend it.

# %% [markdown]
# ## What lives when?
# Every step runs the same loop. Next to each line, what it allocates (+) and what it lets go (−):
#
# ```python
# tokens, targets = tokens.cuda(), targets.cuda()  # + inputs: two integers of 8 bytes per token
# loss = cross_entropy(model(tokens), targets) # + activations, kept for backward; the logits come and go
# loss.backward()                              # + gradients, − activations, one layer after the other
# optimizer.step()                             # + optimizer states, in the first step only; temporaries come and go
# optimizer.zero_grad()                        # − gradients
# ```
#
# (Many loops write `logits = model(tokens)` first. Then the name keeps the [logits](../docs/glossary.md#logits), one
# number for each token and word, all through backward and the next forward: one large tensor more.)
#
# Take a model of a size that you may have at home: Llama 3.2 with 1 billion parameters, four sequences of 1,024 tokens,
# autocast to [bf16](../docs/glossary.md#fp16-and-bf16), AdamW. Weights, gradients and Adam's two states are four
# numbers of 4 bytes per parameter.
#
# **Your guess.** How high does the first training step reach? And the second? And how much is still allocated when a
# step is over, after `zero_grad`?

# %%
from course_utils import TrainingRun

small = TrainingRun("llama3.2-1b", micro_batch=4, seq_len=1024)
print(f"{small.model.parameters:,} parameters, 4 · 4 bytes each: {format_bytes(16 * small.model.parameters, 'GB', 1)}")
for question in ("first_step", "second_step", "left"):
    print(question.replace("_", " "))
    predict(f"01.{question}", unit="GB")

# %% [markdown]
# Now run four steps and watch every allocation. This is the genuine step of PyTorch, operator by operator. Where no GPU
# is there, it runs on a *simulated* one: tensors that have a shape and a lifetime, but no memory behind them.

# %%
from course_utils import measure
from course_utils.figures import timeline

four_steps = measure(small, steps=4)
timeline(four_steps, "Optimizer states arrive at the end of step 1 and never leave")

# %%
peaks = four_steps.timeline.step_peaks()
for number in (1, 2, 3, 4):
    print(f"step {number}: peak {peaks[number]:,} bytes")
reveal("01.first_step", peaks[1])
reveal("01.second_step", peaks[2])

# %% [markdown]
# Read the picture from left to right. Parameters are a flat floor. In **forward** the
# [activations](../docs/glossary.md#activations) pile up, one layer on the other. In **backward** they are used and
# freed from the last layer to the first, and [gradients](../docs/glossary.md#gradients) rise in their place. The dark
# wedge is [autocast](../docs/glossary.md#autocast): it keeps a 16-bit copy of each matrix from forward to backward. In
# the **optimizer** phase of step 1, Adam makes its two states for the first time, and keeps them. Here the first step
# peaks lower than all others, and a run that survives step 1 may die in step 2.
#
# From step 2 on nothing changes any more: every later step repeats it to the byte. That is why one step is enough to
# measure.

# %% [markdown]
# ### Why is the first step lower?
# Step 1 is fullest in its optimizer phase. Then five numbers of 4 bytes exist for each parameter: the four that you
# know, and for a moment the square root of Adam's variance, which a [*foreach*
# optimizer](../docs/glossary.md#foreach-for-loop-fused) computes for all parameters at once. The batch is there, too.

# %%
from course_utils.interactive.ledgers import show_ledger

per_parameter = {"weights": 4, "gradients": 4, "momentum": 4, "variance": 4, "square roots of the variance": 4}
first = {name: size * small.model.parameters for name, size in per_parameter.items()}
first["inputs"] = 2 * 8 * small.micro_batch * small.seq_len
show_ledger(first)
print(
    f"the inputs are {first['inputs']:,} bytes; estimate − {four_steps.word} {sum(first.values()) - peaks[1]:+,} bytes"
)

# %% [markdown]
# That is 20·N and the batch. Moving the batch to the GPU costs next to nothing in memory: the tokens are small, and
# what the model makes of them is not.
#
# Some texts say that the first step is different because of *preparatory work* of the allocator. It does ask the driver
# for memory then. But does that explain what is *allocated*? Look at both steps as their backward begins.

# %%
begins = {mark.step: mark.event for mark in four_steps.timeline.marks if mark.phase == "backward"}
totals = four_steps.timeline.totals()
more = totals[begins[2] - 1] - totals[begins[1] - 1]
print(
    f"step 2 has {more:,} bytes more than step 1; momentum and variance are {first['momentum'] + first['variance']:,}"
)

# %% [markdown]
# It is Adam's states alone, to the byte: the first forward and backward run without them.

# %% [markdown]
# ### What stays after a step?
# You have guessed it already. Here is what exists at four moments.

# %%
from course_utils.figures import stack

names = ("end of step 1", "end of forward", "end of backward", "end of step 4")
stack(
    {name: four_steps.moments[name] for name in names},
    "After a step only parameters and optimizer states stay",
    provenance=str(four_steps.provenance),
)

# %%
reveal("01.left", four_steps.moments["end of step 4"].total)

# %% [markdown]
# Four lifetimes explain both pictures: *[temporary](../docs/glossary.md#temporaries)* (a part of one phase), *from
# forward to backward* (activations), *from backward to zero_grad* (gradients), *the whole training* (parameters and
# [optimizer states](../docs/glossary.md#optimizer-states)).
#
# Activations are gone at the end of *backward*, not at the optimizer step, as one sometimes reads. Gradients are gone
# after `zero_grad`, because it sets them to `None`; with `set_to_none=False` they would stay, full of zeros.
#
# On a real GPU you will not see this in `nvidia-smi`. PyTorch keeps freed memory for its next request, so the driver's
# figure hardly ever falls. The course calls that [*cached*](../docs/glossary.md#allocated-and-reserved) memory, and
# lesson 10 is about it.

# %% [markdown]
# ## Why are activations kept at all?
# One linear layer, y = x·Wᵀ. Someone hands you dL/dy, and you want dL/dW. Write it down and see what you need:
#
# **dL/dW = (dL/dy)ᵀ · x**
#
# The layer's *input* x is in it. It was there during forward; it has to be there again in backward. Check the formula
# first.

# %%
import torch

torch.manual_seed(0)
layer, x = torch.nn.Linear(64, 16, bias=False), torch.randn(4, 32, 64, requires_grad=True)
y = layer(x)
dy = torch.randn_like(y)
y.backward(dy)
by_hand = torch.einsum("bso,bsi->oi", dy, x)
print("dL/dW by hand equals autograd's:", torch.allclose(by_hand, layer.weight.grad, atol=1e-5))

# %% [markdown]
# Now ask autograd what it kept. Three operations of GPT-2 XL's width, one sequence of 1,024 tokens in bf16: a linear
# layer, a GELU, and the addition of a [residual connection](../docs/glossary.md#residual-connection).
#
# **Your guess.** How many MB do the three keep together?

# %%
s, b, h = 1024, 1, model.hidden
print(f"one tensor of s·b·h numbers in bf16: {format_bytes(2 * s * b * h, 'MB')}")
predict("01.kept", unit="MB")

# %%
from course_utils.interactive.saved import saved_by

shape = (b, s, h)
kept = {
    "linear": saved_by(torch.nn.Linear(h, h, bias=False), shape, dtype="bf16"),
    "GELU": saved_by(torch.nn.GELU(), shape, dtype="bf16"),
    "residual addition": saved_by(torch.add, shape, shape, dtype="bf16"),
}
measured = {name: sum(item.bytes for item in items) for name, items in kept.items()}
show_ledger({"linear": 2 * s * b * h, "GELU": 2 * s * b * h, "residual addition": 0}, measured)

# %%
reveal("01.kept", sum(measured.values()), unit="MB")

# %% [markdown]
# A linear layer keeps its input. GELU keeps its input too, since its slope depends on it. An addition keeps nothing:
# the gradient of a + b is 1, whatever a and b were. **Activations are not "the outputs of the layers": they are what
# some backward will ask for.** Lesson 05 goes through a whole [transformer
# block](../docs/glossary.md#transformer-block) like this.

# %% [markdown]
# ## How much do the states take?
# Back to GPT-2 XL. Mixed-precision Adam, as the ZeRO paper counts it (Rajbhandari et al. 2020, section 3.1), keeps
# weights and gradients in 16-bit, and a [*master copy*](../docs/glossary.md#master-weights) of the weights in fp32
# besides its [momentum](../docs/glossary.md#momentum) and variance.
#
# **Your guess.** How many GB is that for 1.56 billion parameters, before any activation?

# %%
predict("01.states", unit="GB")

# %%
from course_utils.estimating.published import zero_state_bytes

states = zero_state_bytes(N)
show_ledger(states)
reveal("01.states", sum(states.values()))
print(f"per parameter: {sum(states.values()) / N:g} bytes")

# %% [markdown]
# ### Measure
# You may know the rule "16 GB per billion parameters". Here it is, and it counts no more than these five tensors: no
# activations, no loss, no temporaries, and no other optimizer.
#
# That is a formula. Does a real step agree? Run it: b = 32, s = 1,024, every block recomputed in backward ("activation
# checkpointing", `recompute="full"`). At the end of backward, weights, gradients and states are all there, and nothing
# else.

# %%
from math import prod

from course_utils.models import parameter_shapes

puzzle = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master", optimizer="adamw-foreach", recompute="full")
step = measure(puzzle)
end_of_backward = step.moments["end of backward"]
claimed = {"parameters": 2 * N, "gradients": 2 * N, "optimizer_states": 12 * N}
show_ledger(claimed, {kind: end_of_backward[kind] for kind in claimed}, columns=("estimate", step.word))
print(step.provenance)

sizes = [2 * prod(shape) for shape in parameter_shapes(model).values()]
print(f"{sum(size % 512 > 0 for size in sizes)} of {len(sizes)} weight tensors are no multiple of 512 bytes")

# %% [markdown]
# **The gap.** 16 bytes per parameter it is. The last column is rounding. PyTorch's [caching
# allocator](../docs/glossary.md#caching-allocator) hands out multiples of 512 bytes, so it rounds up a tensor that is
# no such multiple: here most vectors, once for each of their five numbers. The slides' 24 GB are these 24.9 GB, with
# 1.5 billion parameters instead of the exact number.

# %% [markdown]
# ## Sixty gigabytes of activations?
# For the activations, ZeRO offers 12 · h · b · s · L elements (section 3.2), 2 bytes each. It is a formula for *all*
# activations, without checkpointing.
#
# **Your guess.** How many GB does a real step with flash attention keep at the end of its forward pass?

# %%
from course_utils.estimating.published import korthikanti_activation_bytes, zero_activation_bytes

keep_all = puzzle.replace(recompute="none", optimizer="adamw")
print(f"ZeRO's formula: {format_bytes(zero_activation_bytes(keep_all), 'GB', 1)}")
predict("01.activations", unit="GB")

# %%
from course_utils.figures import bars

flash = measure(keep_all).moments["end of forward"]["activations"]
eager = measure(keep_all.replace(attention="eager")).moments["end of forward"]["activations"]
found = {
    "ZeRO: 12·h·b·s·L": zero_activation_bytes(keep_all),
    f"{step.word}, flash attention": flash,
    "Korthikanti: 34 + 5·a·s/h": korthikanti_activation_bytes(keep_all),
    f"{step.word}, eager attention": eager,
}
title = "The kernel of attention decides, and ZeRO's 60 GB is neither"
bars(found, title, kind="activations", provenance=str(step.provenance))

# %%
reveal("01.activations", flash)
per_block = keep_all.seq_len * keep_all.micro_batch * model.hidden * model.layers
for name, size in found.items():
    print(f"{name:27s} {size / per_block:7.2f} bytes · s·b·h in each block")

# %% [markdown]
# **The gap**, term by term. In units of s·b·h bytes a block, ZeRO counts 24. A real block keeps 34 ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), eq. 1), a few statistics besides, and something lies outside the blocks.

# %%
b, L = keep_all.micro_batch, model.layers
block, token = s * b * h * L, s * b
terms = {
    "inputs of four linear layers": 14 * block,
    "queries, keys, values": 6 * block,
    "GELU's input": 8 * block,
    "dropout masks": 2 * block,
    "inputs of two norms": 4 * block,
    "flash: one fp32 number a row": 4 * token * model.heads * L,
    "the norms' statistics": 8 * token * (2 * L + 1),
    "outside the blocks": 5 * token * h,
}
show_ledger(terms)
print(f"estimate − {step.word}: {sum(terms.values()) - flash:+,} bytes")

# %% [markdown]
# The first five make 34. What is left of 86 GB is the state of the random numbers and the indices of positions. *Eager*
# attention, written out in PyTorch's own operators, keeps 5·a·s/h more for its s×s matrices, which a flash kernel never
# writes. Lesson 05 derives every line of this table.

# %% [markdown]
# ## With checkpointing: "about 8 GB"
# Both texts say that checkpointing leaves about 8 GB. ZeRO says why: *the square root of the total*. What we ran keeps
# one checkpoint a block, its input of s·b·h numbers, and nothing else of the blocks.
#
# **Your guess.** How much do these checkpoints take together?

# %%
predict("01.checkpoints", unit="GB")

# %%
from course_utils.estimating.published import checkpoints_bytes, zero_checkpointed_bytes

formula = {
    "one checkpoint a block: 2·s·b·h·L": checkpoints_bytes(puzzle),
    "log-softmax of the logits: 2·s·b·V": 2 * token * model.vocab,
    "outside the blocks: 5·s·b·h": 5 * token * h,
    "the last norm's statistics": 8 * token,
}
show_ledger(formula)
reveal("01.checkpoints", checkpoints_bytes(puzzle))

# %%
after_loss = step.moments["after loss"]["activations"]
print(f"{step.word}, when the loss is computed: {format_bytes(after_loss, 'GB', 2)} ({step.provenance})")
print(f"estimate − {step.word}: {sum(formula.values()) - after_loss:+,} bytes (position indices, the loss itself)")
print(f"ZeRO's rule, its total over √L: {format_bytes(zero_checkpointed_bytes(puzzle), 'GB', 2)}")

# %% [markdown]
# About 8 GB is right, and for the wrong reason. Checkpoints alone are 5 GB. The rest is not in any block: it is one
# tensor of s·b·V numbers that the *loss* keeps, one for each word of the vocabulary and each token. Nothing about it is
# a square root.

# %% [markdown]
# ### Is most of the memory states?
# Texts after ZeRO say that for large models most memory is model states. States never change with the batch;
# activations are proportional to its tokens. So there is a number of tokens at which both are equal.

# %%
from course_utils.estimating import moments

for name in ("gpt2", "gpt2-xl", "llama3-8b", "gpt3-175b"):
    one = TrainingRun(name, micro_batch=1, seq_len=1024, precision="bf16-master")
    kept = {how: moments(one.replace(recompute=how))["after loss"]["activations"] for how in ("none", "full")}
    all_kept, recomputed = (16 * one.model.parameters * one.seq_len / size for size in kept.values())
    print(f"{name:10s} states = activations at {all_kept:7,.0f} tokens; recomputed at {recomputed:9,.0f}")

# %% [markdown]
# The puzzle has 32 · 1,024 tokens on the GPU at once. With everything kept, that is far beyond GPT-2 XL's number: most
# of its memory is activations. With recomputation the claim is right. A larger model has a larger number, so the claim
# holds for it as long as few tokens are on one GPU. Eager attention lowers the first number of each.

# %% [markdown]
# ## The stack of 41 GB
# The slides list eight terms: 3 + 3 + 6 + 6 + 6 + 8 + 6 + 3. You have met the first six. The seventh is a *flat fp32
# buffer* for all gradients; the eighth is fragmentation. Each is real. But do they ever exist at the same time?
#
# Look at the fullest moment of each phase of the step that ran. It upcasts all gradients at once in its optimizer
# phase, as is common, so it does make that buffer.

# %%
GB = 10**9
slides = {
    "parameters": 3 * GB, "gradients": 3 * GB, "optimizer_states": 18 * GB,
    "activations": 8 * GB, "temporaries": 6 * GB, "cached": 3 * GB,
}  # fmt: skip
phases = ("forward", "loss", "backward", "optimizer")
rows = {"the slides' sum": slides} | {f"peak of {name}": step.phase_peaks[name] for name in phases}
on_paper, in_truth = format_bytes(sum(slides.values()), "GB", 0), format_bytes(step.peak, "GB", 0)
title = f"Activations never meet the fp32 buffer: {on_paper} on paper, {in_truth} in the step"
stack(rows, title, capacity=card, provenance=str(step.provenance))

# %% [markdown]
# Now the eight terms, one by one, next to the most that exists of each at any moment. (Adam's three fp32 tensors are of
# one size.)

# %%
most = {kind: max(curve) for kind, curve in step.timeline.curves().items()}
state = most["optimizer_states"] // 3
eight = {"fp16 parameters": 3, "fp16 gradients": 3, "fp32 parameters": 6, "fp32 momentum": 6,
         "fp32 variance": 6, "activations": 8, "flat fp32 buffer": 6, "fragmentation": 3}  # fmt: skip
seen = {
    "fp16 parameters": most["parameters"], "fp16 gradients": most["gradients"], "fp32 parameters": state,
    "fp32 momentum": state, "fp32 variance": state, "activations": most["activations"],
    "flat fp32 buffer": step.phase_peaks["optimizer"]["temporaries"],
}  # fmt: skip
show_ledger({name: size * GB for name, size in eight.items()}, seen, columns=("slides", step.word))

# %% [markdown]
# Six of the terms are close. The buffer is twice as large: next to the fp32 gradients there are the square roots of a
# foreach optimizer, of the same size. And the sum in the last line is far more than any moment of the step, because *a
# [peak](../docs/glossary.md#peak) is the largest sum of what is alive at once, not the sum of the largest*. When
# backward begins, activations are complete and not one gradient exists. When the optimizer runs, gradients are complete
# and no activation is left. What, then, fills the fullest moment?

# %%
for item in step.largest(3):
    print(f"{format_bytes(item.bytes, 'GB', 2)}  {item.kind:12s} {item.dtype} {item.shape} from {item.operation}")

# %% [markdown]
# The loss. Three tensors of s·b·V numbers at once: [log-softmax](../docs/glossary.md#log-softmax), which is in the 8
# GB, and two gradients on the way to the logits, which the slides lack. They have 2 bytes a number here, as in nanoGPT.
# Where the code copies the logits to fp32 first, as Llama's own and transformers do, they have 4 (lesson 05).
#
# [Fragmentation](../docs/glossary.md#fragmentation) is not in our figure: the simulation has the allocator's rounding,
# but not its blocks. Lesson 10 gives it those.

# %% [markdown]
# ## Who is right about 32 GB?
# Now defend your first guess.

# %%
reveal("01.puzzle", step.peak)
print(step.summary())

# %% [markdown]
# That does not fit the card. But look again at the phases above: two of them cross the card's line. In *backward* it is
# the loss's three tensors for all tokens, in the *optimizer* phase the fp32 buffers for all gradients. Neither text
# says how it computes the loss or steps its optimizer. So three changes are open to you:
#
# * *One gradient at a time*: the optimizer upcasts one gradient, updates its weight, and goes on to the next.
# * *[Micro-batches](../docs/glossary.md#micro-batch-and-global-batch)*: 8 of 4 sequences, their gradients added up,
#   then one step. It is the same global batch, and but for dropout's random masks and rounding the same gradient
#   (lesson 07).
# * *The loss in chunks*: logits and loss for an eighth of the tokens at a time, so that no tensor of s·b·V numbers ever
#   exists. It is called a [chunked loss](../docs/glossary.md#chunked-loss); lesson 05 writes one.
#
# Which of them do you need?

# %%
from course_utils import estimate

together = puzzle.replace(micro_batch=4, accumulation_steps=8)
choices = {
    "autocast": puzzle.replace(precision="amp-bf16", optimizer="adamw"),
    "the puzzle": puzzle,
    "8 micro-batches of 4": together,
    "…, upcast one by one": together.replace(optimizer="adamw"),
    "32 at once, upcast one by one, loss in 8 chunks": puzzle.replace(optimizer="adamw", loss_chunks=8),
}
ran = {name: measure(run) for name, run in choices.items()}
title = "The recipe decides: even 32 at once fit, with loss and optimizer in pieces"
stack(ran, title, capacity=card, provenance=str(step.provenance))

# %% [markdown]
# What of one change alone, and of a chunked loss under autocast? Estimates are enough, against what a program gets of
# the card.

# %%
from course_utils.units import format_signed

others = {"upcast one by one": puzzle.replace(optimizer="adamw"), "loss in 8 chunks": puzzle.replace(loss_chunks=8)} | {
    f"autocast, loss in {chunks} chunks": choices["autocast"].replace(loss_chunks=chunks) for chunks in (8, 16, 32)
}
for name, run in others.items():
    total = estimate(run).total
    print(f"{name:27s} {format_bytes(total, 'GB', 2)}, room left: {format_signed(card.room - total)}")

# %% [markdown]
# One change alone is not enough: it lowers one of the two peaks, and the other remains. The first one together with
# either of the others is, with gigabytes to spare. Autocast needs more chunks, because its weights and gradients are
# fp32.
#
# Where a few hundred MB decide, no estimate does. Before the first tensor, CUDA takes its
# [context](../docs/glossary.md#context-cuda) from what a program gets: about 300 MB, says [a PyTorch
# developer](https://github.com/pytorch/pytorch/issues/107667). No estimate here contains it. So the card itself must
# decide about autocast in 16 or 32 chunks. And the row that misses the figure's line by 0.1 GB really misses by more.
#
# So **the recipe decides**, and both texts leave it open. The slides' verdict holds with the loss over all 32 sequences
# at once. The newsletter's 32–35 GB is what remains when the loss is cut and all gradients are still upcast together.
# Cut both, and GPT-2 XL trains on this card. (ZeRO's own card, a V100, is as large; it computes in fp16 and has no
# flash kernel.)
#
# And without PyTorch? The course estimates these steps in two ways. The *closed form* is arithmetic that you can follow
# with a pencil: [formula.py](../course_utils/estimating/formula.py) is one file. The *exact engine* goes through the
# step tensor by tensor, in a model of PyTorch's autograd. `estimate(run)` is exact unless you ask for the formula.

# %%
for name, run in choices.items():
    closed, exact, truth = estimate(run, method="formula"), estimate(run), ran[name].peak
    print(f"{name:47s} closed form {format_bytes(closed.total, 'GB', 3)} ({closed.total / truth - 1:+.3%}), "
          f"exact engine − {step.word}: {exact.total - truth:+,} bytes, in {exact.label}")  # fmt: skip

# %% [markdown]
# The exact engine and the simulation share the description of the model and the 512-byte rule, and nothing else: one
# adds up named tensors, the other counts what PyTorch allocates. Here is one run, kind by kind.

# %%
from course_utils.figures import compare_bars

compare_bars(
    estimate(choices["autocast"]), ran["autocast"], "Under autocast: the estimate names every byte of the peak"
)

# %% [markdown]
# Does that hold for other choices? Here are both precisions and both kernels, with and without recomputation,
# estimated. Three of these steps have run above: their peaks are next to the estimates.

# %%
from itertools import product

ran_before = (keep_all, keep_all.replace(attention="eager"), choices["autocast"])
known = {run: measure(run).peak for run in ran_before}
for precision, attention, recompute in product(("amp-bf16", "bf16-master"), ("flash", "eager"), ("none", "full")):
    run = TrainingRun("gpt2-xl", 32, 1024, precision, attention=attention, recompute=recompute)
    guess, truth = estimate(run).total, known.get(run)
    beside = f"{step.word} {format_bytes(truth, 'GB', 3)}: {guess / truth - 1:+.3%}" if truth else ""
    print(f"{precision:12s} {attention:6s} {recompute:5s} {format_bytes(guess, 'GB', 3):>11s} {beside}")

# %% [markdown]
# With full recomputation the kernel hardly matters; without it, [eager attention](../docs/glossary.md#eager-attention)
# triples the step. To measure one of those too, ask in a terminal: `python3 -m course_utils compare gpt2-xl
# --micro-batch 32 --attention eager`.
#
# No gap is left, and that needs a caution. The exact engine was worked out until it named every tensor of this
# simulation, so a gap of 0 says that we understand *it*. A card counts more than tensors: `compare` has two rows for
# that, the *allocator's counter* and *reserved*, which [lesson 10](10_allocator_and_fragmentation.ipynb) explains. Does
# the simulation say what a card says? Somebody trained a model of 3.4 billion parameters on an H800 and published what
# its counter had said. The same step, simulated before it was compared:

# %%
from course_utils.benchmark.published import published_rows

row = next(row for row in published_rows() if row.id == "cs336-shibuki-2.7b-bf16-train-step-ctx512")
print(f"an H800, torch {row.torch[0]}.{row.torch[1]}, counted: {row.printed} = {format_bytes(row.bytes, 'GB', 2)}")
print(f"sum of tensors, simulated:    {format_bytes(row.said.tensors, 'GB', 2)}")
print(f"allocator's counter, by rule: {format_bytes(row.said.allocated, 'GB', 2)}, "
      f"{row.said.allocated / row.bytes - 1:+.3%} from the card's")  # fmt: skip

# %% [markdown]
# [Lesson 13](13_who_is_right.ipynb) has many more of them. Your own card speaks by `compare(run, source="live")`.

# %% [markdown]
# ## One layer more
# "One more layer costs gigabytes", says the newsletter. **Your guess.** GPT-2 XL with 49 layers in place of 48, nothing
# recomputed, flash attention, 32 sequences: how much higher is the peak?

# %%
predict("01.layer", unit="GB")

# %%
from dataclasses import replace

from course_utils.lessons.one_step.widget import layer_slider

deeper = replace(model, layers=L + 1)
added = {how: estimate(run.replace(model=deeper)).total - estimate(run).total
         for how, run in {"none": keep_all, "full": keep_all.replace(recompute="full")}.items()}  # fmt: skip
for how, size in added.items():
    print(f"one layer more, recompute={how!r}: {format_bytes(size, 'GB', 2)}, estimated")
reveal("01.layer", added["none"])
layer_slider(keep_all)

# %% [markdown]
# These are estimates: nothing ran with 49 layers. You may trust them as far as the same formulas met the simulated
# peaks of 48 layers above.
#
# Gigabytes it is, as long as all is kept: a layer's activations are several times its states. But both texts recompute,
# and then a layer leaves its checkpoint alone and costs half a gigabyte, most of it states. Move the slider: what a
# layer adds does not depend on how many there are. With eager attention, what becomes of it?

# %% [markdown]
# ## On your own card
# `twin` shrinks the micro-batch until the run fits a card, and if that is not enough, the model. For a card older than
# Ampere it also takes fp16 under autocast and the efficient kernel, which such a card has. If this machine has a GPU,
# the next cell runs there, live; if not, a 16 GB card stands in and is simulated. Its first line says what became of
# the run, its last where it ran.

# %%
from course_utils import card_here, compare, twin

compare(twin(keep_all, card_here()))

# %% [markdown]
# ## Turn the knobs
# Every control changes the run, and the picture with it. Keep GPT-2 XL and Adam: find two ways below the card's line.
# Which kinds of memory never change with micro-batch, sequence or recomputation?
#
# <details><summary>An answer</summary>
#
# Fewer sequences at once, or shorter ones: at a micro-batch of 16 it fits, and at 32 sequences of 512 tokens, too. The
# parameters and the optimizer states never change; they depend on the model and the precision alone.
#
# </details>

# %%
from course_utils.interactive.widgets import explorer

explorer("gpt2-xl", gpu="RTX5090-32GB", micro_batch=32, precision="bf16-master", recompute="full")

# %% [markdown]
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it; a question counts for your score if you get it at the first try. A pocket calculator helps.

# %%
from course_utils.lessons import quiz

quiz(1)

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | eight terms, 41 GB together (slides) | activations and the fp32 buffer are never alive at once |
# | cannot be trained on 32 GB (slides) | with the loss over the whole batch; in chunks, upcast one by one, it fits |
# | 32–35 GB is needed (newsletter) | with the loss cut and all gradients upcast at once; one by one it is far less |
# | 12·h·b·s·L elements of activations (ZeRO) | a block keeps 34 bytes · s·b·h, with flash attention, not 24 |
# | checkpointing leaves the square root (ZeRO) | it leaves one checkpoint a block, and the loss's own tensor |
# | most memory is model states (ZeRO) | up to a number of tokens; beyond it activations outweigh them |
# | the first step differs by preparatory work | it differs by Adam's states, to the byte |
# | one more layer costs gigabytes (newsletter) | two and more if all is kept; half of one with recomputation |
# | activations are kept until the optimizer step | each is freed in backward, as soon as it has been used |
#
# ## Take home
# **Remember** A peak is the largest sum of what is alive at once: states stay, activations and gradients take turns.
#
# **Breaks when** you size a run by its first step: Adam's states arrive at the end of it, and step 2 runs out of
# memory.
#
# **Cheat-sheet line** states 16·N bytes (Adam: fp32, autocast, or 16-bit with fp32 masters) · activations in 16-bit,
# with dropout: 34·s·b·h·L, eager + 5·a·s²·b·L, more under autocast · loss: 3 tensors of s·b·V, 2 bytes each
# (fp32 logits: 4).
#
# **In your own script** `python3 -m course_utils watch train.py` gives this account of a training script as it is, with
# a GPU or without ([lesson 14](14_will_it_fit.ipynb)).
#
# Now solve the [exercises of this lesson](../exercises/01_where_did_the_memory_go.ipynb).
