# ---
# jupyter:
#   course:
#     minutes: 105
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 14 · Model and pipeline parallelism
#
# **105 minutes** for all four; each one says its own. You should know what [lesson
# 14](../notebooks/14_model_and_pipeline_parallelism.ipynb) shows. You need no GPU.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from itertools import combinations, pairwise

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
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
# more than that. The lesson's `by_hand` takes lists like yours: try them there.

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
# ## 4 · The weights that forward saw
# **Difficulty** ●●●○○ · **25 minutes** · **Trains** weight stashing, and what a graph holds
#
# Write what one stage of PipeDream does to its weights. Its arguments:
#
# - `stage`: an `nn.Sequential` with the first version of the weights. Do not change it.
# - `order`: the stage's works, as in exercise 2: `["F0", "F1", "B0", …]`.
# - `inputs[i]`: the input of micro-batch i. `gradients[i]`: the gradient of its output, which comes back later.
# - `rate`: after each backward, the newest weights go down by rate times the gradient of this micro-batch alone.
#
# A forward sees the newest weights. Its backward needs the *same* ones, although they are no longer the newest. Its
# update changes the newest ones. Return the weights at the end, as a dictionary of names and tensors. With
# [`functional_call(stage, weights, (x,))`](https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html)
# a module runs with other weights than its own.


# %%
def stashed(stage, order, inputs, gradients, rate):
    """The weights of a stage after its works, by name."""
    ### BEGIN SOLUTION Return a dictionary of names and tensors.
    newest = {name: weight.detach() for name, weight in stage.named_parameters()}
    kept = {}
    for work in order:
        i = int(work[1:])
        if work[0] == "F":
            version = {name: weight.clone().requires_grad_() for name, weight in newest.items()}
            kept[i] = version, functional_call(stage, version, (inputs[i],))
        else:
            version, y = kept.pop(i)
            y.backward(gradients[i])
            newest = {name: w - rate * version[name].grad for name, w in newest.items()}
    return newest
    ### END SOLUTION


# %%
check.stashed(stashed)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Keep two things: the newest weights, and per micro-batch in flight the weights that its forward saw, with its output.
#
# </details>
# <details><summary>Hint 2: no update in place</summary>
#
# If an update writes into a tensor that a graph still needs, backward raises an error. Make new tensors instead: `w -
# rate * gradient`. The old ones stay as long as something holds them.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Give each forward its own copies, as leaves: `.clone().requires_grad_()`. After `y.backward(gradients[i])`, each leaf's
# `.grad` is this micro-batch's gradient alone. Subtract it from the *newest* weights, not from these leaves.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A version lives as long as a graph that needs it: when a micro-batch has come back, nothing holds its leaves any more.
# So there are as many versions as micro-batches in flight, p − stage. The gradient belongs to old weights, and the
# update starts at the newest ones: that is staleness, and no error message tells you of it.

# %% tags=["solution"]
pipeline_figure(simulate("PipeDream", 3, 12))
