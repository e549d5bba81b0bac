# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 90
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · Gradient accumulation
#
# **75 minutes.** You should know what lives when in a training step ([lesson
# 01](01_where_did_the_memory_go.ipynb)) and what an optimizer does with a gradient ([lesson 02](02_adam.ipynb)). No GPU
# is needed: where a measurement is simulated, it says so.
#
# Activations grow with the batch. So cut the batch into pieces that fit, and add up their gradients before you step:
# [gradient accumulation](../docs/glossary.md#gradient-accumulation). It is ten lines of Python, and there are four
# well-known ways to get them wrong, none of which raises an error. Then: how large should a batch be, and what has to
# change when it grows?

# %% [markdown]
# ## Three sizes
# A [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is what goes through the network at once. Several
# of them make the *global batch*, which one optimizer step learns from. And since sequences differ in length, large
# runs count the global batch in tokens.

# %%
from course_utils import TrainingRun, estimate, format_bytes, gpu, measure
from course_utils.interactive.guesses import predict, reveal

run = TrainingRun("gpt2", micro_batch=4, seq_len=1024, accumulation_steps=25)
print(f"{run.accumulation_steps} micro-batches of {run.micro_batch} sequences: a batch of {run.global_batch}")
print(f"{run.global_batch} sequences of {run.seq_len:,} tokens: {run.global_batch * run.seq_len:,} tokens a step")

# %% [markdown]
# **Your guess.** A lecture has batches of 400 sequences, with 1,024 tokens each. How many *thousand* tokens are in one
# batch?

# %%
predict("07.tokens", unit="thousand tokens")

# %%
tokens = 400 * 1024
print(f"400 sequences · 1,024 = {tokens:,} tokens")
reveal("07.tokens", tokens / 1000, unit="thousand tokens")

# %% [markdown]
# **The gap** is in the lecture, which says "about 4 million". That is ten times too many. Check such products: the
# size of a batch decides how many steps a training has.

# %% [markdown]
# ## Gradients add
# `backward()` does not replace what is in `.grad`. It *adds* to it, so the summing costs no extra line. And the loss of
# a batch is a mean over its sequences.
#
# **Your guess.** Call `backward()` on the mean loss of each of 25 micro-batches of 4, and do nothing else. How many
# times as long as the gradient of all 100 sequences is `.grad` now?

# %%
predict("07.factor", unit="times")

# %% [markdown]
# Try it on a real model, a small GPT over characters, with random weights:

# %%
from course_utils.lessons.accumulation.micro_batches import gradient, gradient_of, joined, mean_loss
from course_utils.lessons.accumulation.micro_batches import micro_batches, relative_distance
from course_utils.lessons.shared.language_model import language_model

model, parts = language_model(), micro_batches(count=25, size=4)
large = gradient_of(mean_loss(model, joined(parts)), model)  # all 100 sequences at once

model.zero_grad()
for part in parts:
    (mean_loss(model, part) / 25).backward()
divided = gradient(model)

model.zero_grad()
for part in parts:
    mean_loss(model, part).backward()
undivided = gradient(model)

# %%
print(f"{len(large):,} numbers in the gradient of {len(parts[0][0]) * len(parts)} sequences")
print("divided by 25, off by less than a millionth:", relative_distance(divided, large) < 1e-6)
factor = (undivided.norm() / large.norm()).item()
print(f"not divided: {factor:.2f} times as long")
reveal("07.factor", round(factor, 3), unit="times")

# %% [markdown]
# A sum of 25 means is 25 times the mean of all 100. So divide each loss by 25 before its `backward()`: that division is
# your job.
#
# **The gap** between the accumulated gradient and that of the large batch is rounding: fp32 adds the same numbers in
# another order. For everything that follows, 25 micro-batches of 4 *are* a batch of 100. (One kind of layer breaks
# this: batch norm, which looks at all examples of a micro-batch together. Transformers have none.)

# %% [markdown]
# ## The common loop
# This loop, or one like it, is in many tutorials. It has two bugs.

# %%
from course_utils.lessons.accumulation.micro_batches import moved


def common_loop(model, optimizer, parts, k):
    for i, part in enumerate(parts):
        loss = mean_loss(model, part)
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()


# %% [markdown]
# **Your guess.** One epoch has 10 micro-batches, and k = 4. How many of the 10 does the optimizer never see in that
# epoch?

# %%
predict("07.dropped", unit="micro-batches")

# %%
seen = [i + 1 for i in range(10) if (i + 1) % 4 == 0]
print(f"steps after micro-batches {seen}: the last {10 - seen[-1]} are left over")
reveal("07.dropped", 10 - seen[-1], unit="micro-batches")

# %% [markdown]
# **The gap.** The first bug you have just met: nobody divides. The second: nobody steps on an incomplete group. It is
# even worse than dropping data, for nobody clears its gradients either. They wait in `.grad` and mix with the first
# group of the next epoch. A loop that is right works group by group:


# %%
def right_loop(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        group = parts[first : first + k]  # the last one may be shorter
        optimizer.zero_grad()
        for part in group:
            (mean_loss(model, part) / len(group)).backward()
        optimizer.step()


# %%
import torch

from course_utils.lessons.accumulation.micro_batches import large_batch

ten = micro_batches(count=10)
reference = moved(large_batch, ten, k=4)
for name, loop in {"common": common_loop, "right": right_loop}.items():
    off = relative_distance(moved(loop, ten, k=4), reference)
    print(f"{name} loop: {off:.0%} away from where the large batches lead")

model = language_model()
common_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), ten, k=4)
print(f"left in .grad when the epoch is over: a gradient of length {gradient(model).norm():.1f}")

# %% [markdown]
# With fewer than k micro-batches in the last group, divide by *their* number. Dividing by k is a mistake of its own:
# those sequences then count less than all others.

# %% [markdown]
# ## Lengths differ
# Now each sequence ends somewhere, and the rest is padding, which the loss leaves out. The mean loss of a micro-batch
# is a mean over its *real* tokens. **Your guess.** One micro-batch of 4 sequences has 16 real tokens, another has 128.
# You average their two mean losses. How many times as much does a token of the short one count?

# %%
predict("07.weight", unit="times")

# %%
from course_utils.lessons.accumulation.micro_batches import counted_tokens, uneven

padded = uneven(count=10)
counts = [counted_tokens(part) for part in padded]
print("real tokens in each micro-batch:", counts)
print(f"a token counts 1/{min(counts)} of its micro-batch's mean, or 1/{max(counts)}")
reveal("07.weight", max(counts) / min(counts), unit="times")

# %% [markdown]
# **The gap.** The large batch is a mean over *all* its tokens. To get that, weigh each micro-batch's mean by its share
# of tokens: loss · (its tokens / tokens of the group). That takes one look at the whole group before its first
# backward. The widely used `transformers` library averaged over micro-batches until October 2024 ([its own
# report](https://huggingface.co/blog/gradient_accumulation)).
#
# ## Four mistakes, side by side
# None of them raises an error. So compare with what they should be equal to. Here is how far one pass over ten padded
# micro-batches, k = 4, ends from where the large batches end, in parts of the way that those go.

# %%
from course_utils.lessons.accumulation.micro_batches import distances
from course_utils.figures import bars

sgd = distances(padded, k=4)
shown = {name: round(100 * off) for name, off in sgd.items()}
bars(shown, "Each mistake ends elsewhere; only weights by tokens reach the large batch's place", unit="%", digits=0,
     provenance="SGD, one pass, the small GPT really trained on the CPU")  # fmt: skip

# %% [markdown]
# **The gap** of the right loop is rounding. "Averaged over batches" is the right loop of the last section, which was
# right as long as all lengths were equal. And a mistake may hide: Adam divides each gradient by its own size, so a
# constant factor cancels.

# %%
equal = micro_batches(count=8)
adam, plain = distances(equal, k=4, optimizer="adam"), distances(equal, k=4)
for name in ("not divided", "a step on each"):
    print(f"{name:15s} SGD {plain[name]:5.0%} off, Adam {adam[name]:4.0%} off")
print(f"length of the gradient of 100 sequences: {large.norm():.1f}; undivided {undivided.norm():.0f}")

# %% [markdown]
# Undivided losses hardly show under Adam. They come back as soon as something looks at the gradient's length:
# [clipping](../docs/glossary.md#gradient-clipping) at a length of 10 would leave the first of these two alone, and
# shorten the second.

# %% [markdown]
# ## The path of θ
# Why is a step on each micro-batch not the same as one step on all? Fit a line to 100 points: two parameters, so you
# can see where they go. On the left 8 steps, each on all 100 points; as 25 micro-batches of 4 it is the same path.
# **Your guess.** In the middle there is a step after each 4 points, at the same rate, for 8 passes. How many steps is
# that?

# %%
predict("07.steps", unit="steps")

# %%
from course_utils.lessons.accumulation.micro_batches import LineFit, path
from course_utils.lessons.accumulation.figures import theta_paths

fit, rate = LineFit(), 0.5
together = path(fit, rate, size=100, passes=8)
added_up = path(fit, rate, size=4, passes=8, group=25)
paths = {
    "a step on all 100, or on 25 × 4": together,
    "a step on each 4, same rate": path(fit, rate, size=4, passes=8),
    "a step on each 4, rate / 25": path(fit, rate / 25, size=4, passes=8),
}
theta_paths(fit, paths, "Small steps at the same rate wander; at a 25th of the rate they follow the large batch")

# %%
off = max(abs(a - b) for one, other in zip(together, added_up, strict=True) for a, b in zip(one, other, strict=True))
print(f"25 × 4 accumulated, same path to 12 decimals: {off < 1e-12}")
reveal("07.steps", len(paths["a step on each 4, same rate"]) - 1, unit="steps")

# %% [markdown]
# **The gap.** At the same rate, many small steps get to the minimum sooner, and then jump around it for ever, because
# each sees 4 points only. With a 25th of the rate, 25 steps go about as far as one large one: as long as the gradient
# hardly changes on the way, 25 steps of η/25 add up the same gradients. Remember this picture: read from right to left,
# it is the [linear scaling rule](../docs/glossary.md#linear-scaling-rule) below.
#
# Now try it yourself: which sizes walk the large batch's path at its own rate, whatever fits into memory? And which
# rate does a step on every single point need?

# %%
from course_utils.lessons.accumulation.widget import theta_explorer

theta_explorer(size=4, group=1)

# %% [markdown]
# <details><summary>An answer</summary>
#
# Every pair that makes 100: 1 · 100, 4 · 25, 50 · 2 walk the same path, and only the micro-batch is in memory. A step
# on every single point needs a hundredth of the rate, 0.005.
#
# </details>
#
# ## What adds up?
# `.grad` has a number format, and it now adds up many small numbers. In [lesson 03](03_mixed_precision.ipynb)
# [bf16](../docs/glossary.md#fp16-and-bf16) lost small updates to large weights. The same happens here: a sum of k
# gradients, and one more that is k times smaller. Compare an accumulator in fp32 with one in bf16, both against fp64.

# %%
from course_utils.lessons.accumulation.micro_batches import accumulator_errors
from course_utils.figures import lines

counts = [1, 2, 4, 8, 16, 32, 64, 128, 256]
errors = {name: accumulator_errors(counts, kind) for name, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
series = {name: (counts[1:], [float(f"{100 * error:.1g}") for error in found[1:]]) for name, found in errors.items()}
lines(series, "A bf16 accumulator gets worse the more it adds up; an fp32 one stays exact enough",
      "micro-batches added up", "error of the gradient, %", log_x=True, log_y=True,
      provenance="gradients of the small GPT, traced on the CPU")  # fmt: skip

# %%
first, last = errors["bf16"][0], errors["bf16"][-1]
print(f"bf16: {first:.2%} off after one micro-batch, {last:.1%} after {counts[-1]}")
print("fp32: below a millionth throughout:", max(errors["fp32"]) < 1e-6)

# %% [markdown]
# That is what the recipe `bf16-master-fp32grad` is for: gradients in fp32, two bytes more per parameter, and sums that
# hold. Remember it for the puzzle below.

# %% [markdown]
# ## What it saves
# GPT-2, 100 sequences of 1,024 tokens per step. **Your guess.** The next cell prints what all 100 at once take. How
# many GB do 25 micro-batches of 4 take at the peak?

# %%
whole = TrainingRun("gpt2", micro_batch=100, seq_len=1024)
print(f"100 at once: {format_bytes(estimate(whole).total, 'GB', 1)} at the peak (estimated)")
predict("07.memory", unit="GB")

# %%
sizes = [b for b in range(1, 101) if 100 % b == 0]
by_size = {b: whole.replace(micro_batch=b, accumulation_steps=100 // b) for b in sizes}
peaks = {b: estimate(one) for b, one in by_size.items()}
found = {b: measure(by_size[b]) for b in (1, 4, 20, 100)}
word = " or ".join(sorted({one.word for one in found.values()}))
lines(
    {
        "estimated": ([100 // b for b in sizes], [peaks[b].total / 1e9 for b in sizes]),
        word: ([100 // b for b in found], [one.peak / 1e9 for one in found.values()]),
    },
    f"The same batch of 100, from a peak of {format_bytes(peaks[100].total, 'GB', 1)} down to "
    f"{format_bytes(peaks[1].total, 'GB', 1)}",
    "micro-batches that the batch is cut into", "peak, GB", log_x=True, log_y=True,
    level=("usable on a T4", gpu("T4-16GB").room / 1e9), circles=[word],
    provenance=str(found[100].provenance),
)  # fmt: skip

# %%
reveal("07.memory", found[4].peak)
for b, one in found.items():
    gap = peaks[b].total - one.peak
    print(f"{100 // b:3d} × {b:3d}: {format_bytes(one.peak, 'GB', 2)}, estimate − {one.word} {gap:+,} bytes")

# %% [markdown]
# **The gap** between estimate and simulation is nothing. (With a GPU, the same cell measures on the card itself what
# fits it.) But is the peak "one micro-batch's", as people say? Compare 25 micro-batches of 4 with a step on 4
# sequences alone.

# %%
from course_utils.figures import stack

alone = measure(whole.replace(micro_batch=4))
title = "Accumulation costs gradients that stay: they are there while the next micro-batch runs"
stack({"4 sequences, one step": alone, "25 × 4": found[4]}, title, provenance=str(alone.provenance))

# %%
extra = found[4].peak - alone.peak
print(f"25 × 4 takes {format_bytes(extra, 'MB', 0)} more than 4 alone")
print(f"all gradients, fp32: {format_bytes(4 * whole.model.parameters, 'MB', 0)}")
two = estimate(whole.replace(micro_batch=4, accumulation_steps=2)).total
print(f"2 × 4 minus 25 × 4: {two - peaks[4].total} bytes")

# %% [markdown]
# With one micro-batch, activations disappear as gradients appear. From the second on, old gradients already wait while
# new activations pile up. A third or a hundredth adds nothing. The arithmetic is the same as for the large batch, so
# accumulation is free in [FLOPs](../docs/glossary.md#flops). In time it costs what small matrices cost a GPU: it is
# less busy. Choose the largest micro-batch that fits. How much less busy, only a GPU can say:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("accumulation")

# %% [markdown]
# And the puzzle of lesson 01, GPT-2 XL with 32 sequences? Cut it as well. One recipe adds up its gradients in bf16, the
# other in fp32, as the figure above advises. Both keep [master weights](../docs/glossary.md#master-weights).

# %%
recipes = ("bf16-master", "bf16-master-fp32grad")
xl = {name: TrainingRun("gpt2-xl", 32, 1024, precision=name, recompute="full") for name in recipes}
cuts = {
    k: [estimate(run.replace(micro_batch=32 // k, accumulation_steps=k)).total for run in xl.values()]
    for k in (1, 2, 4, 8, 16, 32)
}
print("cut          " + "   ".join(recipes))
for k, totals in cuts.items():
    low, high = (format_bytes(total, "GB", 1) for total in totals)
    print(f"{k:2d} × {32 // k:2d}      {low:>11}   {high:>20}")

# %%
N = xl["bf16-master"].model.parameters
print(f"states: {format_bytes(16 * N, 'GB', 1)} at 16 bytes per parameter, {format_bytes(18 * N, 'GB', 1)} at 18")
print(f"eight gradients added up in bf16: {errors['bf16'][counts.index(8)]:.2%} off")
for card in ("RTX5090-32GB", "RTX3090-24GB", "RTX4090-24GB", "L4-24GB"):
    left = [(gpu(card).room - total) / 1e9 for total in (*cuts[8], cuts[32][0])]
    print(f"{card:12s} left, GB: 8 × 4 {left[0]:+5.2f}, fp32 gradients {left[1]:+5.2f}; 32 × 1, bf16 {left[2]:+5.2f}")

# %% [markdown]
# As 8 micro-batches of 4 it fits a 32 GB card with either recipe. So take fp32 gradients: there is room for them. Each
# further cut saves less: what is left are the states, in which the batch plays no part. Cut as you like: which is the
# smallest card for 32 sequences per step?

# %%
from course_utils.interactive.widgets import explorer

explorer(
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
# A card with 32 GB. Cut into single sequences and with gradients in bf16, the step needs a little more than a program
# gets on an RTX 4090, and leaves 0.04 GB of an RTX 3090. That is not enough for CUDA's
# [context](../docs/glossary.md#context-cuda), which no estimate here contains: about 300 MB, says [a PyTorch
# developer](https://github.com/pytorch/pytorch/issues/107667). So it fits neither. And no cut fits an L4: its memory is
# less than the states alone.
#
# </details>
#
# ## How large should a batch be?
# Memory no longer limits the batch, only the micro-batch. So why not take a huge one? A batch's gradient is the mean
# of its sequences' gradients: the true gradient G, and noise that shrinks as the batch B grows. Its squared length is
# on average |G|² + tr(Σ)/B, where tr(Σ) is the mean squared length of one sequence's noise. The two are equal at
# B = tr(Σ)/|G|², the [noise scale](../docs/glossary.md#gradient-noise-scale) ([McCandlish et al.
# 2018](https://arxiv.org/abs/1812.06162), section 2).
#
# First the formula, on 256 sequences and the small GPT with random weights:

# %%
from course_utils.lessons.accumulation.batch_noise import (
    from_two,
    noise_of,
    rounded,
    sequence_gradients,
    squared_lengths,
)

each = sequence_gradients(language_model())
noise, sizes = noise_of(each), [1, 2, 4, 8, 16, 32]
found = squared_lengths(each, sizes)
series = {
    "measured": (sizes, [round(length, 2) for length in found]),
    "|G|² + tr(Σ)/B": (sizes, [round(noise.squared_length(size), 2) for size in sizes]),
    "|G|² alone": (sizes, [round(noise.signal, 2)] * len(sizes)),
}
lines(series, "A larger batch removes noise, and less and less of it", "batch B, sequences", "mean |gradient|²",
      log_x=True, markers=True, provenance="the small GPT on the CPU, 256 sequences")  # fmt: skip

# %% [markdown]
# You do not need each sequence's own gradient for that. Two batch sizes give two equations for the two unknowns (their
# appendix A.1), and accumulation hands you both for nothing: the length of a micro-batch's gradient, and of the sum's.

# %%
by_two = from_two(2, 32, found[1], found[5])
print(f"from every sequence: |G|² = {noise.signal:.1f}, tr(Σ) = {noise.noise:.1f}, noise scale {noise.scale:.1f}")
print(f"from B = 2 and 32:   |G|² = {by_two.signal:.1f}, tr(Σ) = {by_two.noise:.1f}, noise scale {by_two.scale:.1f}")

# %% [markdown]
# With random weights the noise scale is tiny: all sequences agree on what to learn first, which characters are
# frequent. **Your guess.** After 300 steps of training: the noise scale, in sequences of 32 characters, rounded to a
# power of two?

# %%
predict("07.noise", unit="sequences")

# %%
from course_utils.lessons.shared.language_model import train_language_model

trained = {steps: language_model() if not steps else train_language_model(steps=steps).model for steps in (0, 20, 300)}
noises = {steps: noise_of(sequence_gradients(one)) for steps, one in trained.items()}
for steps, one in noises.items():
    near = [rounded(value) for value in (one.signal, one.noise, one.scale)]
    print(f"after {steps:3d} steps: |G|² near {near[0]:g}, tr(Σ) near {near[1]:g}, noise scale near {near[2]:g}")
reveal("07.noise", rounded(noises[300].scale), unit="sequences")

# %% [markdown]
# **The gap** has two reasons. What all sequences share is learned within a few steps: G shrinks. What is left to learn
# differs from sequence to sequence: later both grow, but the noise far more. So the batch that is worth its price grows
# during training.
#
# What is it worth? A step on B sequences should gain 1/(1 + B_noise/B) of what the best possible step gains, each with
# the rate that suits it (section 2.2 of the paper). **B_noise** is a noise scale, too, but noise counts only where the
# loss curves: B_noise = tr(HΣ)/(GᵀHG), where H holds the loss's second derivatives. H is far too large to compute. If
# the loss curves alike in all directions, H cancels, and our tr(Σ)/|G|² is left. Is that good enough? Try it on the
# model after 20 steps: step along the gradients of 40 batches of each size, and take for each size the length that
# lowers the loss most on average.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.accumulation.batch_noise import gains, progress

sizes, scale = [2, 4, 8, 16], noises[20].scale
gained = gains(trained[20], sizes)
formula = [progress(size, scale) for size in sizes]
most = max(estimated / real - 1 for estimated, real in zip(formula, gained, strict=True))
series = {"measured": (sizes, gained), "1/(1 + tr(Σ)/|G|²/B)": (sizes, formula)}
lines(series, f"A larger batch gains more; with tr(Σ)/|G|² the formula promises up to {most:.0%} too much",
      "batch B, sequences", "part of the best step's gain", log_x=True,
      provenance="the small GPT after 20 steps, on the CPU")  # fmt: skip

# %% tags=["nbval-ignore-output"]
for size, estimated, real in zip(sizes, formula, gained, strict=True):
    print(f"B = {size:2d}: estimated {estimated:.2f}, measured {real:.2f}, gap {estimated / real - 1:+.0%}")
implied = sum(size * (1 / real - 1) for size, real in zip(sizes, gained, strict=True)) / len(sizes)
print(f"the steps behave as with B_noise = {implied:.0f}; tr(Σ)/|G|² is {scale:.0f}")

# %%
print("2 sequences gain less than a third:", gained[0] < 1 / 3)
print("16 gain more than twice what 2 gain:", gained[-1] > 2 * gained[0])
print("the steps see more noise than tr(Σ)/|G|²:", implied > scale)

# %% [markdown]
# **The gap.** The formula with tr(Σ)/|G|² promises too much at every size, most of all for small batches. This loss
# does not curve alike in all directions: it curves most where the sequences disagree. So B_noise is larger than our
# noise scale, and the last line of numbers says by how much. The rest is chance: 40 batches of each size are not many.
#
# Turn it round: to reach the same loss, batches of B take 1 + B_noise/B times the least number of steps, and 1 +
# B/B_noise times the least number of examples (section 2.3).

# %%
from course_utils.lessons.accumulation.batch_noise import steps_and_examples

ratios = [2**power for power in range(-4, 5)]
costs = [steps_and_examples(ratio, 1.0) for ratio in ratios]
series = {"examples": (ratios, [cost[1] for cost in costs]), "steps": (ratios, [cost[0] for cost in costs])}
lines(series, "At the noise scale you pay twice the least of both; beyond it, examples are wasted",
      "batch, in noise scales", "times the least possible", log_x=True, log_y=True,
      provenance="McCandlish et al. 2018, section 2.3")  # fmt: skip

# %% [markdown]
# That point is the [critical batch size](../docs/glossary.md#critical-batch-size). Below it, a batch twice as large
# nearly halves the steps. Above it, you compute more for hardly fewer steps.

# %% [markdown]
# ## A batch that grows
# For language models [Kaplan et al. 2020](https://arxiv.org/abs/2001.08361) measured it: a power law of the loss L
# alone, whatever the model's size. B_crit = B\*/L^(1/α_B), with B\* ≈ 2·10⁸ tokens and α_B ≈ 0.21 (eq. 1.4). MiniMax-01
# fitted a law of its own, and doubles its batch three times, at the losses 1.98, 1.77 and 1.58 ([MiniMax
# 2025](https://arxiv.org/abs/2501.08313), section 4.2 and figure 13).

# %%
from course_utils.lessons.accumulation.published_batches import KAPLAN, MINIMAX_LOSSES, critical_batch, exponent_between

for loss in (4.0, *MINIMAX_LOSSES):
    theirs = f", MiniMax-01 {MINIMAX_LOSSES[loss] / 1e6:.0f} million" if loss in MINIMAX_LOSSES else ""
    print(f"loss {loss:.2f}: Kaplan et al. {critical_batch(loss) / 1e6:4.1f} million tokens{theirs}")
for name, alpha in {"Kaplan et al.": KAPLAN.exponent, "MiniMax-01": exponent_between(MINIMAX_LOSSES)}.items():
    print(f"{name:13s} α_B = {alpha:.2f}: the batch doubles whenever the loss falls by {1 - 2**-alpha:.0%}")

# %% [markdown]
# Both found a power law, with other constants: a loss per token depends on the text and on the tokenizer. So fit your
# own law, and do not borrow theirs. Here is what MiniMax-01's doubling comes to:

# %%
from course_utils.lessons.accumulation.published_batches import RAMP, ramp_steps, staircase

for seen, size in RAMP:
    print(f"from {seen / 1e9:6,.0f} billion tokens on: {size / 1e6:4.0f} million tokens a batch")
total = RAMP[-1][0]
print(f"16 million throughout, up to {total / 1e12:.1f} trillion: {ramp_steps(RAMP[:1], total):,.0f} steps")

# %% [markdown]
# **Your guess.** How many thousand steps does the ramp take up to there?

# %%
predict("07.ramp", unit="thousand steps")

# %%
reveal("07.ramp", round(ramp_steps(RAMP, total) / 1000, 1), unit="thousand steps")
lines({"ramp": staircase(RAMP, 8 * 10**12, 10**10)}, "MiniMax-01 doubles its batch three times, later and later",
      "billion tokens seen", "million tokens a batch", log_x=True, markers=False,
      provenance="MiniMax-01; 1 million = 10⁶")  # fmt: skip

# %%
misread = [(690_000_000_000 if seen == RAMP[2][0] else seen, size) for seen, size in RAMP]
change = ramp_steps(misread, total) - ramp_steps(RAMP, total)
print(f"with 690 billion, as a lecture has it, in place of {RAMP[2][0] // 10**9}: {change:+,.0f} steps")
first, last = (estimate(whole.replace(micro_batch=4, accumulation_steps=k)).total for k in (25, 200))
print(f"and the memory of a batch 8 times as large, 4 sequences at once: {last - first:+,} bytes")

# %% [markdown]
# **The gap** to your guess may be large: most of the steps saved are those at the end. And memory does not notice:
# accumulation turns a larger batch into more micro-batches.

# %% [markdown]
# ## Another batch, another rate
# A batch k times as large takes a k-th of the steps in an epoch. To get as far, each has to go further: multiply the
# learning rate by k. That is the **linear scaling rule** of [Goyal et al. 2017](https://arxiv.org/abs/1706.02677) for
# SGD, the picture of θ read backwards. For Adam and its like the rule is **√k**. They divide by the gradient's size.
# Where noise rules, a batch k times as large makes that √k times smaller, so their steps grow by √k on their own; the
# rate brings the other √k ([Granziol et al. 2022](https://arxiv.org/abs/2006.09092) argue it from random matrix
# theory).
#
# Goyal et al. trained ResNet-50 on ImageNet. With batches of 256 and rate 0.10 the error was 23.60 %. **Your guess.**
# Batches of 8,192, the same number of epochs, the rate still 0.10: how many percent?

# %%
from course_utils.lessons.accumulation.published_batches import GOYAL, GOYAL_CAPTION, published

predict("07.goyal", unit="%")

# %%
for row in GOYAL:
    print(f"batch {row.batch:5,}, rate {row.rate:8s} error {row.error:.2f} % ± {row.spread:.2f}")
reveal("07.goyal", published(8192, "0.10").error, unit="%")
best = min((row for row in GOYAL if row.batch == 256), key=lambda row: row.error)
print(f"the caption calls {GOYAL_CAPTION} the error at 0.1; in the table rate {best.rate} has {best.error:.2f},")
print(f"and {GOYAL_CAPTION} belongs to rate {next(row.rate for row in GOYAL if row.error == GOYAL_CAPTION)}")

# %% [markdown]
# **The gap.** Unscaled, the large batch takes a 32nd of the steps and does not get far. Scaled by k = 32 it loses next
# to nothing; scaled by √32 it ends in between. (And even a famous table may contradict its caption.)
#
# ## Warm-up
# At first the gradient changes quickly, so k small steps are not one large one, and the large rate throws the weights
# out. So let the rate grow: α_t = α_max·t/T_w from nothing, or, as Goyal et al. do over 5 epochs, from the small
# batch's rate.

# %%
from course_utils.lessons.accumulation.large_batches import scaled, warm_up

epochs, small = [epoch / 2 for epoch in range(17)], 0.1
by_k, by_root = scaled(small, 32, "sgd"), scaled(small, 32, "adam")
lines(
    {
        "by 32, from 0.1": (epochs, [warm_up(t, 5, by_k, start=small) for t in epochs]),
        "by 32, from 0": (epochs, [warm_up(t, 5, by_k) for t in epochs]),
        "by √32, from 0.1": (epochs, [warm_up(t, 5, by_root, start=small) for t in epochs]),
        "small batch": (epochs, [small] * len(epochs)),
    },
    f"A rate of {small} becomes {by_k:g} by the linear rule, {by_root:.2f} by the root, after 5 epochs of warm-up",
    "epoch", "learning rate", markers=False, provenance="warm-up: Goyal et al. 2017, section 2.2",
)  # fmt: skip

# %% [markdown]
# ## Try it
# A classifier on made-up data, four layers, really trained here for 10 epochs, three times with different first
# weights: batches of 16, and of 512, again k = 32. SGD with [momentum](../docs/glossary.md#momentum); the
# [warm-up](../docs/glossary.md#warm-up) takes 3 epochs. Its first weights are larger than usual, so that it starts as
# steep as a deep network does. The figure puts it beside the published table.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.accumulation.figures import published_and_ours
from course_utils.lessons.accumulation.large_batches import table, train

ours = train(table())
title = "The same shape: scaled by k with a warm-up it holds, by √k it lags, unscaled it fails"
where = "n = 16 and η = 0.01 here, 256 and 0.1 in the paper; trained on the CPU, 3 seeds"
published_and_ours([*GOYAL[:8], None], ours, title, provenance=where)

# %%
error = {outcome.setting.name: outcome.mean for outcome in ours}
worst = {outcome.setting.name: max(outcome.errors) for outcome in ours}
small, scaled = error["n, η"], error["32n, 32·η"]
print("scaled by 32, with a warm-up, within 2 points of the small batch:", abs(scaled - small) < 2)
print("unscaled at least 10 points worse:", error["32n, η"] > small + 10)
print("scaled by √32 in between:", scaled + 2 < error["32n, √32·η"] < error["32n, η"] - 2)
print("32·2η with a warm-up holds in every run:", worst["32n, 32·2η"] < small + 3)
print("without one, some run breaks:", worst["32n, 32·2η, no warm-up"] > small + 5)

# %% [markdown]
# And Adam: unscaled, by √k, by k, without a warm-up, and by k with one.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.accumulation.large_batches import adam_table

by_adam = {outcome.setting.name: outcome.mean for outcome in train(adam_table())}
bars(by_adam, "Adam: by √k the large batch keeps up at once, by k only after a warm-up", unit="%",
     provenance="test error, n = 16, η = 0.006; the small classifier trained on the CPU, 3 seeds")  # fmt: skip

# %%
small = by_adam["n, η"]
print("√32 as good as the small batch, within 2 points:", abs(by_adam["32n, √32·η"] - small) < 2)
print("unscaled at least 2 points worse:", by_adam["32n, η"] > small + 2)
print("by 32 it never learns, at least 30 points worse:", by_adam["32n, 32·η"] > small + 30)
print("by 32 with a warm-up within 3 points:", abs(by_adam["32n, 32·η, warm-up"] - small) < 3)

# %% [markdown]
# **The gap** between their table and ours is in the numbers; the shape is the same. For Adam the rule of √k is the safe
# one, but no law: on this small problem k works as well, once a warm-up has brought it past the start. Three seeds and
# a made-up problem prove nothing about a large model. And rules like these end at the critical batch size, where a step
# hardly improves any more, at whatever rate.

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | 400 sequences of 1,024 tokens are about 4 million tokens (lecture) | ten times too many |
# | the common loop: backward, and a step if (i + 1) % k == 0 | undivided, and the last group is left over |
# | the memory is that of one micro-batch | and all gradients, from the second micro-batch on |
# | the best rate at 256 is 0.1, 23.68 % (caption of Goyal's table) | in the table 23.68 belongs to 0.2 |
# | MiniMax-01 goes to 64 million at 690 billion tokens (lecture) | 790, which changes the number of steps |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(7)

# %% [markdown]
# ## Take home
# **Remember** Gradients add: many small micro-batches are one large batch, if each counts by its share of tokens and
# nobody steps in between.
#
# **Breaks when** losses are not divided, the last group is left over, lengths differ and batches are averaged, or
# `.grad` is bf16 and adds up hundreds.
#
# **Cheat-sheet line** global batch = b · k · ranks · loss × (tokens of the micro-batch / tokens of the group) · peak:
# one micro-batch and all gradients · rate: SGD ×k, Adam ×√k, with a warm-up · a batch is worth it up to tr(Σ)/|G|².
#
# **In your own script** `python3 -m course_utils watch --save before.gz train.py`, then change a line, then
# `watch --against before.gz train.py`: every tensor that came, went or grew, and what it did to the peak.
#
# Now solve the [exercises of this lesson](../exercises/07_gradient_accumulation.ipynb).
