# ---
# jupyter:
#   course:
#     minutes: 57
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 01 · Where did the memory go?
#
# **57 minutes** for all four; each one says its own. You should know what [lesson
# 01](../notebooks/01_where_did_the_memory_go.ipynb) shows, and Python's dictionaries and loops. You need no GPU.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check says what is off,
# never the answer. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at the first
# unsolved check.)

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from course_utils import estimate, format_bytes, gpu
from course_utils.lessons.one_step import checks as check
from course_utils.figures import lines, show

# %% [markdown]
# ## 1 · The highest point
# **Difficulty** ●●○○○ · **11 minutes** · **Trains** thinking of a peak as a sum over what is alive together
#
# Return the largest number of bytes that are alive at the same time. `tensors` is a list with the tensors of a training
# step, in no particular order, each as (name, bytes, born, died). Names may repeat. `born` and `died` are numbers of
# events; event 0 is the first. `died` is `None` for a tensor that stays to the end.
#
# **The rule:** at each event, tensors that die are freed first, then tensors that are born are allocated. So a tensor
# takes memory from the event of its birth up to, but not including, the event of its death. If one dies at event 5 and
# another is born at event 5, the two are never alive together.
#
# Here is a small step to try it on.

# %%
check.STEP


# %%
def peak(tensors) -> int:
    """Return the most bytes alive at once; tensors is a list of (name, bytes, born, died)."""

    ### BEGIN SOLUTION Return the largest sum of bytes that are alive at the same time.
    def alive(event):
        total = 0
        for _, size, born, died in tensors:
            if born <= event and (died is None or event < died):
                total += size
        return total

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
# Memory rises only when something is born. So it is enough to look at those events.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# For one event, add up the bytes of every tensor that has been born and has not died yet. A tensor that never dies has
# no number to compare with. Then take the maximum over all events.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The check also gives you every tensor of a tiny GPT's real training step, several hundred of them. In that list one
# event is one allocation or one free, so the rule is exact. The loop above adds up all tensors again at each birth. If
# you sort the events once and keep a running total, one pass is enough.

# %% tags=["solution"]
lives, seen = check.real_step()
sizes = [size for _, size, _, _ in lives]
print(f"{len(lives):,} tensors of a step, traced on the CPU")
print(f"your peak:            {format_bytes(peak(lives))}, the tracker's {format_bytes(seen)}")
print(f"all of them together: {format_bytes(sum(sizes))}")
print(f"the largest of them:  {format_bytes(max(sizes))}")

# %% [markdown]
# ## 2 · Weigh a training run
# **Difficulty** ●●●○○ · **19 minutes** · **Trains** finding every tensor that outlives a step
#
# Count the bytes that a model and its optimizer hold after a step. Ask the tensors themselves, and return a dictionary
# of bytes, with 0 for a kind that has no tensors:
#
# * `"weights"`: the tensors in `model.parameters()`;
# * `"master_weights"`: the tensors that the optimizer updates. `optimizer.param_groups` is a list of dictionaries, each
#   with a list under `"params"`;
# * `"gradients"`: the `.grad` of both. It may be `None`;
# * `"states"`: every tensor in `optimizer.state`, which has one dictionary per parameter. A counter counts if it is a
#   tensor. Not everything in these dictionaries is a tensor.
#
# Count *storages*, the memory behind tensors. A storage counts with all its bytes, even if the tensor is only a slice
# of it. It counts only once, under the first kind in this list: often the optimizer updates the model's own weights.
# Here two parameters share a storage:

# %%
flat = torch.zeros(1000)
for p in (nn.Parameter(flat[:300]), nn.Parameter(flat[300:900].view(20, 30))):
    storage = p.untyped_storage()
    same = storage.data_ptr() == flat.untyped_storage().data_ptr()
    print(f"{p.nbytes:,} bytes, its storage {storage.nbytes():,}; the storage of flat: {same}")


# %%
KINDS = ("weights", "master_weights", "gradients", "states")


def weigh(model, optimizer) -> dict[str, int]:
    """Return the bytes of weights, master_weights, gradients and states, each storage once."""
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
# Collect first, count later. Make one list of pairs, a kind and a tensor, with the kinds in the order of the list
# above. For gradients, go through the parameters that you have collected so far.
#
# </details>
# <details><summary>Hint 2: each storage once</summary>
#
# Two tensors share memory if their storages have the same `data_ptr()`. Use it as the key of a dictionary. Then no
# storage can be in it twice.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The first kind wins: a storage that is already in the dictionary keeps its kind. `setdefault` does this. Store the
# kind and the storage's `nbytes()`, and add up by kind at the end.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A formula such as 16·N is right for one recipe. This function is right for all of them: frozen layers, tied weights,
# states in 8 bits, a small slice that keeps a whole flat buffer alive. Try it in a script of your own, right after
# `optimizer.step()`.
#
# Below, fp32 and bf16 with a master copy both take 16 bytes per parameter at the end of backward. This is the ZeRO
# paper's count. So mixed precision saves nothing on these four kinds: it saves activations and time. And once the
# gradient has been copied to fp32, the 16 bytes become 18.

# %% tags=["solution"]
for dtype in (torch.float32, torch.bfloat16):
    model = nn.Linear(1024, 1024, bias=False, dtype=dtype)
    weight = model.weight
    master = weight.detach().float()  # no copy if it is fp32 already
    optimizer = torch.optim.AdamW([master])
    for _ in range(2):
        model(torch.ones(1, 1024, dtype=dtype)).sum().backward()
        after_backward = weigh(model, optimizer)
        master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        after_step = weigh(model, optimizer)
        optimizer.zero_grad()
    for moment, held in {"backward": after_backward, "step": after_step}.items():
        each = {kind.replace("_", " "): size / weight.numel() for kind, size in held.items()}
        parts = ", ".join(f"{kind} {size:.0f}" for kind, size in each.items())
        together = sum(held.values()) / weight.numel()
        print(f"{dtype}, after the {moment}: {parts}, together {together:.2f} bytes")

# %% [markdown]
# ## 3 · Make it fit
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** turning one estimate into a decision
#
# Return the **largest** micro-batch, in sequences, that fits `card`. Every optimizer step must learn from
# `global_batch` sequences, but the card is too small to take them all at once. So you cut them into micro-batches of
# equal size, add up their gradients, and then step.
#
# The micro-batch must divide the global batch. The estimated peak must not exceed `gpu(card).room`, what a program gets
# of the card (`gpu(card).memory` is what the driver lists). Return 0 if nothing fits. Start from `RUN` and use
# `estimate(...)`. (A V100 has no bf16 and no flash kernel. Ignore that: fp16 takes the same bytes.)

# %%
RUN = check.FIT_RUN
print(RUN)
print(f"a single sequence:  {format_bytes(estimate(RUN).total, 'GB', 1)}")
print(f"on a V100-32GB, a program gets {format_bytes(gpu('V100-32GB').room, 'GB', 1)}")


# %%
def largest_micro_batch(card: str, global_batch: int) -> int:
    """Return the largest micro-batch that divides global_batch and fits by estimate; else 0."""
    ### BEGIN SOLUTION Return a number of sequences.
    fitting = [0]
    for micro_batch in range(1, global_batch + 1):
        if global_batch % micro_batch == 0:
            run = RUN.replace(micro_batch=micro_batch, global_batch=global_batch)
            if estimate(run).total <= gpu(card).room:
                fitting.append(micro_batch)
    return max(fitting)
    ### END SOLUTION


# %%
check.largest_micro_batch(largest_micro_batch)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `RUN.replace(micro_batch=4)` is the run with another micro-batch, `estimate(...).total` is its peak in bytes, and
# `gpu("V100-32GB").room` is what a program gets of the card, also in bytes.
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# When the second micro-batch runs forward, the gradients of the first are already there. The estimate includes them if
# the run says how many micro-batches there are: `replace(micro_batch=..., global_batch=...)`, or `accumulation_steps`
# instead of `global_batch`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Try every number from 1 to the global batch, skip those that don't divide it, keep those that fit. Their maximum is
# the answer. With an empty list, `max(fitting, default=0)` gives 0.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Compare the two columns below. From two micro-batches on, the gradients persist through the whole next forward pass: 2
# bytes per parameter more at the peak. They take back a part of what you save when you halve the batch. Where the card
# is nearly full, that part decides. Among the smallest micro-batches there is little left to save, because the states
# stay, whatever the batch.
#
# The rule counts tensors. CUDA's context and the rests of blocks must also fit in what a program gets (lesson 12). See
# the last line: on an RTX 3090, one sequence leaves less than a context takes. In practice it does not fit.

# %% tags=["solution"]
print(f"on a V100-32GB, a program gets {format_bytes(gpu('V100-32GB').room, 'GB', 1)}")
for size in (1, 4, 8, 16, 32):
    alone = estimate(RUN.replace(micro_batch=size))
    among = estimate(RUN.replace(micro_batch=size, global_batch=32))
    print(
        f"micro-batch {size:2d}: {format_bytes(alone.total, 'GB', 1)} on its own, "
        f"{format_bytes(among.total, 'GB', 1)} as one of {32 // size}, peak in {among.phase}"
    )
print(
    f"largest that fits: {largest_micro_batch('V100-32GB', 32)} of 32, "
    f"{largest_micro_batch('V100-32GB', 40)} of 40"
)
smallest = estimate(RUN.replace(micro_batch=1, global_batch=32)).total
tight = gpu("RTX3090-24GB")
fits, left = largest_micro_batch(tight.name, 32), format_bytes(tight.room - smallest)
print(f"{tight.name}: {fits} of 32 leaves {left} of what a program gets")

# %% [markdown]
# ## 4 · Find the leak
# **Difficulty** ●●●●○ · **14 minutes** · **Trains** knowing what keeps activations alive
#
# A colleague's loop adds up the losses of several batches and takes one step on their mean. It learns, but each further
# batch needs more memory. Here it really trains a tiny network on your processor, on a few batches.

# %%
from torch.nn.functional import cross_entropy


def leaky_train(model, batches, optimizer) -> float:
    """Take one optimizer step on the mean loss of all batches; return that mean."""
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
    "Each batch leaves its activations in memory",
    "batch whose forward pass begins",
    "MB allocated at that moment",
    provenance="traced on the CPU",
)

# %% [markdown]
# Write `train`: it takes the **same** step and returns the same mean as a plain number, but never holds the activations
# of more than one batch. The check calls it twice in a row, so leave no gradients behind.
#
# To see your own curve, put `train` into the cell above in place of `leaky_train`. One rise will stay, from the first
# batch to the second: the gradients.


# %%
def train(model, batches, optimizer) -> float:
    """Step once on the mean loss of all batches, one batch's activations at a time; return it."""
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
# A loss is one number, but it holds the graph of everything that made it, activations included. All of it stays as long
# as anyone refers to the loss and backward has not used the graph.
#
# </details>
# <details><summary>Hint 2: what frees a graph</summary>
#
# `backward()` frees the saved tensors of the graph as it goes. So call it on each batch's loss before the next batch
# begins. The gradients of several backward passes add up by themselves.
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
# Run the cell below and look at its last row. One often reads that `total = total + loss` leaks, and that `.item()` or
# `.detach()` cures it. The third loop here calls backward at once and *still* adds up the loss with its graph. It holds
# almost nothing more, because backward has emptied that graph. A graph leaks if no backward has used it: in a sum that
# waits for its backward, or in a validation loop without `torch.no_grad()`. Add up plain numbers all the same: you do
# not need the emptied graphs.


# %% tags=["solution"]
def adds_up_graphs(model, batches, optimizer) -> float:
    """Call backward at once, but keep each loss with its emptied graph in the running total."""
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
    print(
        f"{loop.__name__:15s} batch 2 begins at {second:,} bytes, batch 6 at {sixth:,}, "
        f"after the step {over:,}"
    )

# %% [markdown]
# **Optional: the figure in a report of your own.** The course's functions draw on Axes of yours: change the title, the
# size, anything. `fig.savefig("leak.pdf")` writes what you see.

# %% tags=["nbval-ignore-output", "this-machine"]
curve = {"leaky_train": (range(1, 7), leaking)}
fig, ax = plt.subplots(figsize=(6, 3))
lines(curve, "A leak", "batch", "MB allocated", ax=ax)
ax.set_title("What my training loop kept")
show(fig, "The line rises with every batch: the loop keeps each batch's graph.")

# %% [markdown]
# ## Take home
# **Remember** A tensor stays allocated while something needs it or refers to it. A peak is the sum of what is alive
# together.
#
# **Breaks when** you look at one micro-batch and forget the gradients of those that came before it.
#
# **Cheat-sheet line** $dL/dW = (dL/dy)^T x$ keeps x · inputs 16·s·b bytes · states over parameters: 2 (fp32, autocast)
# or 6 (16-bit with master weights).
