# ---
# jupyter:
#   course:
#     minutes: 110
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 14 · Model and pipeline parallelism
#
# **110 minutes** for all four; each one says its own. You should know what [lesson
# 14](../notebooks/14_model_and_pipeline_parallelism.ipynb) shows, and for exercise 4 the `Function` that [lesson
# 06](../notebooks/06_recomputation.ipynb) writes under *By hand*. You need no GPU.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from itertools import combinations, pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from course_utils import on_gpu
from course_utils.lessons.pipelines import checks as check
from course_utils.lessons.pipelines.figures import pipeline_figure
from course_utils.lessons.pipelines.schedules import simulate

# %% [markdown]
# ## 1 · Where to cut
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** planning a pipeline: time and memory together
#
# Cut a model into p stages, so that each stage fits its card and the pipeline is fast. All stages wait for the slowest
# one. Under 1F1B, early stages keep more micro-batches than late ones, so equal cuts can fit badly.
#
# Each list has one number per layer, from first to last:
#
# - `times`: milliseconds of one micro-batch, forward and backward.
# - `states`: GB of the layer's weights, gradients and optimizer states.
# - `kept`: GB of activations that the layer keeps for **one** micro-batch.
#
# There are p stages, m micro-batches (m may be smaller than p), and `capacity` GB per stage. At its fullest moment, a
# stage holds its states, and the activations of as many micro-batches as it keeps at most under 1F1B.
#
# Return a list of p numbers: how many layers each stage has, from first to last. A stage has at least one layer, and
# layers stay in their order. Of all cuts that fit, return one whose slowest stage takes the least time. If no cut fits,
# return `None`. The models in the check have few layers: you may try every cut.


# %%
def cut(
    times: list[int], states: list[int], kept: list[int], p: int, m: int, capacity: int
) -> list[int] | None:
    """Layers per stage, of the fastest cut whose stages all fit under 1F1B; None if no cut fits."""
    ### BEGIN SOLUTION Return a list of p numbers, or None.
    best, least = None, float("inf")
    for inner in combinations(range(1, len(times)), p - 1):
        stages = list(pairwise([0, *inner, len(times)]))
        fits = all(
            sum(states[a:b]) + min(m, p - stage) * sum(kept[a:b]) <= capacity
            for stage, (a, b) in enumerate(stages)
        )
        slowest = max(sum(times[a:b]) for a, b in stages)
        if fits and slowest < least:
            best, least = [b - a for a, b in stages], slowest
    return best
    ### END SOLUTION


# %%
check.cut(cut)

# %% [markdown]
# <details><summary>Hint 1: all cuts</summary>
#
# A cut is a choice of p − 1 places between layers. `combinations(range(1, len(times)), p - 1)` lists all choices. With
# 0 in front and the number of layers behind, neighbors are a stage's first layer and its end.
#
# </details>
# <details><summary>Hint 2: how many micro-batches</summary>
#
# Draw it: `pipeline_figure(simulate("1F1B", 4, 8))`. In a stage's row, count the forwards before the first backward.
# How many are there in the last stage, and in the one before it? Then draw it with two micro-batches.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Go through all cuts. Skip those with a stage that does not fit. Among the others, remember the one whose largest sum
# of times is smallest. States count once, kept activations once per micro-batch that the stage keeps.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Time asks for equal stages. Memory asks for fewer layers in early stages, because they keep p − stage micro-batches.
# On a card with much room, time alone decides. On a tight card, the best cut is uneven. Real models add the embedding
# to the first stage, and head and loss to the last, so frameworks let you choose the number of layers for each stage.

# %% tags=["solution"]
for capacity in (40, 17):
    found = cut(times=[4] * 12, states=[2] * 12, kept=[1] * 12, p=4, m=16, capacity=capacity)
    print(f"12 equal layers, 4 stages, 16 micro-batches, {capacity} GB per stage: {found}")

# %% [markdown]
# ## 2 · Write 1F1B
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** a schedule as a program
#
# Return what one stage does under 1F1B, in order, as a list of strings: `["F0", "F1", "B0", …]`. F0 is the forward of
# micro-batch 0, B0 its backward. First the stage goes forward until it keeps as many micro-batches as it may keep at
# most. Then backward and forward alternate, until all forwards are done. At the end only backwards are left. m may be
# smaller than p.


# %%
def order(p: int, m: int, stage: int) -> list[str]:
    """The order of one stage (from 0) of p under 1F1B with m micro-batches: F0 is a forward, B0 a
    backward, …
    """
    ### BEGIN SOLUTION Return a list of 2·m strings.
    ahead = min(m, p - stage)
    works = [f"F{micro}" for micro in range(ahead)]
    for micro in range(m):
        works.append(f"B{micro}")
        if micro + ahead < m:
            works.append(f"F{micro + ahead}")
    return works
    ### END SOLUTION


# %%
check.order(order)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# How many forwards come before the first backward? Under 1F1B the last stage takes a micro-batch backward right after
# its forward. How many does it keep? And the stage before it? No stage keeps more micro-batches than there are.
#
# </details>
# <details><summary>Hint 2: the steady state</summary>
#
# Now loop over all backwards, B0 to B(m − 1). After each, do the next forward that is not done yet.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# After B0 comes F(ahead), after B1 F(ahead + 1), and so on, as long as that number is below m.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A stage does p − stage forwards before the first micro-batch comes back. From then on, one enters for each that
# leaves. So m is free: choose it for the bubble, not for memory. The list does not say *when* anything happens. A
# stage starts each forward or backward of its list as soon as the input is there. PyTorch's `Schedule1F1B` does no
# more than that. The lesson's `one_stage` takes lists like yours: try them there.

# %% tags=["solution"]
for stage in range(4):
    print(f"stage {stage}: {' '.join(order(4, 6, stage))}")
pipeline_figure(simulate("1F1B", 4, 6))

# %% [markdown]
# ## 3 · Two stages, one gradient
# **Difficulty** ●●●●○ · **45 minutes** · **Trains** a pipeline's step, and what it need not keep
#
# Write one training step of two stages under 1F1B, without an optimizer. Do not keep outputs that have been sent.
#
# The lesson's stage keeps `x, y` of every micro-batch in flight. But y has been sent. This stage no longer needs y's
# numbers, only the place in the graph where y's backward starts. (Megatron-LM frees the numbers too, in
# `deallocate_output_tensor`.) In torch, that place is a gradient edge:

# %%
layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1024))
y = layers(torch.randn(8, 64))
edge, shape = get_gradient_edge(y), y.shape
del y  # frees 8 · 1024 numbers
torch.autograd.backward(edge, torch.ones(shape))  # does what y.backward(...) would do
print("gradient of the first weight:", tuple(layers[0].weight.grad.shape))

# %% [markdown]
# Both ranks call your function:
#
# - `layers`: this rank's `nn.Sequential`.
# - `data`: a list with one tensor per micro-batch. On rank 0 they are the inputs, on rank 1 the targets. Micro-batches
#   may differ in their number of rows, and there may be only one.
# - `send(tensor)` sends to the other rank and does not wait. `receive(shape)` waits for the next tensor from there. A
#   message has as many rows as its micro-batch and as many columns as y. On rank 1 that is `layers[0].in_features`.
#
# Leave the gradients in the weights; what you return does not matter. Before the step, every `.grad` is None. After it,
# they are those of `mse_loss` over the *complete* batch. Further rules:
#
# - Rank 0 goes two micro-batches ahead before its first backward, and never keeps more than two.
# - Rank 1 keeps one. It sends that one's gradient before it waits for the next input.
# - Rank 0 may still hold the output that it sent last, but no earlier one, and no copy. Rank 1 may still hold the input
#   that it received last, but no earlier one, and no copy.
# - On real ranks, your function knows only the names imported above: define helpers inside it.


# %%
def two_stages(layers, rank, data, send, receive):
    """Take one step of this rank's stage: leave the gradients in its weights."""
    ### BEGIN SOLUTION Send, receive, and leave the gradients in the weights.
    if rank == 1:
        for target in data:
            x = receive((len(target), layers[0].in_features)).requires_grad_()
            loss = mse_loss(layers(x), target) * len(target) / sum(map(len, data))
            loss.backward()
            send(x.grad)
        return
    waiting = []
    for batch in [*data, None]:
        if batch is not None:
            y = layers(batch)
            send(y.detach())
            waiting.append((get_gradient_edge(y), y.shape))
        if batch is None or len(waiting) == 2:
            edge, shape = waiting.pop(0)
            torch.autograd.backward(edge, receive(shape))
    ### END SOLUTION


# %%
check.two_stages(two_stages)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Begin with rank 1, which is a plain training loop. Its input comes from `receive`, so it is a leaf: what makes
# autograd compute its gradient? Send that gradient before you wait for the next input.
#
# </details>
# <details><summary>Hint 2: the loss</summary>
#
# `mse_loss` is a mean over all numbers of one micro-batch. Multiply it by the micro-batch's share of the batch's rows.
# 1/m is right only if all micro-batches are equal.
#
# </details>
# <details><summary>Hint 3: rank 0</summary>
#
# Use exercise 2 with p = 2: two forwards, then one backward and one forward in turn, at the end one last backward. Put
# each output's edge and shape into a list, and take the oldest. With a single micro-batch there is one forward and one
# backward.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Backward of a linear layer needs its input and its weight, not its output. The next stage has that output, as its own
# input. So the first of two stages kept it for nothing: 2·s·b·h bytes per micro-batch in flight. An edge names the node
# of the graph where backward begins; torch's own schedules use it, too. Uneven micro-batches need weights. Otherwise
# each row of a smaller one counts more than the others.

# %% tags=["solution"]
with on_gpu():
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).to("cuda")
    x = torch.randn(4096, 1024, device="cuda")
    layers(x[:1])  # the first product allocates cuBLAS's workspace
    for name, keep in (("y", lambda y: y), ("the edge", get_gradient_edge)):
        before = torch.cuda.memory_allocated()
        waiting = [keep(layers(x)) for _ in range(2)]
        size = torch.cuda.memory_allocated() - before
        print(f"{name:8s} of two micro-batches: {size / 1e6:.1f} MB kept")
        del waiting

# %% [markdown]
# ## 4 · A tensor-parallel MLP that trains
# **Difficulty** ●●●●○ · **30 minutes** · **Trains** messages inside autograd
#
# Write a tensor-parallel MLP, as one of t ranks computes it, with gradients that are right on every rank. The lesson's
# MLP cannot train, because it calls `.detach()` before the all-reduce. Megatron-LM uses two small functions instead, f
# and g ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3). Write both as `autograd.Function`s
# ([torch's notes](https://docs.pytorch.org/docs/stable/notes/extending.html) explain them):
#
# - `Shared` (their f) returns its input unchanged. In backward it sums the gradient over all ranks.
# - `Summed` (their g) sums over all ranks in forward. In backward it returns the gradient unchanged.
#
# Then write `parallel_mlp` with them. Its arguments:
#
# - `x` (rows, h) is the same on every rank. `up` (4h/t, h), `up_bias` (4h/t) and `down` (h, 4h/t) are this rank's
#   parts. `down_bias` (h) is complete on every rank.
# - `all_reduce(tensor)` puts the sum over all ranks into `tensor`, as `dist.all_reduce` does.
#
# Return the output of the complete MLP, (rows, h): gelu(x·upᵀ + up_bias)·downᵀ + down_bias. On every rank, x and
# down_bias get the complete MLP's gradient; up, up_bias and down get their part of it.
#
# Use one all-reduce in forward and one in backward, also with t = 1. x may be used elsewhere, as in `x +
# parallel_mlp(x, …)`: sum only the MLP's part of its gradient. The check calls only `parallel_mlp`.


# %%
class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, all_reduce):
        ### BEGIN SOLUTION Return x unchanged.
        ctx.all_reduce = all_reduce
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION Return the sum of all ranks' gradients, and None.
        gradient = gradient.clone()
        ctx.all_reduce(gradient)
        return gradient, None
        ### END SOLUTION


# %%
class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, all_reduce):
        ### BEGIN SOLUTION Return the sum of all ranks' parts.
        whole = part.clone()
        all_reduce(whole)
        return whole
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION Return the gradient of a part, and None.
        return gradient, None
        ### END SOLUTION


# %%
def parallel_mlp(x, up, up_bias, down, down_bias, all_reduce):
    """The complete MLP's output, computed with this rank's parts."""
    ### BEGIN SOLUTION Return the output, (rows, h).
    hidden = F.gelu(F.linear(Shared.apply(x, all_reduce), up, up_bias))
    return Summed.apply(F.linear(hidden, down), all_reduce) + down_bias
    ### END SOLUTION


# %%
check.parallel_mlp(parallel_mlp)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What does each rank have only a part of? In forward: after `down`, a part of a sum. In backward: each rank's `up`
# gives x a gradient, and x's complete gradient is their sum. So where does each of the two functions go?
#
# </details>
# <details><summary>Hint 2: what does not need a message</summary>
#
# y = part₀ + part₁ + … If you know y's gradient, what is the gradient of one part? Every rank has it already. Summing
# it once more makes it t times too large.
#
# </details>
# <details><summary>Hint 3: details</summary>
#
# `all_reduce` writes into its argument, and the tensor that autograd hands you may be in use elsewhere: give it a
# `.clone()`. `backward` returns a second value for the second argument of forward: `None`. And where must you add
# `down_bias`, so that it is in the sum once and not t times?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# f and g are mirror images: where one sums, the other passes its input on. Tensor parallelism needs no other
# messages: for each block of attention and MLP, two all-reduces in forward and two in backward, each of s·b·h
# numbers. In a ring, each rank sends 2(t − 1)/t times that. An all-reduce that autograd differentiates as a sum would
# be wrong here, because it sums the gradient, too. Between the matrices, the tensors are 4h/t wide and shrink with t.
# x and y are complete on every rank, whatever t is.

# %% tags=["solution"]
with on_gpu():
    h = 1024
    x = torch.randn(4096, h, device="cuda", requires_grad=True)
    F.linear(x[:1], x[:1])  # the first product allocates cuBLAS's workspace
    for t in (1, 2, 4, 8):
        up = torch.randn(4 * h // t, h, device="cuda", requires_grad=True)
        down = torch.randn(h, 4 * h // t, device="cuda", requires_grad=True)
        biases = torch.randn(4 * h // t, device="cuda"), torch.randn(h, device="cuda")
        before = torch.cuda.memory_allocated()
        y = parallel_mlp(x, up, biases[0], down, biases[1], lambda tensor: None)
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        expected = 2 * 4096 * 4 * h * 4 / t / 1e6
        print(f"t = {t}: {kept / 1e6:6.1f} MB kept between x and y, {expected:.1f} expected")
        del y
