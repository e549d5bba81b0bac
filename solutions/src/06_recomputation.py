# ---
# jupyter:
#   course:
#     minutes: 73
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 06 · Recomputation
#
# **73 minutes** for all four; each one says its own. You should know what [lesson
# 06](../notebooks/06_recomputation.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints. Open one at a time. (“Run All Cells” stops at
# the first unsolved check.)

# %%
from contextlib import contextmanager
from functools import partial
from itertools import count

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from course_utils import format_bytes
from course_utils.lessons.recomputation import checks as check
from course_utils.lessons.shared.judging import counted, forward_backward

aten = torch.ops.aten

# %% [markdown]
# ## 1 · Only the cheap part
# **Difficulty** ●●○○○ · **8 minutes** · **Trains** seeing who keeps a tensor, before running anything again
#
# Write `mlp(x, up, down)`: it returns down(gelu(up(x))), keeps `up`'s output, and computes GELU's output again in
# backward. Use `checkpoint`. No matrix product may run a second time. x is (tokens, h), `up` and `down` are
# `nn.Linear`.
#
# Normally the MLP keeps x, the 4h numbers per token from `up`, and the 4h numbers from GELU. GELU is cheap to run
# again, `up` is not. (x is kept anyway: as a linear layer, `up` keeps its input.)
#
# A checkpoint around GELU alone looks like the solution. Look at the bytes first.

# %%
x = torch.randn(1024, 256)
up, down = nn.Linear(256, 1024), nn.Linear(1024, 256)
ways = {
    "everything kept": lambda x: down(F.gelu(up(x))),
    "GELU runs again": lambda x: down(checkpoint(F.gelu, up(x), use_reentrant=False)),
}
for name, way in ways.items():
    ran = forward_backward(way, [x], [*up.parameters(), *down.parameters()])
    print(name, format_bytes(ran.kept, "MB", 1), "(traced on the CPU)")


# %%
def mlp(x: torch.Tensor, up: nn.Linear, down: nn.Linear) -> torch.Tensor:
    """Return down(gelu(up(x))), keeping x and up's output, and running no product again."""

    ### BEGIN SOLUTION Return the output, (tokens, h).
    def from_activation(z):
        return down(F.gelu(z))

    return checkpoint(from_activation, up(x), use_reentrant=False)
    ### END SOLUTION


# %%
check.mlp(mlp)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `checkpoint` keeps what goes in, but not what is made inside. In the cell above, GELU's output *comes out* of the
# checkpoint. Who reads it then?
#
# </details>
# <details><summary>Hint 2: who keeps it?</summary>
#
# A linear layer keeps its input for its weight's gradient. So GELU's output must lie between two operations that are
# both inside the checkpoint.
#
# </details>
# <details><summary>Hint 3: and the product?</summary>
#
# Remember the lesson's early stop: the second forward ends as soon as it has made everything that backward needs.
# Backward does not need the result of a last product. Which `use_reentrant` stops early?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A tensor goes away only if *nobody* outside of the checkpoint keeps it. The layer after GELU keeps GELU's output, so
# that layer belongs inside, too. Its product does not run again: once GELU has made the layer's input, backward has
# everything it needs. That frees 4 of 9 numbers per token and unit of h, and repeats no matrix product.

# %% tags=["solution"]
for name, way in {**ways, "GELU and down in one": lambda x: mlp(x, up, down)}.items():
    ran, flops = counted(way, [x], [*up.parameters(), *down.parameters()])
    print(f"{name:20s} {format_bytes(ran.kept, 'MB', 1)}, {flops:,} FLOPs (traced on the CPU)")

# %% [markdown]
# ## 2 · In groups
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** using `checkpoint`, and not falling into its traps
#
# Write `in_groups(blocks, x, k)`: it runs `x` through a list of blocks, with one checkpoint for every k of them, and
# returns the output of the last block. If k does not divide the number of blocks, the last group is smaller.
#
# Gradients must equal those of a network that keeps everything. This must hold with dropout in the blocks, and if x
# requires no gradient, as after a frozen embedding. Change neither the list nor x.


# %%
def in_groups(blocks, x, k):
    """Run x through all blocks in turn, keeping only each group's input."""

    ### BEGIN SOLUTION Return the output of the last block.
    def run(group, x):
        for block in group:
            x = block(x)
        return x

    for first in range(0, len(blocks), k):
        x = checkpoint(run, blocks[first : first + k], x, use_reentrant=False)
    return x
    ### END SOLUTION


# %%
check.in_groups(in_groups)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `blocks[first : first + k]` is a group. For the last group, Python's slice just stops at the end.
#
# </details>
# <details><summary>Hint 2: one function for a group</summary>
#
# Write a function that runs x through one group, and pass it to `checkpoint`, which takes further arguments, too.
# `checkpoint(run, group, x, use_reentrant=False)` calls `run(group, x)`.
#
# </details>
# <details><summary>Hint 3: the trap</summary>
#
# The function runs again in backward, long after your loop has ended. If it looks up `group` or `first` from the loop,
# it then finds the *last* one. Pass the group as an argument instead.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A closure looks up its variables when it runs. A checkpointed function runs twice, the second time after the loop.
# Sometimes PyTorch notices that the second run saved other tensors than the first. If the shapes agree, nobody notices,
# and the gradients are wrong. So pass what changes as an argument. The other trap is the older variant: with
# `use_reentrant=True` and an x that requires no gradient, no weight gets a gradient.

# %% [markdown]
# ## 3 · Worth its bytes
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** a selective policy that knows what it pays
#
# Write `worth(least)`. It returns a policy that keeps only the matrix products with at least `least` FLOPs per byte of
# their result. (The lesson's *selective* policy keeps every product, but some are expensive to run again and some are
# not.)
#
# A policy is a function that `checkpoint` asks about each operator, in both runs. It returns
# `CheckpointPolicy.MUST_SAVE` for a product to keep, and `CheckpointPolicy.PREFER_RECOMPUTE` for everything else. It
# must give the same answer to the same question in both runs. Several policies may be in use at once.
#
# Products come as `aten.mm.default` (left, right), `aten.bmm.default` (stacks of left and of right), and
# `aten.addmm.default` (bias, left, right). left has the shape (…, rows, inner), right (…, inner, columns). Count 2 ·
# rows · inner · columns FLOPs for each product of two matrices, without the bias. The result has left's dtype. The
# policy below keeps nothing, and prints what it sees.


# %%
def show_all(ctx, op, *args, **named):
    if not ctx.is_recompute:
        print(op, [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)])
    return CheckpointPolicy.PREFER_RECOMPUTE


block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False), nn.GELU())
contexts = partial(create_selective_checkpoint_contexts, show_all)
checkpoint(block, torch.randn(32, 64), use_reentrant=False, context_fn=contexts).sum().backward()


# %%
def worth(least: float):
    """A policy that keeps only products of at least `least` FLOPs per byte of their result."""

    ### BEGIN SOLUTION Return a function policy(ctx, op, *args, **named).
    def policy(ctx, op, *args, **named):
        if op in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            left = args[-2]  # a bias comes before it
            flops, size = 2 * left.shape[-1], left.element_size()  # of one number of the result
            if flops >= least * size:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
    ### END SOLUTION


# %%
check.worth(worth)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Define the policy inside `worth`, so that it knows `least`. `op in (…)` tells whether the operator is a product.
#
# </details>
# <details><summary>Hint 2: FLOPs per byte</summary>
#
# Rows and columns are in the FLOPs and in the bytes, so they cancel. Look at one number of the result: how many FLOPs
# does it take, and how many bytes?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# left and right are the *last* two of `args`, with a bias or without. `tensor.element_size()` is the bytes of one
# number.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each number of the result is a sum over the inner dimension: 2 · inner FLOPs, for 2 or 4 bytes. The MLP's second
# product has the inner dimension 4h, so a kept byte of it saves four times as much as a byte of the first. Attention
# scores are the other extreme. Their inner dimension is one head's width, and they are the largest tensors of all. If
# memory is short, keep the products with the longest inner dimension. (A product at the very end does not run again
# anyway.)

# %% tags=["solution"]
x = torch.randn(1024, 64)
for least in (0, 33, 129):
    keep = partial(create_selective_checkpoint_contexts, worth(least))
    again = partial(checkpoint, block, use_reentrant=False, context_fn=keep)
    ran, flops = counted(again, [x], block.parameters())
    kept = f"{format_bytes(ran.kept, 'MB', 2)} kept, {flops:,} FLOPs in all (traced on the CPU)"
    print(f"from {least:3d} FLOPs per byte: {kept}")

# %% [markdown]
# ## 4 · A checkpoint of your own
# **Difficulty** ●●●●● · **40 minutes** · **Trains** the whole of `checkpoint`, written once by yourself
#
# Write `own_checkpoint(function, *inputs)`, without `torch.utils.checkpoint`. It returns `function(*inputs)`, a tensor.
# It keeps the inputs themselves, no copies, and nothing else. (The lesson's `Recomputed` takes one input, and its
# second forward does not repeat the first.) Backward runs once. In it, `function` runs once more:
#
# - under the random state of the first run: the CPU's and, for inputs on "cuda", that GPU's. Afterwards your caller's
#   random numbers continue as if nothing had run again;
# - under the autocast of the first run, for the inputs' type of device: enabled or not, and its dtype.
#
# All inputs are tensors on one device. At least one requires a gradient. Others, such as token ids, do not, and must
# not in the second run. Change no input, in forward or in backward: neither its values nor its `requires_grad`. Weights
# inside `function` get their gradients. Under `no_grad`, keep nothing. No early stop is needed.
#
# Read the states with `torch.get_rng_state()`, `torch.cuda.get_rng_state(device)`, `torch.is_autocast_enabled(kind)`
# and `torch.get_autocast_dtype(kind)`, where kind is "cpu" or "cuda". Use a `Function` or
# `saved_tensors_hooks(pack, unpack)`, as you like. The check calls only `own_checkpoint`. The first cell is for the
# states: use it, or leave it.


# %%
def states_of(x: torch.Tensor):
    """Return a function; inside `with states_of(x)():`, random states and autocast are as now."""
    ### BEGIN SOLUTION Return a function; or solve it all in the next cell.
    kind = x.device.type
    gpus = [x.device] if x.is_cuda else []
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    on_cpu = torch.get_rng_state()
    on_gpus = [torch.cuda.get_rng_state(gpu) for gpu in gpus]

    @contextmanager
    def as_they_were():
        with torch.random.fork_rng(gpus), torch.autocast(kind, dtype, enabled):
            torch.set_rng_state(on_cpu)
            for gpu, state in zip(gpus, on_gpus, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield

    return as_they_were
    ### END SOLUTION


# %%
def own_checkpoint(function, *inputs):
    """Return function(*inputs), keeping only the inputs for backward, which runs it again."""
    ### BEGIN SOLUTION Return what function returns, so that backward runs it again.
    as_they_were = states_of(inputs[0])
    places, again = count(), {}

    def unpack(place):
        if place not in again:
            made = []
            noting = saved_tensors_hooks(lambda one: made.append(one.detach()), lambda _: None)
            with as_they_were(), torch.enable_grad(), noting:
                function(*inputs)
            again.update(enumerate(made))
        return again.pop(place)

    with saved_tensors_hooks(lambda _: next(places), unpack):
        return function(*inputs)
    ### END SOLUTION


# %%
check.own_checkpoint(own_checkpoint)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# With a `Function`, begin with the lesson's: `save_for_backward(*inputs)`, and detach each input in backward. Those
# that required a gradient must require one again, and no others. With hooks, `pack` returns a number. `unpack` runs
# `function` under hooks of its own, which note each tensor in turn.
#
# </details>
# <details><summary>Hint 2: the states</summary>
#
# Read them *before the first run*, and set them only around the second run. The two random states have a
# `set_rng_state` each. With inputs on a GPU, some numbers may still be drawn on the CPU.
#
# </details>
# <details><summary>Hint 3: and put back</summary>
#
# `torch.random.fork_rng` is a context that restores the state of the CPU and of each device in its list.
# `torch.autocast` takes the type of device, a dtype, and whether it is enabled. Autograd is off in backward: turn it
# on. A `Function`'s backward returns one item for each argument of its forward: `None` for `function` and for whatever
# requires no gradient.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# These are PyTorch's own two variants without their options. The one with a `Function` enters autograd a second time,
# so it works only if an input requires a gradient. The one with hooks leaves the first graph in place and makes only
# its tensors again, so weights always get their gradients. Neither can restore what it does not know: a generator of
# your own, or batch norm's running mean, which the second run updates once more.

# %% tags=["solution"]
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
x = torch.randn(1024, 256)
for name, call in {"kept": lambda function, x: function(x), "run again": own_checkpoint}.items():
    ran = forward_backward(partial(call, layers), [x], layers.parameters())
    kept = f"{format_bytes(ran.kept, 'MB', 1)} (traced on the CPU)"
    print(f"{name:10s} {kept}, gradient of x: norm {ran.gradients[0].norm():.1f}")
