# ---
# jupyter:
#   course:
#     minutes: 85
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 11 · ZeRO and FSDP
#
# **85 minutes** for all four; each exercise says how long it takes. You should know [lesson
# 11](../notebooks/11_zero_and_fsdp.ipynb). No GPU is needed. Two of the checks start four processes.
#
# Each exercise asks for one function or class. Write it, run the cell, then run the check below it. A check tells you
# what is off, but never the answer. Stuck? Every exercise has three hints. Open one at a time. (“Run All Cells” stops
# at the first check that is unsolved.)

# %%
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
# ## 1 · From meta to shards
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** starting a model that does not fit one GPU, from a checkpoint
#
# Shard a model that has no bytes yet, and fill it. `model` is an `nn.Sequential` on the meta device. `whole` has its
# weights by name, whole and in the host's memory. `mesh` is the `DeviceMesh` of all ranks: `mesh.device_type` is "cpu"
# or "cuda", `mesh.size()` the number of ranks, `mesh.get_local_rank()` this rank.
#
# - Each layer that has weights is a unit, and so is the model. Pass `mesh=mesh` to `fully_shard`.
# - Afterwards each weight's shard is on the mesh's device and holds this rank's rows of the whole weight.
# - No whole weight may ever be on that device.
# - Return the model. Leave `whole` as it is.
#
# FSDP2 gives each rank equally many consecutive rows, rounded up. So the last ranks have fewer, or none. After
# `to_empty`, `weight.to_local()` is the shard of a parameter: write into it.


# %%
def start(model: nn.Sequential, whole: dict[str, torch.Tensor], mesh) -> nn.Module:
    """Shard a model on the meta device, and fill each shard with its rows of `whole`."""
    ### BEGIN SOLUTION Return the model.
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            own = weight.to_local()
            first = mesh.get_local_rank() * -(-len(weight) // mesh.size())
            own.copy_(whole[name][first : first + len(own)])
    return model
    ### END SOLUTION


# %%
check.start(start)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The lesson's `shard` does the first half: units, then bytes. What is in the weights after `to_empty`?
#
# </details>
# <details><summary>Hint 2: which rows?</summary>
#
# `-(-rows // D)` is rows / D, rounded up. All ranks before this one have that many rows each. Where do its own begin?
#
# </details>
# <details><summary>Hint 3: none at all</summary>
#
# A slice that begins after the last row is empty, and so is such a rank's shard. `copy_` copies an empty tensor, too. It
# also copies from the host to a GPU. Switch autograd off while you write into weights.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The whole weights stay where the checkpoint is. If it is loaded with `torch.load(…, mmap=True)`, not even the host
# needs to hold them all: each rank reads its own rows from the file. That is how a model of 140 GB starts on GPUs of 80.
# torch's own version of this is `set_model_state_dict` with `full_state_dict=True`. It can also let rank 0 alone read
# the file, and send the rows to the others.

# %% tags=["solution"]
from course_utils import on_gpu

whole = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).state_dict()
with on_gpu(ranks=8):
    dist.init_process_group("nccl")
    model = nn.Sequential(*[nn.Linear(1024, 1024, device="meta") for _ in range(4)])
    start(model, whole, dist.init_device_mesh("cuda", (8,)))
    peak = format_bytes(torch.cuda.max_memory_allocated(), "MB", 2)
size = sum(weight.nbytes for weight in whole.values())
print(f"whole {format_bytes(size, 'MB', 2)}, the peak of rank 0 of 8 {peak}")

# %% [markdown]
# ## 2 · Adam, sharded over four ranks
# **Difficulty** ●●●○○ · **30 minutes** · **Trains** ZeRO-1 on real ranks: a reduce-scatter, a step, an all-gather
#
# Write an Adam whose states are sharded, as in ZeRO-1. `parameters` are fp32 weights, the same on every rank. Before
# each step, `.grad` holds the gradient of this rank's data. ZeRO-1 puts all parameters into one vector, pads it with
# zeros, and cuts it into D equal slices. Rank r owns slice r. This function makes the padded vector:


# %%
def padded(tensors):
    """All numbers of `tensors` in one vector, padded with zeros so that D slices are equal."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(vector, (0, -len(vector) % dist.get_world_size()))


# %% [markdown]
# Complete the class. `step()` takes one Adam step on the mean of all ranks' gradients. Afterwards the given parameters
# hold the new weights. Each step makes exactly two exchanges, both of the whole vector:
#
# - `dist.reduce_scatter_tensor(own, whole)`, which sums
# - `dist.all_gather_into_tensor(whole, own)`
#
# Both write into their first argument, a tensor that you create before.
#
# Your object may keep at most 16 bytes per number of *its slice*: the slice's weights, its gradient, and two moments, 4
# bytes each. This limit holds between steps and before the first one. The given parameters and their `.grad` do not
# count.
#
# `torch.optim.Adam` takes any list of tensors, and steps those that have a `.grad`.
# `vector_to_parameters(vector, parameters)` writes a flat vector's numbers into the parameters and ignores the rest.
# The parameters then are views of the vector.
#
# The check runs your class on four processes, for weights of 1,053, 16 and 3 numbers. With 3 numbers, the last rank
# owns only padding. Your class may use the imports and functions of other cells.


# %%
class Zero1Adam:
    """Adam with sharded states: each rank keeps those of its own slice."""

    def __init__(self, parameters: list[nn.Parameter], lr: float):
        ### BEGIN SOLUTION Keep this rank's slice of the weights, and an Adam for it.
        self.parameters = parameters
        self.own = padded(parameters).chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.adam = torch.optim.Adam([self.own], lr=lr)
        ### END SOLUTION

    def step(self):
        ### BEGIN SOLUTION Reduce-scatter, step, all-gather.
        vector = padded([weight.grad for weight in self.parameters])
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_tensor(self.own.grad, vector)
        self.own.grad /= dist.get_world_size()
        self.adam.step()
        dist.all_gather_into_tensor(vector, self.own)
        vector_to_parameters(vector, self.parameters)
        ### END SOLUTION


# %%
check.zero_1_adam(Zero1Adam)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `padded(parameters)` has D slices, and `chunk` separates them. A slice is a view: unless you `clone` it, the whole
# vector stays in memory.
#
# </details>
# <details><summary>Hint 2: reduce-scatter</summary>
#
# Gradients have the same layout as weights. Which tensor should receive the sum of your slice, so that Adam finds it?
# And what turns the sum into a mean?
#
# </details>
# <details><summary>Hint 3: all-gather</summary>
#
# After Adam's step only your slice is new. Gather the slices of all ranks into one vector, in the order of ranks, and
# write it into the parameters. Its last numbers are padding.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Adam treats each parameter by itself. So any rank may update any parameter, if every rank gets the results. The loss
# is that of plain data parallelism. But a rank keeps 8 bytes of moments only for the parameters of its slice, not for
# all. The two exchanges are the halves of one all-reduce, so nothing more is sent. Padding costs at most D − 1 numbers.
# Optimizers that need whole matrices (Muon, Adafactor) are harder to shard.

# %% [markdown]
# ## 3 · A checkpoint that one process can read
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** getting whole tensors out of shards
#
# Collect a sharded model's weights and AdamW's states, whole, on rank 0. After `fully_shard`, each parameter and each
# moment is a `DTensor`: it knows its whole shape, but holds only the rows of one rank. If you save it like this, you
# need the same number of ranks to load it. `value.full_tensor()` gathers the rows of all ranks. Every rank must call
# it, and every rank gets the whole tensor.
#
# On rank 0, return a dictionary with one entry for each name of `model.named_parameters()`. The entry is a dictionary,
# too. It holds `weight` and exactly what the optimizer keeps for that weight, under AdamW's own names (`step`,
# `exp_avg`, `exp_avg_sq`). The keys of `optimizer.state` are the weights themselves. A frozen weight is not among them,
# so its entry holds only `weight`. All tensors are plain copies without a graph: training goes on, and must not change
# them. And all are in host memory: a model that needs shards does not fit one GPU whole.
#
# On the other ranks, return an empty dictionary. They may hold one whole weight and its states at a time. They must
# free them before they gather the next.
#
# The check trains a small network on four processes. Some of them have no row of its smallest weights. Then one process
# compares. A simulated GPU shows where your tensors are.


# %%
def checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """Return whole weights and their optimizer states on rank 0, an empty dictionary elsewhere."""
    ### BEGIN SOLUTION Return a dictionary of dictionaries.
    kept = {}
    for name, weight in model.named_parameters():
        for key, value in {"weight": weight, **optimizer.state.get(weight, {})}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value.clone()
            if dist.get_rank() == 0:
                kept.setdefault(name, {})[key] = whole.detach().cpu()
    return kept
    ### END SOLUTION


# %%
check.checkpoint(checkpoint)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Use two loops. One goes over the named parameters, the other over the weight and its states.
#
# </details>
# <details><summary>Hint 2: who calls what</summary>
#
# An exchange needs every rank. Let all of them gather, but let only rank 0 store the result.
#
# </details>
# <details><summary>Hint 3: not everything is a shard</summary>
#
# Adam's `step` is a plain tensor of one number, and it keeps counting. Ask with `isinstance(value, DTensor)`, and copy
# what you keep. `.cpu()` copies from a GPU. Of a tensor that is in host memory already, it returns the same one.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Any number of ranks can load whole tensors: one process for a look, two for fine-tuning, 64 to continue. The price:
# rank 0 holds all of them, 12 bytes per parameter in host memory, while the others wait. So in large trainings each
# rank saves its own shards, and they are sharded again when they are loaded (`torch.distributed.checkpoint`). torch's
# own version of your function is `get_model_state_dict` with `full_state_dict=True`.

# %% [markdown]
# ## 4 · Shard to fit
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
# Write a function that chooses smaller units for any model. It shards `model` in place at stage 3, every unit with
# `policy`. It returns an AdamW (learning rate 1e-3) that steps the shards. The rule:
#
# - If a part has at most `most` numbers in its parameters, including those of its own parts, it is one unit.
# - If a part is larger, apply the rule to each of its `children()`. Then the part becomes a unit of what remains, its
#   own parameters.
# - A single layer has no parts, so it may be larger than `most`.
# - An `nn.ModuleList` cannot be a unit, because it has no `forward`. Apply the rule to each of its children. (The
#   check's lists are larger than `most`.)
#
# Shard inner units first, and the model itself last. If nothing remains, an inner part need not be a unit. Leave
# `reshard_after_forward` as it is.
#
# The check runs a step on rank 0 of 8 simulated ranks, with four models: six blocks; a block that is larger than `most`
# and contains a list of experts; experts that are too large, too; and a model with fewer than `most` numbers.


# %%
def shard_to_fit(model: nn.Module, most: int, policy) -> torch.optim.Optimizer:
    """Shard the model so that no unit with parts gathers over `most` numbers; return its AdamW."""

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
# Inside your function, write a second one that shards one module and calls itself for its children. Shard a module
# after its children: then it takes the parameters that are left.
#
# </details>
# <details><summary>Hint 3: the optimizer</summary>
#
# `fully_shard` replaces a module's parameters by shards. Which parameters does an optimizer have that was made before?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A unit is whole while it runs, and the next one is already on its way. So the largest units set the peak above 16Ψ/D.
# A rule by number, not by name, works for models that you have never seen. Here the vocabulary's layers are now the
# largest units, and `fully_shard` cannot make them smaller. Tensor parallelism can (lesson 15). Units can also be too
# small: each needs its own all-gather, and small messages are slow.

# %% tags=["solution"]
peak = format_bytes(check.peak_of(shard_to_fit), "MB", 1)
print(f"16Ψ/D = {format_bytes(2 * N, 'MB', 1)}; a step's simulated peak {peak}")
