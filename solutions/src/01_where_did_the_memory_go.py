# ---
# jupyter:
#   course:
#     minutes: 88
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 01 · Where did the memory go?
#
# **88 minutes** for all six; each one says its own. You should know what [lesson
# 01](../notebooks/01_where_did_the_memory_go.ipynb) shows, and Python's dictionaries and loops. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
import torch
from torch import nn

from course_utils import TrainingRun, estimate, format_bytes, gpu, measure
from course_utils.lessons.one_step import checks as check
from course_utils.figures import lines, timeline

# %% [markdown]
# ## 1 · What a weight wants to know
# **Difficulty** ●●○○○ · **6 minutes** · **Trains** seeing why forward has to keep its inputs
#
# The lesson has dL/dW for one row of tokens. A linear layer computes y = x·Wᵀ for a batch of sequences, and backward
# hands you dL/dy. Write dL/dW yourself, without autograd.
#
# `x` has the shape (b, s, inputs), `dy` has (b, s, outputs), and W has (outputs, inputs). Which of `x`, `y`, `W` did
# you need? That one had to stay in memory since forward.


# %%
def weight_gradient(x, dy):
    """dL/dW, of shape (outputs, inputs), from the layer's input x and dL/dy."""
    ### BEGIN SOLUTION Return a tensor of shape (outputs, inputs).
    return dy.flatten(0, 1).T @ x.flatten(0, 1)
    ### END SOLUTION


# %%
check.weight_gradient(weight_gradient)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take one token. Output o is the sum over inputs i of W[o, i]·x[i]. What is the derivative of y[o] with respect to
# W[o, i]?
#
# </details>
# <details><summary>Hint 2: one token</summary>
#
# For one token, dL/dW[o, i] = dy[o]·x[i]: every output meets every input. All b·s tokens went through the same W.
# What happens to their gradients?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# They add up. A sum over tokens of a product of two vectors is a matrix product: merge b and s into one dimension
# with `flatten(0, 1)`, then think about which of the two to turn round.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Only x and dL/dy are in it. dL/dy arrives in backward; x was there in forward and has to be there still. y is not
# needed, so a linear layer never keeps its output. (W is needed for dL/dx, but W stays anyway.)
# `torch.einsum("bso,bsi->oi", dy, x)` says the same.

# %% [markdown]
# ## 2 · The highest point
# **Difficulty** ●●○○○ · **11 minutes** · **Trains** thinking of a peak as a sum over what is alive together
#
# You are given the tensors of a training step, in no particular order, each as (name, bytes, born, died). Names may
# repeat. `born` and `died` are event numbers: event 0 comes first. `died` is `None` for what stays to the end.
#
# **The rule:** at each event, whatever dies is freed first; then what is born is allocated. So a tensor takes memory
# from its birth up to, but not including, the event of its death. One that dies at event 5 and one that is born at
# event 5 are never alive together.
#
# What is the largest number of bytes alive at once? Here is a small step to try it on.

# %%
check.STEP


# %%
def peak(tensors) -> int:
    """The most bytes alive at once; tensors is a list of (name, bytes, born, died)."""

    ### BEGIN SOLUTION Return the largest sum of bytes that are alive at the same time.
    def alive(event):
        return sum(size for _, size, born, died in tensors if born <= event and (died is None or event < died))

    return max(alive(born) for _, _, born, _ in tensors)
    ### END SOLUTION


# %%
check.peak(peak)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Draw each tensor of the small step as a bar from its birth to its death. A peak is a vertical line through the
# drawing.
#
# </details>
# <details><summary>Hint 2: how often to look</summary>
#
# Memory rises only where something is born. So it is enough to look at those events.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# For one event, add up the bytes of every tensor that is born by then and has not died. What never dies has no event to
# compare with. Then take the maximum over all events.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The check also hands you every tensor of a tiny GPT's real training step, some hundreds. There one event is one
# allocation or one free, so the rule is exact. The loop above looks at each birth anew; sorting the events once and
# keeping a running total gives the same in one pass.

# %% tags=["solution"]
lives, seen = check.real_step()
sizes = [size for _, size, _, _ in lives]
print(f"{len(lives):,} tensors of a step, traced on the CPU")
print(f"your peak:            {format_bytes(peak(lives))}, and by the tracker {format_bytes(seen)}")
print(f"all of them together: {format_bytes(sum(sizes))}")
print(f"the largest of them:  {format_bytes(max(sizes))}")

# %% [markdown]
# ## 3 · Weigh a training run
# **Difficulty** ●●●○○ · **19 minutes** · **Trains** finding every tensor that outlives a step
#
# After a step, what do a model and its optimizer hold? Ask the tensors themselves. Return a dictionary of bytes, with
# 0 for a kind that has no tensors:
#
# * `"weights"`: those in `model.parameters()`;
# * `"master_weights"`: those that the optimizer updates. `optimizer.param_groups` is a list of dictionaries, each with
#   a list under `"params"`;
# * `"gradients"`: the `.grad` of both. It may be `None`;
# * `"states"`: every tensor in `optimizer.state`, which has one dictionary per parameter. A counter counts if it is a
#   tensor. Not everything in there is one.
#
# Count *storages*, the memory behind tensors. A storage counts with all its bytes, even if the tensor is a slice of it,
# and only once, under the first kind in this list: often the optimizer updates the model's own weights. Here two
# parameters share a storage:

# %%
flat = torch.zeros(1000)
for p in (nn.Parameter(flat[:300]), nn.Parameter(flat[300:900].view(20, 30))):
    storage = p.untyped_storage()
    same = storage.data_ptr() == flat.untyped_storage().data_ptr()
    print(f"{p.nbytes:,} bytes, its storage {storage.nbytes():,}; that is flat's own: {same}")


# %%
KINDS = ("weights", "master_weights", "gradients", "states")


def weigh(model, optimizer) -> dict[str, int]:
    """Bytes of weights, master_weights, gradients and states, each storage once."""
    ### BEGIN SOLUTION Return a dictionary with the four keys, in bytes.
    held = [("weights", p) for p in model.parameters()]
    held += [("master_weights", p) for group in optimizer.param_groups for p in group["params"]]
    held += [("gradients", p.grad) for _, p in held if p.grad is not None]
    held += [("states", value) for state in optimizer.state.values() for value in state.values()]
    storages = {}
    for kind, tensor in held:
        if torch.is_tensor(tensor):
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return {kind: sum(size for one, size in storages.values() if one == kind) for kind in KINDS}
    ### END SOLUTION


# %%
check.weigh(weigh)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Collect first, weigh later. Make one list of pairs, a kind and a tensor, in the order in which the kinds are listed.
# For gradients, go through the parameters that you have collected so far.
#
# </details>
# <details><summary>Hint 2: each storage once</summary>
#
# Two tensors share memory if their storages have the same `data_ptr()`. Use it as a key of a dictionary. Then no
# storage can be in it twice.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The first kind wins: a storage that is in the dictionary already keeps its kind, as `setdefault` does it. Keep the
# kind and the storage's `nbytes()`, and add up by kind at the end.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A formula such as 16·N knows one recipe. This function knows them all: frozen layers, tied weights, states in 8 bits,
# a flat buffer of which a small slice keeps everything alive. Try it in a script of your own, right after
# `optimizer.step()`.
#
# Below, fp32 and bf16 with a master copy both come to 16 bytes per parameter at the end of backward. That is the ZeRO
# paper's count. So mixed precision saves nothing on these four kinds: it pays through activations and speed. And once
# the gradient has been copied to fp32, it is 18.

# %% tags=["solution"]
for dtype in (torch.float32, torch.bfloat16):
    model = nn.Linear(1024, 1024, bias=False, dtype=dtype)
    weight, master = model.weight, model.weight.detach().float()  # no copy if it is fp32 already
    optimizer = torch.optim.AdamW([master])
    for _ in range(2):
        model(torch.ones(1, 1024, dtype=dtype)).sum().backward()
        after_backward = weigh(model, optimizer)
        master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        after_step = weigh(model, optimizer)
        optimizer.zero_grad()
    for moment, held in {"backward": after_backward, "step": after_step}.items():
        parts = ", ".join(f"{kind.replace('_', ' ')} {size / weight.numel():.0f}" for kind, size in held.items())
        print(f"{dtype}, after the {moment}: {parts}, together {sum(held.values()) / weight.numel():.2f} bytes")

# %% [markdown]
# ## 4 · Make it fit
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** turning one estimate into a decision
#
# You want every optimizer step to learn from `global_batch` sequences, and your card is too small to take them at
# once. So you cut them into micro-batches of equal size, add up their gradients, and then step. What is the
# **largest** micro-batch that fits?
#
# It has to divide the global batch, and the estimated peak must not exceed `gpu(card).memory`, all that the card has
# (not `.room`). Return 0 if nothing fits. Start from `RUN` and use `estimate(...)`. (A V100 has no bf16 and no flash
# kernel. Ignore that: fp16 takes the same bytes.)

# %%
RUN = check.FIT_RUN
print(RUN)
print(f"one sequence alone: {format_bytes(estimate(RUN).total, 'GB', 1)}")
print(f"a V100-32GB has:    {format_bytes(gpu('V100-32GB').memory, 'GB', 1)}")


# %%
def largest_micro_batch(card: str, global_batch: int) -> int:
    """The largest micro-batch (sequences) that divides global_batch and whose estimated peak fits the card; else 0."""
    ### BEGIN SOLUTION Return a number of sequences.
    fitting = [0]
    for micro_batch in range(1, global_batch + 1):
        if global_batch % micro_batch == 0:
            run = RUN.replace(micro_batch=micro_batch, global_batch=global_batch)
            if estimate(run).total <= gpu(card).memory:
                fitting.append(micro_batch)
    return max(fitting)
    ### END SOLUTION


# %%
check.largest_micro_batch(largest_micro_batch)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `RUN.replace(micro_batch=4)` is the run with another micro-batch, `estimate(...).total` its peak in bytes, and
# `gpu("V100-32GB").memory` what the card has, in bytes too.
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# When the second micro-batch runs forward, the gradients of the first are there. The estimate knows that if you tell
# the run: `replace(micro_batch=..., global_batch=...)`, or with `accumulation_steps` in its place.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Try every number from 1 to the global batch, skip those that don't divide it, keep those that fit. Their maximum is
# the answer, and with an empty list `max(fitting, default=0)` gives 0.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Compare the two columns below. From two micro-batches on, the gradients stand there all through the next forward
# pass: 2 bytes a parameter more at the peak. So a part of what halving the batch saves goes to them, and where the
# card is nearly full that decides. And among the smallest, little is left to save: the states stay, whatever
# the batch.
#
# The rule takes a card's whole memory. A program gets less of it, and CUDA's context comes out of that. See the last
# line: on an RTX 3090 one sequence fits by so little that only the card itself can tell.

# %% tags=["solution"]
print(f"V100-32GB has {format_bytes(gpu('V100-32GB').memory, 'GB', 1)}")
for size in (1, 4, 8, 16, 32):
    alone = estimate(RUN.replace(micro_batch=size))
    among = estimate(RUN.replace(micro_batch=size, global_batch=32))
    print(f"micro-batch {size:2d}: {format_bytes(alone.total, 'GB', 1)} alone, "
          f"{format_bytes(among.total, 'GB', 1)} as one of {32 // size}, peak in {among.phase}")  # fmt: skip
print(f"largest that fits: {largest_micro_batch('V100-32GB', 32)} of 32, {largest_micro_batch('V100-32GB', 40)} of 40")
smallest, tight = estimate(RUN.replace(micro_batch=1, global_batch=32)).total, gpu("RTX3090-24GB")
print(f"RTX3090-24GB: {largest_micro_batch('RTX3090-24GB', 32)} of 32 leaves {format_bytes(tight.memory - smallest)}, "
      f"and {format_bytes(tight.room - smallest)} of what a program gets")  # fmt: skip

# %% [markdown]
# ## 5 · Find the leak
# **Difficulty** ●●●●○ · **14 minutes** · **Trains** knowing what keeps activations alive
#
# A colleague adds up the losses of several batches and steps once on their mean. It learns, but each further batch
# needs more memory. It trains for real here, on your processor: a tiny network, a few batches.

# %%
from torch.nn.functional import cross_entropy


def leaky_train(model, batches, optimizer) -> float:
    """One optimizer step on the mean loss of all batches; returns that mean."""
    total = 0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        total = total + loss
    mean = total / len(batches)
    mean.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean.item()


# %%
leaking = [size / 10**6 for size in check.memory_while_training(leaky_train, batches=6)[:-1]]
lines(
    {"leaky_train": (range(1, 7), leaking)},
    "Each batch leaves its activations behind",
    "batch whose forward pass begins",
    "MB allocated at that moment",
    provenance="traced on the CPU",
)

# %% [markdown]
# Write `train` so that it takes the **same** step and returns the same mean, but never holds the activations of more
# than one batch. The check calls it twice in a row, so leave no gradients behind. To see your own curve, put `train`
# into the cell above in place of `leaky_train`. One rise will stay, from the first batch to the second: the gradients.


# %%
def train(model, batches, optimizer) -> float:
    """One optimizer step on the mean loss of all batches, one batch's activations at a time; returns that mean."""
    ### BEGIN SOLUTION Return the mean loss as a plain number.
    total = 0.0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / len(batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total
    ### END SOLUTION


# %%
check.train(train)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# A loss is one number, but behind it hangs the graph of everything that made it, activations included. As long as
# anyone refers to the loss and backward has not used the graph, it all stays.
#
# </details>
# <details><summary>Hint 2: what frees a graph</summary>
#
# `backward()` frees what the graph has saved, as it goes. So let each batch's loss go backward before the next batch
# begins. Gradients of several backward passes add up by themselves.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The gradient of a mean is the sum of the gradients of its parts: divide each loss by `len(batches)` first. Add up
# `loss.item()`, a plain number. Step once, after the loop, and set the gradients to zero for the next call.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Run the cell below and look at its last row. One often reads that `total = total + loss` leaks, and that `.item()`
# or `.detach()` cures it. Here a third loop goes backward at once and *still* adds up the loss with its graph: it
# holds almost nothing more, because backward has emptied that graph. What leaks is a graph that no backward has used:
# a sum that waits for its backward, or a validation loop without `torch.no_grad()`. Add up plain numbers all the
# same: an emptied graph is no memory that you need.


# %% tags=["solution"]
def adds_up_graphs(model, batches, optimizer) -> float:
    """Backward at once, but the running total keeps each loss with its emptied graph."""
    total = 0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / len(batches)
        loss.backward()
        total = total + loss
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


for loop in (leaky_train, train, adds_up_graphs):
    second, *_, sixth, over = check.memory_while_training(loop, batches=6)[1:]
    print(f"{loop.__name__:15s} batch 2 begins at {second:,} bytes, batch 6 at {sixth:,}, after the step {over:,}")

# %% [markdown]
# **Optional: the figure in a report of your own.** `plot` hands a figure of this course to matplotlib, with the same
# numbers and colors. The Axes that it returns are yours: change the title, the size, anything. Then
# `ax.figure.savefig("leak.pdf")` writes what you see. `figure.save("leak.png")` writes the figure as it came.

# %% tags=["nbval-ignore-output", "this-machine"]
curve = {"leaky_train": (range(1, 7), leaking)}
figure = lines(curve, "A leak", "batch", "MB allocated", provenance="traced on the CPU")
ax = figure.plot()
ax.set_title("What my training loop kept")
ax.figure.set_size_inches(6, 3)

# %% [markdown]
# ## 6 · Read a timeline
# **Difficulty** ●●●●● · **25 minutes** · **Trains** diagnosing a run that you cannot look into
#
# Someone sends you a measurement of GPT-2's training step and forgets to say what was run. You know the model, `gpt2`,
# and the length of its sequences. Find out the rest from memory alone: the micro-batch, the precision (`"fp32"`,
# `"amp-bf16"` or `"bf16-master"`) and whether blocks are recomputed (`"none"` or `"full"`).
#
# The list of tensors has been taken out. What you have: `measurement.moments`, a dictionary of breakdowns by kind ("end
# of forward", "after loss", "end of backward", …), and `measurement.timeline`, whose `curves()` has bytes by kind after
# each event and whose `marks` say at which event each phase begins: a mark has `.step` (1 or 2), `.phase` and `.event`.
# Here are two runs that you *can* look into.

# %%
keeping = measure(TrainingRun("gpt2", micro_batch=4, seq_len=256, precision="amp-bf16"), source="simulated")
timeline(keeping, "Nothing is recomputed here: look at backward", steps=[2])

# %%
again = TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="bf16-master", recompute="full")
recomputing = measure(again, source="simulated")
timeline(recomputing, "Every block is recomputed here: what is different in backward?", steps=[2])

# %%
print(keeping.moments["end of forward"])
print(f"inputs: {keeping.moments['end of forward']['inputs']:,} bytes")
print([(mark.event, mark.phase) for mark in keeping.timeline.marks if mark.step == 2])


# %%
def read_timeline(measurement, seq_len: int) -> dict:
    """The micro_batch, precision and recompute of the run that was measured, as a TrainingRun spells them."""
    ### BEGIN SOLUTION Return a dictionary with the keys micro_batch, precision and recompute.
    forward = measurement.moments["end of forward"]
    micro_batch = forward["inputs"] // (2 * 8 * seq_len)  # token ids and targets, 8 bytes each
    precision = "amp-bf16" if forward["weight_copies"] else "fp32"
    if forward["optimizer_states"] > 4 * forward["parameters"]:  # 12 bytes beside 2, not 8 beside 4
        precision = "bf16-master"
    begins = {mark.phase: mark.event for mark in measurement.timeline.marks}  # the last step's remain
    in_backward = measurement.timeline.changes[begins["backward"] : begins["optimizer"]]
    rises = any(change > 0 and kind == "activations" for change, kind in in_backward)
    return {"micro_batch": micro_batch, "precision": precision, "recompute": "full" if rises else "none"}
    ### END SOLUTION


# %%
check.read_timeline(read_timeline)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take the three questions one by one. Which kind of memory knows nothing but s and b? Which ratio between two kinds
# is a matter of number formats alone? Which phase does recomputation happen in?
#
# </details>
# <details><summary>Hint 2: what to compare</summary>
#
# The inputs are two tensors of 64-bit integers: token ids and targets. Optimizer states over parameters is one ratio
# with master weights and another without. Autocast keeps something that fp32 has no use for, at the end of forward.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Cut `curves()["activations"]` from the mark of the last backward to that of the last optimizer phase. Without
# recomputation it never rises there. Watch out: a low peak proves nothing, since a small batch is low as well.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Ratios are safer than heights. States over parameters is 8/4 in fp32 and under autocast, 12/2 with master weights,
# whatever the model. Inputs are 16·s·b bytes, whatever the rest. And recomputation is a matter of *shape*: in
# backward, activations come back once for each block. You have even counted the blocks if you count the teeth:

# %% tags=["solution"]
from itertools import pairwise

marks = {mark.phase: mark.event for mark in recomputing.timeline.marks}
in_backward = recomputing.timeline.changes[marks["backward"] : marks["optimizer"]]
rising = [change > 0 for change, kind in in_backward if kind == "activations"]
teeth = sum(not before and now for before, now in pairwise(rising))
print(f"{teeth} teeth in one backward pass, {again.model.layers} blocks in {again.model.name}")
print(read_timeline(keeping, seq_len=256))
print(read_timeline(recomputing, seq_len=512))

# %% [markdown]
# ## Take home
# **Remember** Memory is held by whoever still needs it, or still refers to it. A peak is a sum over those that are
# alive together.
#
# **Breaks when** you look at one micro-batch and forget what stands beside it: the gradients of those that came
# before.
#
# **Cheat-sheet line** dL/dW = dL/dyᵀ·x keeps x · inputs 16·s·b bytes · states over parameters: 2 (fp32, autocast) or
# 6 (16-bit with master weights).
