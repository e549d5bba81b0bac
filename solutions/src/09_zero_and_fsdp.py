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
# # Exercises 09 · ZeRO and FSDP
#
# **88 minutes** for all five; each one says its own. You should know what [lesson
# 09](../notebooks/09_zero_and_fsdp.ipynb) shows. No GPU is needed. Two of the checks start four processes.
#
# Each exercise asks for one function or class. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.nn.utils import vector_to_parameters

from course_utils import format_bytes
from course_utils.lessons.sharding import checks as check

# %% [markdown]
# ## 1 · One rank's bytes
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** the three stages, with any number formats
#
# N parameters, D ranks. For each parameter there are `weight` bytes of weights, `gradient` bytes of gradients and
# `optimizer` bytes of optimizer states. Return the bytes that one rank keeps at ZeRO's stage 0 (nothing cut), 1, 2 or
# 3, without rounding.


# %%
def rank_bytes(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> float:
    """Bytes of states on one of D ranks."""
    ### BEGIN SOLUTION Return a number of bytes.
    parts = {3: weight, 2: gradient, 1: optimizer}  # by the first stage that cuts them
    return sum(each * N / (D if stage >= first else 1) for first, each in parts.items())
    ### END SOLUTION


# %%
check.rank_bytes(rank_bytes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# There are three terms, one for each kind. Each is divided by D or it is not.
#
# </details>
# <details><summary>Hint 2: which is divided?</summary>
#
# From stage 1 on the optimizer's states are. What comes next at stage 2, and last at stage 3?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `optimizer * N / (D if stage >= 1 else 1)` is one of the three terms.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The largest kind is cut first: with K = 12 stage 1 alone takes most away. What is not cut is a floor for any D.

# %% tags=["solution"]
for stage in range(4):
    print(f"stage {stage}: {rank_bytes(7_500_000_000, 64, stage, 2, 2, 12) / 1e9:.1f} GB")

# %% [markdown]
# ## 2 · The padding of odd shards
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** how FSDP2 cuts
#
# FSDP2 cuts each parameter along its first dimension, its rows, into D pieces. All have the same number of rows, the
# smallest that is enough. The last pieces are padded; some ranks may have nothing but padding. Given the `shapes` of a
# unit's parameters, of one dimension or more, return a dictionary: `shard`, how many numbers one rank's pieces hold
# together, and `padding`, how many of the numbers in all D ranks' pieces together are padding.


# %%
def padding(shapes: list[tuple[int, ...]], D: int) -> dict[str, int]:
    """Numbers in one rank's shard of parameters of these shapes, and padding in all D shards together."""
    ### BEGIN SOLUTION Return a dictionary with the keys shard and padding.
    shard = 0
    for rows, *others in shapes:
        shard += -(-rows // D) * prod(others)
    return {"shard": shard, "padding": D * shard - sum(prod(shape) for shape in shapes)}
    ### END SOLUTION


# %%
check.padding(padding)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take one parameter of shape (10, 6) on 3 ranks. How many rows does each rank get? How many numbers is that?
#
# </details>
# <details><summary>Hint 2: rounding up</summary>
#
# `-(-rows // D)` is rows / D, rounded up. `prod(shape[1:])` is how many numbers a row has; for a vector it is 1.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# All shards together hold D · shard numbers. How many of those are real?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each parameter is rounded up by itself, by whole rows. So a long, thin matrix on many ranks pads little, and a short
# vector a lot: on 64 ranks a bias of 3 numbers becomes 64.

# %% tags=["solution"]
for D in (8, 64, 512):
    found = padding([(50257, 768), (1024, 768), (768,), (768,)], D)
    print(f"GPT-2's embeddings and last norm on {D:3d} ranks: {found}")

# %% [markdown]
# ## 3 · Adam, cut among four
# **Difficulty** ●●●○○ · **30 minutes** · **Trains** ZeRO-1 on real ranks: a reduce-scatter, a step, an all-gather
#
# `parameters` are fp32 weights, the same on every rank. Before each step, `.grad` has the gradient of this rank's data.
# ZeRO-1 lays all parameters into one vector, pads it with zeros, and cuts it into D equal slices. Rank r owns slice r:


# %%
def padded(tensors):
    """All numbers of `tensors` in one vector, with as many zeros at its end as equal slices need."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(vector, (0, -len(vector) % dist.get_world_size()))


# %% [markdown]
# Complete the class. `step()` takes Adam's step on the mean of all ranks' gradients, and makes two exchanges in all, of
# the whole vector: `dist.reduce_scatter_tensor(own, whole)`, which adds up, and `dist.all_gather_into_tensor(whole,
# own)`. Both write into their first argument, a tensor that you make before. Afterwards the given parameters have the
# new weights.
#
# Besides the given parameters and their `.grad`, your object keeps at most 16 bytes per number of *its slice*, between
# steps and before the first: the slice's weights, its gradient, and two moments, 4 bytes each. `torch.optim.Adam` takes
# any list of tensors, and steps those that have a `.grad`. `vector_to_parameters(vector, parameters)` puts a flat
# vector's numbers into parameters, which then are views of it, and ignores what is left.
#
# The check runs your class on four processes, for weights of 1,053, 16 and 3 numbers; of 3, the last rank owns padding
# alone. Use nothing from other cells but `padded` and the imports. What your cell imports and defines goes along.


# %%
class Zero1Adam:
    """Adam whose states are cut: each rank keeps those of its own slice of all parameters."""

    def __init__(self, parameters: list[nn.Parameter], lr: float):
        ### BEGIN SOLUTION Keep this rank's slice of the weights, and an Adam for it.
        self.parameters = parameters
        self.own = padded(parameters).chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.adam = torch.optim.Adam([self.own], lr=lr)
        ### END SOLUTION

    def step(self):
        ### BEGIN SOLUTION Reduce-scatter, step, all-gather.
        gradients = padded([weight.grad for weight in self.parameters])
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_tensor(self.own.grad, gradients)
        self.own.grad /= dist.get_world_size()
        self.adam.step()
        dist.all_gather_into_tensor(whole := torch.empty_like(gradients), self.own)
        vector_to_parameters(whole, self.parameters)
        ### END SOLUTION


# %%
check.zero_1_adam(Zero1Adam)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `padded(parameters)` has D slices, and `chunk` cuts it. A slice is a view: unless you `clone` it, the whole vector
# stays in memory.
#
# </details>
# <details><summary>Hint 2: reduce-scatter</summary>
#
# Gradients are laid out like weights. Which tensor should receive the sum of your slice, so that Adam finds it? And
# what turns the sum into a mean?
#
# </details>
# <details><summary>Hint 3: all-gather</summary>
#
# After Adam's step only your slice is new. Gather the slices of all ranks into one vector, in the order of ranks, and
# put it into the parameters. Its last numbers are padding.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Nothing in Adam looks from one parameter to another. So it does not matter who steps which of them, if everybody gets
# the results: the loss is that of plain data parallelism, and a rank keeps 8 bytes of moments per parameter of a slice
# instead of 8 per parameter. The two exchanges are the halves of one all-reduce, so nothing more is sent. Padding costs
# at most D − 1 numbers. Optimizers that look at whole matrices (Muon, Adafactor) are not cut so easily.

# %% [markdown]
# ## 4 · A checkpoint that one process can read
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** getting whole tensors out of shards
#
# After `fully_shard`, each parameter and each of AdamW's moments is a `DTensor`: it knows its whole shape, and holds
# one rank's rows. Saved as it is, only as many ranks could load it again. `value.full_tensor()` gathers the rows of all
# ranks: every rank has to call it, and every rank gets the whole tensor.
#
# Return a dictionary on rank 0: for each name of `model.named_parameters()`, a dictionary with `weight` and just what
# the optimizer keeps for that weight, under AdamW's own names (`step`, `exp_avg`, `exp_avg_sq`). `optimizer.state` is a
# dictionary with the weights themselves as keys; a frozen weight has none there, and its dictionary holds `weight`
# alone. All are plain tensors without a graph, and copies: training goes on, and must not change them.
#
# The other ranks return an empty dictionary. They may hold one whole weight and its states at a time, and
# let go of them before they gather the next.
#
# The check trains a small network on four processes, some of which have no row of its smallest weights, and then one
# process compares. Use nothing from other cells but the imports. What your cell imports and defines goes along.


# %%
def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """On rank 0 every weight, whole, and what the optimizer keeps for it; elsewhere an empty dictionary."""
    ### BEGIN SOLUTION Return a dictionary of dictionaries.
    kept = {}
    for name, weight in model.named_parameters():
        for key, value in {"weight": weight, **optimizer.state.get(weight, {})}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                kept.setdefault(name, {})[key] = whole.detach().clone()
    return kept
    ### END SOLUTION


# %%
check.checkpoint(checkpoint)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two loops: over the named parameters, and over what there is to save for one of them.
#
# </details>
# <details><summary>Hint 2: who calls what</summary>
#
# An exchange needs every rank. Let all of them gather, and let rank 0 alone put the result away.
#
# </details>
# <details><summary>Hint 3: not everything is a shard</summary>
#
# Adam's `step` is a plain tensor of one number, and it goes on counting: ask with `isinstance(value, DTensor)`, and
# copy what you keep.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# What is whole here can be loaded by any number of ranks: one process for a look, two for fine-tuning, 64 for going on.
# Its price is that rank 0 holds all of it, 12 bytes per parameter in host memory, while the others wait. So large
# trainings save shards, each rank its own, and cut them anew when they load (`torch.distributed.checkpoint`).
# `get_model_state_dict` with `full_state_dict=True` is torch's own version of your function.

# %% [markdown]
# ## 5 · Shard to fit
# **Difficulty** ●●●●○ · **20 minutes** · **Trains** choosing the units of `fully_shard` for any model
#
# Here is `fully_shard` in two lines, on a model with a large vocabulary and six blocks. At its peak, everything is
# whole at once.


# %%
def all_at_once(model, most, policy):
    fully_shard(model, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


N = 2 * 8000 * 256 + 8000 + 6 * (8 * 256 * 256 + 8 * 256)
peak = format_bytes(check.peak_of(all_at_once), "MB", 1)
print(f"16Ψ/D = {format_bytes(2 * N, 'MB', 1)}; a step's simulated peak {peak}")

# %% [markdown]
# Write the function for any model. It shards `model` in place at stage 3, every unit with `policy`, and returns an
# AdamW (learning rate 1e-3) that steps the shards. A part whose parameters, those of its own parts included, have at
# most `most` numbers together is one unit. A larger part is cut: each of its `children()` is treated by this same rule,
# and the part itself then becomes a unit of what remains, its own parameters. A single layer has no parts, so it may be
# larger than `most`. Inner units come first, and the model itself last.
#
# An `nn.ModuleList` cannot be a unit, as it has no `forward`: treat each of its children by the rule. Those of the
# check are larger than `most`. Leave `reshard_after_forward` as it is. Where nothing remains, an inner part need be no
# unit.
#
# The check runs a step on rank 0 of 8 simulated ranks, with four models: six blocks; a block that is larger than
# `most`, with a list of experts in it; experts that are too large, too; and a model with fewer than `most` numbers.


# %%
def shard_to_fit(model: nn.Module, most: int, policy) -> torch.optim.Optimizer:
    """Shard the model so that no unit with parts gathers more than `most` numbers; an AdamW for it."""

    ### BEGIN SOLUTION Shard the model, and return its optimizer.
    def shard(module):
        if sum(weight.numel() for weight in module.parameters()) > most:
            for child in module.children():
                shard(child)
        if not isinstance(module, nn.ModuleList):
            fully_shard(module, mp_policy=policy)

    shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
    ### END SOLUTION


# %%
check.shard_to_fit(shard_to_fit)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Count the numbers of one module. If they are few enough, shard it. If not, what do you do with each of its
# `children()` that you just did with the module?
#
# </details>
# <details><summary>Hint 2: from the inside out</summary>
#
# Write a function inside yours that shards one module and calls itself for its children. A module is sharded after its
# children: then it takes what they have left.
#
# </details>
# <details><summary>Hint 3: the optimizer</summary>
#
# `fully_shard` replaces a module's parameters by shards. Which parameters has an optimizer that was made before?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A unit is whole while it is at work, and the next one is on its way already, so the largest units set the peak above
# 16Ψ/D. Cutting by number instead of by name works for models that you have never seen. Here the vocabulary's layers
# are now the largest units, and no cut of `fully_shard` makes them smaller: that is where tensor parallelism comes in
# (lesson 11). Units that are too small cost, too: each needs its own all-gather, and small messages are slow.

# %% tags=["solution"]
peak = format_bytes(check.peak_of(shard_to_fit), "MB", 1)
print(f"16Ψ/D = {format_bytes(2 * N, 'MB', 1)}; a step's simulated peak {peak}")
