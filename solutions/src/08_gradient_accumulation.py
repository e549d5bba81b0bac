# ---
# jupyter:
#   course:
#     minutes: 107
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 08 · Gradient accumulation and large batches
#
# **107 minutes** for all four; each one says its own. You should know what [lesson
# 08](../notebooks/08_gradient_accumulation.ipynb) shows, and for exercise 4 [lesson
# 09](../notebooks/09_large_batches.ipynb). No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from functools import partial
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from course_utils.lessons.accumulation import checks as check
from course_utils.lessons.accumulation.micro_batches import mean_loss
from course_utils.lessons.shared.language_model import batches, language_model

# %% [markdown]
# ## 1 · A token is a token
# **Difficulty** ●●●○○ · **30 minutes** · **Trains** averaging over the right tokens, without looking ahead
#
# The lesson's `loop_by_tokens` looks at a whole group before its first backward. A loader that streams does not allow
# that. And in a long stream, some micro-batch has no real token at all:

# %%
logits, padding = torch.zeros(8, 5), torch.full((8,), -100)
for reduction in ("mean", "sum"):
    loss = cross_entropy(logits, padding, reduction=reduction)
    print(f"{reduction} over no token: {loss.item()}")

# %% [markdown]
# Write one pass over `loader` that takes one optimizer step for every k micro-batches.
#
# `loader` is an iterator. It hands out each micro-batch once: `(tokens, targets)`, both of shape (b, s), for any b
# and s. The target of padding is −100. `model(tokens)` returns the logits, (b, s, V). Some weights are unused: their
# `.grad` stays None.
#
# - A group is k micro-batches, or fewer at the end. Those of padding count.
# - For each group, step once, with the gradient of the mean cross-entropy over *all* real tokens of the group.
# - If a group has no real token, take no step.
# - Hold at most one micro-batch and its graph: run its backward before you take the next one from `loader`.
# - At the end, every `.grad` is None again.
# - Return a list with the mean loss per real token of each step: plain numbers, without graphs.


# %%
def train_pass(model, optimizer, loader, k: int) -> list[float]:
    """Step once per k micro-batches of a stream, on all their tokens' mean; return these means."""
    ### BEGIN SOLUTION Return a list with one number for each step.
    losses, size = [], k
    while size:
        total = count = size = 0
        for tokens, targets in islice(loader, k):
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            total, count = total + loss.item(), count + (targets != -100).sum().item()
            size = size + 1
        if count:
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad /= count
            optimizer.step()
            losses.append(total / count)
        optimizer.zero_grad()
    return losses
    ### END SOLUTION


# %%
check.train_pass(train_pass)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# A mean is a sum, divided once. Which of the two can you add up before you know how many tokens there are?
#
# </details>
# <details><summary>Hint 2: when to divide</summary>
#
# With `reduction="sum"` each backward adds to `.grad`, and a micro-batch of padding adds zeros. At the end of the
# group you know the number of tokens. A gradient is a tensor like any other: divide it before the step.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `itertools.islice(stream, k)` takes the next k micro-batches of an iterator, one by one, and fewer at its end. If it
# gives none, the stream is over. Call `zero_grad` after every group, also after one without tokens.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# If you add up sums and divide once, you need not look ahead. The gradient of a sum is the sum of the gradients, and
# the number of tokens is a factor that can come last. Clip after that division, not before.
#
# In fp16 the sums may overflow. Then divide each loss by an expected number of tokens first, and correct at the end.
# With several GPUs the tokens of all ranks count, so add up their numbers, too. And a step without a gradient still
# does something: momentum, moments and weight decay move the weights.

# %% [markdown]
# ## 2 · 16-bit gradients, added up in fp32
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** using each gradient as soon as it is complete, and freeing it
#
# Weights in bf16 get gradients in bf16, and `.grad` adds up in bf16, too. Here are 64 gradients of one weight:

# %%
each = (1 + torch.randn(64, 10_000, generator=torch.Generator().manual_seed(0))).bfloat16()
in_16_bits = torch.zeros(10_000).bfloat16()
for gradient in each:
    in_16_bits += gradient
exact = each.double().sum(0)
sums = {"bf16": in_16_bits, "fp32": each.float().sum(0)}
off = {name: ((one - exact).norm() / exact.norm()).item() for name, one in sums.items()}
print({name: f"{share:.2%} off" for name, share in off.items()})

# %% [markdown]
# Write a function that makes backward add up gradients in fp32: in the `.grad` of the fp32 [master
# weights](../docs/glossary.md#master-weights), which the optimizer reads.
#
# Do not wait for the end of backward: by then all bf16 gradients exist at once.
# `weight.register_post_accumulate_grad_hook(function)` calls `function(weight)` during backward, as soon as
# `weight.grad` is complete.
#
# `weights` and `masters` are lists in the same order. After a call of your function, each backward
#
# - adds every new gradient to its master's `.grad`, in fp32,
# - and sets the weight's own `.grad` to None at once.
#
# A master's `.grad` is None before its first gradient, and again after `zero_grad`. If a weight gets no gradient, its
# master's `.grad` stays None. Some weights are frozen (`requires_grad` is False): torch accepts no hook on them.
#
# Return a list of all handles that you get from registering. After `remove()` on each, backward is as usual.


# %%
def add_up_in_fp32(weights: list[torch.Tensor], masters: list[torch.Tensor]) -> list:
    """Make backward add gradients to the fp32 `masters` from now on; return the hooks' handles."""

    ### BEGIN SOLUTION Return a list of handles.
    pairs = [pair for pair in zip(weights, masters, strict=True) if pair[0].requires_grad]

    def add(master, weight):
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return [
        weight.register_post_accumulate_grad_hook(partial(add, master)) for weight, master in pairs
    ]
    ### END SOLUTION


# %%
check.add_up_in_fp32(add_up_in_fp32)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# First write the function for one weight and its master. It has two cases: the first gradient, and every later one.
#
# </details>
# <details><summary>Hint 2: which master?</summary>
#
# The hook gets only the weight. A function defined in a loop sees the loop's variables as they are when it *runs*:
# all hooks would find the last master. `functools.partial` fixes an argument now.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `+=` keeps the format of its left side, so with fp32 on the left the sum is in fp32. Make the first one with
# `.float()`. Then free `weight.grad`: as long as anything refers to it, its bytes stay.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The fp32 sum costs 4 bytes per parameter: the price of `bf16-master-fp32grad`. The bf16 gradients then cost next to
# nothing, because each one lives only from its product to its hook.
#
# The same hook can do more: step an optimizer of its own for each weight, or send the gradient to other GPUs. DDP and
# FSDP use such hooks. With one micro-batch per step you could step inside the hook and need no fp32 gradient at all.
# With several, the sum must wait.


# %% tags=["solution"]
def after_backward(weights, masters):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float() + (0 if master.grad is None else master.grad)
        weight.grad = None


# %% tags=["solution"]
from course_utils import on_gpu

with on_gpu():
    for where in ("after backward", "in hooks"):
        linear = [
            torch.nn.Linear(2048, 2048, bias=False).to("cuda", torch.bfloat16) for _ in range(8)
        ]
        weights = [layer.weight for layer in linear]
        masters = [weight.detach().float() for weight in weights]
        handles = add_up_in_fp32(weights, masters) if where == "in hooks" else []
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for x in torch.randn(2, 8, 2048, device="cuda", dtype=torch.bfloat16):
            torch.nn.Sequential(*linear)(x).sum().backward()
            if where == "after backward":
                after_backward(weights, masters)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        print(f"{where:15} {peak:.0f} MB more at the peak")

# %% [markdown]
# ## 3 · A scale of your own
# **Difficulty** ●●●○○ · **25 minutes** · **Trains** what happens once per step, and what to do if a gradient overflows
#
# Take one step with a scaled loss, without `GradScaler`.
#
# - `parts` is a list of k micro-batches. `mean_loss(model, part)` is the loss of one. The step's gradient is that of
#   the mean of the k losses.
# - `state` is a dictionary. Multiply losses by its `scale`. Its `good` counts good steps. You change both.
# - If a number of the sum of gradients is infinite or NaN, take no step. Then the scale is halved, and `good` is 0.
# - Otherwise the optimizer steps with gradients of their own size, clipped to the length `longest` (`clip_grad_norm_`).
#   `good` is one more. When it reaches `every`, the scale is doubled, and `good` is 0.
# - In both cases, every `.grad` is None at the end. Some weights are unused.
# - Return True if the optimizer has stepped, else False.


# %%
def scaled_step(model, optimizer, parts, state: dict, longest: float, every: int) -> bool:
    """Take a step with a scaled loss, or none if a gradient overflows; keep `state` up to date."""
    ### BEGIN SOLUTION Return True or False.
    for part in parts:
        (mean_loss(model, part) * state["scale"] / len(parts)).backward()
    used = [weight.grad for weight in model.parameters() if weight.grad is not None]
    finite = all(gradient.isfinite().all().item() for gradient in used)
    state["good"] = state["good"] + 1 if finite else 0
    if finite:
        for gradient in used:
            gradient /= state["scale"]
        clip_grad_norm_(model.parameters(), longest)
        optimizer.step()
    if not finite or state["good"] == every:
        state["scale"] *= 2 if finite else 0.5
        state["good"] = 0
    optimizer.zero_grad()
    return finite
    ### END SOLUTION


# %%
check.scaled_step(scaled_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# First write the step as if nothing could overflow: k times backward, then divide, clip, step and clear, each once.
#
# </details>
# <details><summary>Hint 2: is it finite?</summary>
#
# `tensor.isfinite().all()` is a tensor of one truth value. One infinite number in one gradient of one micro-batch is
# enough: it stays in the sum. So look once, at the sum, before you divide.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The scale of a step must not change before its gradients have been divided. So change it last. A step that was left out
# has gradients, too: clear them.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# `GradScaler` does this: `unscale_` divides and looks, `step` steps or not, `update` changes the scale. It doubles after
# 2,000 good steps, and its first scale is 65,536. So a training in fp16 often leaves out its first steps, and one now and
# then. All k micro-batches share one scale, and one overflow costs all of them.
#
# bf16 has the range of fp32, so it needs no scale.

# %% tags=["solution"]
model = language_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limit = torch.finfo(torch.float16).max
for weight in model.parameters():  # as if gradients were in fp16
    weight.register_hook(lambda gradient: gradient.masked_fill(gradient.abs() > limit, torch.inf))
state = {"scale": 2.0**20, "good": 0}
for step in range(12):
    scale, parts = state["scale"], list(batches(4, 4, seed=step))
    stepped = scaled_step(model, optimizer, parts, state, longest=1.0, every=3)
    print(f"{step:2d}: scale {scale:9,.0f}", "stepped" if stepped else "overflow")

# %% [markdown]
# ## 4 · The noise scale for nothing
# **Difficulty** ●●●○○ · **30 minutes** · **Trains** measuring what a batch is worth, while you accumulate
#
# Accumulate gradients as usual, and return the pair |G|² and tr(Σ): two numbers. tr(Σ) is the noise of *one
# sequence*.
#
# `parts` is a list of k ≥ 2 micro-batches, each a pair (tokens, targets) of b sequences without padding.
# `mean_loss(model, part)` is a micro-batch's loss. `.grad` is None before your call. At the end, it holds the
# gradient of the mean of the k losses.
#
# On average the squared length of a batch's gradient is |G|² + tr(Σ)/B. Measure two: the mean squared length of the k
# micro-batches' gradients (B = b), and the squared length of their mean (B = k·b). Put each into the formula, and
# solve the two equations. |G|² may come out negative. (The recipe of lesson 09 uses only the first micro-batch. The
# mean over *all* is a better estimate.)
#
# But each micro-batch's gradient is added to `.grad` and gone. A hook sees it before that.
# `weight.register_hook(function)` calls `function(gradient)` in each backward, with only this backward's gradient,
# and returns a handle with `remove()`.
#
# - Store no second set of gradients.
# - Leave no hook behind, and let yours return nothing: what a hook returns replaces the gradient.
# - Some weights are frozen (they take no hook), others are unused.


# %%
def measure_noise(model, parts) -> tuple[float, float]:
    """Return |G|² and tr(Σ) from micro-batches, and leave their mean gradient in `.grad`."""
    ### BEGIN SOLUTION Return two numbers.
    k, b = len(parts), len(parts[0][0])
    squares = []

    def look(gradient):
        squares.append(gradient.square().sum())

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    handles = [weight.register_hook(look) for weight in weights]
    for part in parts:
        (mean_loss(model, part) / k).backward()
    for handle in handles:
        handle.remove()
    short = k * sum(squares).item()  # k² for the division above, 1/k for the mean
    long = sum(weight.grad.square().sum() for weight in weights if weight.grad is not None).item()
    noise = (short - long) / (1 / b - 1 / (k * b))
    return long - noise / (k * b), noise
    ### END SOLUTION


# %%
check.measure_noise(measure_noise)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two measurements, two unknowns. Write the formula for B = b and for B = k·b, and subtract: |G|² drops out.
#
# </details>
# <details><summary>Hint 2: what to keep of a gradient</summary>
#
# Its squared length is one number. A hook may add `gradient.square().sum()` to a list, over all weights and all
# micro-batches. You need only the total.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# If you divide each loss by k, hooks see gradients that are k times too short, so their squares are k² times too
# small. For the mean over micro-batches divide by k once. The squared length for B = k·b is that of `.grad` at the
# end.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# This is the estimator of McCandlish et al. 2018, appendix A.1. The squared length of a mean is too large by its
# noise, so |G|² is what is left after you subtract that. The estimate has no bias: it may even come out negative. So
# average |G|² and tr(Σ) over many steps *before* you divide one by the other. A ratio of averages is far steadier
# than an average of ratios.

# %% tags=["solution"]
found = []
for step in range(20):
    found.append(measure_noise(language_model(seed=step), list(batches(8, 4, seed=step))))
signal, noise = torch.tensor(found).mean(0).tolist()
print(f"random weights, 20 × 8 micro-batches of 4: noise scale near {noise / signal:.0f} sequences")
