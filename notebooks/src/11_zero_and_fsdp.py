# ---
# jupyter:
#   course:
#     minutes: 85
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · ZeRO and FSDP
#
# **85 minutes.** You should know data parallelism ([lesson 10](10_data_parallelism.ipynb)) and the 16 bytes per
# parameter of mixed-precision Adam ([lesson 03](03_mixed_precision.ipynb)). No GPU is needed: ranks are processes on
# your computer, or simulated.
#
# In data parallelism, every rank keeps the same weights, gradients and optimizer states: 64 GPUs, 64 copies.
# [ZeRO](../docs/glossary.md#zero) removes the copies: each rank owns one [shard](../docs/glossary.md#shard) and fetches
# the others when needed. PyTorch's version is [FSDP](../docs/glossary.md#fsdp), today the function `fully_shard`
# (FSDP2). What does it save, what does it send, and what does the formula leave out?

# %% [markdown]
# ## Three stages of sharding
# The paper's symbols: Ψ parameters, D ranks, K bytes of [optimizer states](../docs/glossary.md#optimizer-states) per
# parameter. Mixed-precision Adam keeps 2 bytes of weights, 2 of gradients and K = 12.
#
# The paper's example: 7.5 billion parameters on 64 ranks. **Your guess.** Weights, gradients and optimizer states are
# all sharded. How many GB does one rank keep?

# %%
from course_utils.interactive.guesses import predict, reveal

N, D = 7_500_000_000, 64  # change this
print(f"no sharding: (2 + 2 + 12)·Ψ = {16 * N / 1e9:.0f} GB on every rank")
predict("11.stage3", unit="GB")

# %% [markdown]
# | stage | what is sharded | bytes on one rank |
# |---|---|---|
# | none | nothing | (2 + 2 + K)·Ψ |
# | 1 | optimizer states | 4Ψ + KΨ/D |
# | 2 | also gradients | 2Ψ + (2 + K)Ψ/D |
# | 3 | also parameters | (4 + K)Ψ/D |

# %%
from course_utils.figures import stack


def kept_by(stage, psi, D):
    return {
        "parameters": 2 * psi // (D if stage >= 3 else 1),
        "gradients": 2 * psi // (D if stage >= 2 else 1),
        "optimizer_states": 12 * psi // (D if stage >= 1 else 1),
    }


names = ("no sharding", "stage 1: optimizer", "stage 2: + gradients", "stage 3: + parameters")
rows = {name: kept_by(stage, N, D) for stage, name in enumerate(names)}
least = sum(kept_by(3, N, D).values())
reveal("11.stage3", least)
title = f"Sharding over {D} ranks cuts {16 * N / 1e9:.0f} GB to {least / 1e9:.1f} GB"
source = "formulas of Rajbhandari et al. 2020, section 5"
stack(rows, title, capacity=32 * 10**9, capacity_label="a GPU of 32 GB", provenance=source)

# %% [markdown]
# Figure 1 in [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054) shows these numbers, rounded. More ranks
# cannot push stage 1 below $4\Psi$, or stage 2 below $2\Psi$. (Set D to 1,024: which of the four numbers still change?)
# The paper's table 1 shows this for a trillion parameters:

# %%
for psi, name in ((N, "7.5 billion"), (128 * 10**9, "128 billion"), (10**12, "1 trillion")):
    for d in (4, 64, 1024):
        sizes = [round(sum(kept_by(stage, psi, d).values()) / 1e9, 2) for stage in (1, 2, 3)]
        print(f"{name:11s} on {d:4d} ranks, GB at stages 1, 2, 3: {sizes}")

# %% [markdown]
# ## fully_shard in twenty lines
# The model has six blocks and a head. `fully_shard(block)` makes a block a *unit*: its parameters are sharded, gathered
# whole when the block runs, and freed afterwards. `fully_shard(model)` shards the rest: the head.
#
# The policy gathers and computes in [bf16](../docs/glossary.md#fp16-and-bf16). Shards, gradients and moments are fp32,
# so a rank keeps 4 + 4 + 8 bytes per parameter of its shard. `reshard_after_forward=True` is stage 3. `False` is
# FSDP2's stage 2: blocks stay whole from forward to backward.

# %%
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

h = 1024
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def six_blocks(device="cuda"):
    with torch.device(device):
        blocks = [
            nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(6)
        ]
        return nn.Sequential(*blocks, nn.Linear(h, h))


# %%
def two_steps(reshard):
    model = six_blocks()  # every rank holds it whole for a moment
    for block in model[:-1]:
        fully_shard(block, mp_policy=bf16, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = {"built": torch.cuda.memory_allocated()}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(128, h, device="cuda")
        model(x).square().mean().backward()
        del x
        kept["after backward"] = torch.cuda.memory_allocated()
        kept["peak"] = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        kept["after the step"] = torch.cuda.memory_allocated()
    return kept


# %% [markdown]
# **Your guess.** The formula's stage 2, with whole weights in fp32, is printed below. How many MB does rank 0 of 8 keep
# at FSDP2's stage 2, between backward and the second optimizer step?

# %%
psi, D = 6 * (8 * h * h + 5 * h) + h * h + h, 8  # change this
print(f"Ψ = {psi:,}; stage 2 by the formula: 4Ψ + 12Ψ/D = {(4 * psi + 12 * psi // D) / 1e6:.1f} MB")
predict("11.real", unit="MB")

# %% [markdown]
# `on_gpu(ranks=8)` simulates rank 0 of 8. It runs torch's real `fully_shard`.

# %%
import torch.distributed as dist

from course_utils import on_gpu

kept = {}
for stage in (3, 2):
    with on_gpu(ranks=D):
        dist.init_process_group("nccl")
        kept[stage] = two_steps(reshard=stage == 3)
for moment, each in {"built": 4, "after backward": 16, "after the step": 12, "peak": 0}.items():
    said = f"estimated {each * psi // D:,}, " if each else ""
    print(
        f"{moment}: {said}simulated at stage 3 {kept[3][moment]:,}, at stage 2 {kept[2][moment]:,}"
    )
reveal("11.real", kept[2]["after backward"], unit="MB")

# %% [markdown]
# Stage 2 keeps as little as stage 3. FSDP2 frees whole weights in backward, ZeRO-2 keeps them. Only the peak differs.
# (Set D to 64 and predict: which rows fall by a factor of 8, and which does not?)
#
# **The gap** at stage 3 is 0 bytes: torch's own `fully_shard` keeps what the formula says. But this is a simulated rank, and
# the course has no recording of FSDP2 on several GPUs. They would add CUDA's context, cuBLAS's workspaces and NCCL's
# buffers. FSDP2 also uses several streams. A freed block is reused only on its own stream, so more is
# [reserved](../docs/glossary.md#allocated-and-reserved) (lesson 12).
#
# Other layers leave gaps. A tensor may take a cached block up to 1 MiB too large, and the rest counts as allocated.
# FSDP2 also shards each parameter by rows, and pads where D does not divide them:

# %%
with on_gpu(ranks=8):
    layer = fully_shard(nn.Linear(250, 1003, device="cuda"))  # change this
    for name, weight in layer.named_parameters():
        rows, own = len(weight), len(weight.to_local())
        padding = 8 * own - rows
        print(f"{name}: rank 0 has {own} of {rows} rows; 8 · {own} − {rows} = {padding} of padding")

# %% [markdown]
# (How many rows of padding does `nn.Linear(250, 1001)` get? And a bias of 3 numbers on 64 ranks?)
#
# PyTorch's stage 1 is `ZeroRedundancyOptimizer`. Weights and gradients stay whole. Each rank keeps moments for its
# share of the weights, then updates and broadcasts that share.

# %%
from torch.distributed.optim import ZeroRedundancyOptimizer

ranks = 8  # change this
with on_gpu(ranks=ranks):
    model = six_blocks()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model(torch.randn(128, h, device="cuda")).square().mean().backward()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    moments = torch.cuda.memory_allocated() - before
    largest = max(weight.numel() for weight in model.parameters())
share = 8 * psi // ranks
print(f"moments of rank 0: estimated 8Ψ/D = {share:,}, simulated {moments:,} bytes")
print(f"the moments of one large matrix: {8 * largest:,} bytes")

# %% [markdown]
# **The gap** comes from *uneven shares*. `ZeroRedundancyOptimizer` hands out whole tensors. Of 12 large matrices on 8
# ranks, rank 0 gets two. (What happens on 12 ranks?)

# %% [markdown]
# ## Start where the model does not fit
# `two_steps` has a fault: `six_blocks()` puts the *whole* model on every rank, before `fully_shard` cuts it. FSDP is for
# models that do not fit one GPU, so this fails exactly when you need it. On torch's *meta* device, tensors have a shape
# but no bytes. Build there, shard, and let `to_empty` allocate the shards alone:


# %%
def shard(device="meta", to="cuda", **choices):
    model = six_blocks(device)
    for unit in (*model[:-1], model):
        fully_shard(unit, mp_policy=bf16, **choices)
    return model.to_empty(device=to) if device == "meta" else model


for device in ("cuda", "meta"):
    with on_gpu(ranks=8):
        shard(device)
        peak = torch.cuda.max_memory_allocated()
    print(f"built on {device}: peak {peak / 1e6:.0f} MB; 4Ψ/8 = {4 * psi / 8e6:.0f} MB")

# %% [markdown]
# `to_empty` leaves garbage in the weights. So initialize them afterwards (*In your own script*), or load a checkpoint
# (exercise 1).
#
# ### A mesh of two dimensions
# Gathers are fast inside a machine and slow between machines. *Hybrid* sharding (HSDP) shards over S ranks, say those of
# one machine, and keeps a [replica](../docs/glossary.md#replica) in each of the other D/S groups. Gathers stay inside a
# group. Only gradients cross, already cut to a shard: an all-reduce of Ψ/S numbers. You pay in memory.
#
# **Your turn.** Write the bytes per rank for fp32 shards, gradients and moments, on D ranks in groups of S. The cell
# compares them with torch's own HSDP, for groups of 8, 4 and 2 of the 8 ranks.


# %%
def by_hand(psi, D, S):
    return 16 * psi // D  # correct this line


simulated = {}
for S in (8, 4, 2):
    with on_gpu(ranks=8):
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (8 // S, S), mesh_dim_names=("replicate", "shard"))
        model = shard(mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(128, h, device="cuda")).square().mean().backward()
            simulated[S] = torch.cuda.memory_allocated()
            optimizer.step()
wrong = [S for S, size in simulated.items() if abs(by_hand(psi, 8, S) / size - 1) > 0.01]
print("HSDP, MB per rank by S:", {S: round(size / 1e6) for S, size in simulated.items()})
print(f"Not yet: another number for groups of {wrong}." if wrong else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return 16 * psi // S`. Only the ranks of one group share the states. The other groups repeat them.
#
# </details>
#
# With S = D there is one group: plain FSDP. With S = 1, it is data parallelism.
#
# ### States on the host
# `CPUOffloadPolicy` keeps the shards, their gradients and the moments in the host's memory. The optimizer steps on the
# CPU. Each gather first copies this rank's shard over PCIe.

# %%
from torch.distributed.fsdp import CPUOffloadPolicy

with on_gpu(ranks=8):
    dist.init_process_group("nccl")
    model = shard(to="cpu", offload_policy=CPUOffloadPolicy(pin_memory=False))  # on GPUs, pin it
    before = torch.cuda.memory_allocated()
    model(torch.randn(128, h, device="cuda")).square().mean().backward()
    where = {weight.grad.device.type for weight in model.parameters()}
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
print(f"on the GPU: {before} bytes before, {after} after backward, peak {peak / 1e6:.0f} MB")
print(f"gradients are on: {where}")

# %% [markdown]
# Nothing of the states is on the GPU, and yet the peak is not small: units still become whole there. (Compare with the
# peaks of *fully_shard in twenty lines*. How much did offloading save?) The price is time. Each step
# copies 4Ψ/D bytes up twice, for forward and for backward, and brings 4Ψ/D bytes of gradients down.

# %% [markdown]
# ## What does it send?
# **Your guess.** Plain data parallelism sends 2Ψ numbers per rank and step (lesson 10). How many times as much does
# stage 3 send?

# %%
predict("11.price", unit="times")

# %% [markdown]
# An [all-reduce](../docs/glossary.md#all-reduce) has two halves. After the *reduce-scatter*, each rank holds one slice
# of the sum. After the *all-gather*, it holds all slices. Each half sends Ψ numbers. (Exactly $(D-1)/D \cdot \Psi$, but
# the paper drops the factor.) Two real processes show it, connected through [gloo](../docs/glossary.md#gloo):


# %%
def halves(gradients):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gradient = torch.tensor(gradients[dist.get_rank()])
    own = torch.empty(len(gradient) // dist.get_world_size())
    dist.reduce_scatter_tensor(own, gradient)
    own /= dist.get_world_size()  # the mean of this rank's slice is all that its optimizer needs
    whole = torch.empty_like(gradient)
    dist.all_gather_into_tensor(whole, own)
    return f"after the reduce-scatter {own.tolist()}, after the all-gather {whole.tolist()}"


# %%
from course_utils.ranks.launch import run_ranks

gradients = [[1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 0.0]]  # change this
for rank, found in enumerate(run_ranks(halves, world_size=2, gradients=gradients)):
    print(f"rank {rank}: {found}")

# %% [markdown]
# (Swap the two lists: what changes?) Between the halves, each rank has exactly the gradients of its slice. So step
# there, and gather new *weights* instead of gradients: stages 1 and 2 send what data parallelism sends, 2Ψ. Stage 3
# gathers weights for forward, gathers them again for backward, and reduce-scatters gradients. That is the paper's count
# (section 7). The next section counts what PyTorch sends.

# %% [markdown]
# ## The same loss on real ranks
# Bytes can be simulated, but values need real processes. A *dispatch mode* sees each operator, so also each
# *collective*, an exchange among all ranks. (torch's `CommDebugMode` counts how many there are.) This one adds up
# their bytes:


# %%
def sent_bytes():
    """A mode that adds up, in `by_kind`, the bytes that each rank sends."""
    from collections import Counter
    from torch.utils._python_dispatch import TorchDispatchMode

    class SentBytes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() == "c10d::_allgather_base_":
                self.by_kind["all-gather"] += args[0].nbytes  # the whole output
            elif func.name() == "c10d::_reduce_scatter_base_":
                self.by_kind["reduce-scatter"] += args[1].nbytes  # the whole input
            elif func.name() == "c10d::allreduce_":
                self.by_kind["all-reduce"] += 2 * sum(part.nbytes for part in args[0])
            elif func.name() == "c10d::broadcast_":
                self.by_kind["broadcast"] += sum(part.nbytes for part in args[0])
            return func(*args, **(kwargs or {}))

    mode = SentBytes()
    mode.by_kind = Counter()
    return mode


# %%
def one_step(wrap, *choices):
    """The loss before and after a step, and the bytes that were sent, by kind."""
    import torch
    from torch import distributed as dist, nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 1001), nn.GELU(), nn.Linear(1001, 250))
    model, optimizer = wrap(model, *choices)
    x = torch.randn(8, 250).chunk(dist.get_world_size())[dist.get_rank()]
    with sent_bytes() as sent:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    after = (model(x) - x).square().mean()
    return [loss.item(), after.item()], sent.by_kind


# %%
def stages_2_and_3(trainings):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # the default is a GPU, if any

    def wrap(model, dtype, reshard):
        policy = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)  # steps the shards

    return {name: one_step(wrap, *choices) for name, choices in trainings.items()}


# %%
def stage_1():
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")

    def wrap(model):
        weights = model.parameters()
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.AdamW, lr=1e-3)
        return DistributedDataParallel(model), optimizer

    return {"stage 1": one_step(wrap)}


# %%
trainings = {"stage 3": ("float32", True), "stage 2": ("float32", False)}
trainings["stage 3, bf16"] = ("bfloat16", True)  # change this
alone = {"one process": ("float32", True)}
each = [run_ranks(stages_2_and_3, 1, trainings=alone)]
each += [run_ranks(stages_2_and_3, 2, trainings=trainings), run_ranks(stage_1, 2)]
numbers, sent = 2 * 250 * 1001 + 1001 + 250, {}
for ranks in each:
    for name, (_, by_kind) in ranks[0].items():
        before, after = torch.tensor([rank[name][0] for rank in ranks]).mean(0)
        sent[name] = {kind: round(size / numbers, 1) for kind, size in by_kind.items()}
        print(f"{name:13s} loss {before:.3f}, then {after:.3f}; bytes per parameter {sent[name]}")
ddp = sent["stage 1"]["all-reduce"]  # what plain data parallelism sends
reveal("11.price", sum(sent["stage 3"].values()) / ddp, unit="times")

# %% [markdown]
# Two ranks compute what one does. (bf16 rounds, but below these digits.) A number has 4 bytes here, so Ψ numbers are 4
# bytes per parameter. Both layers are units of Ψ/2:
#
# - Stage 3 gathers each unit twice and reduce-scatters it once: 3Ψ. In bf16, weights are gathered at half the bytes.
# - Stage 2 gathers each unit once: 2Ψ.
# - PyTorch's stage 1 sends 3Ψ, not 2Ψ. DDP all-reduces whole gradients (2Ψ), then four broadcasts send the new weights
#   (Ψ).
#
# Here each layer is a unit. FSDP2 gathers the weights outside all other units only once. (Give stage 3 in bf16
# `False` instead of `True`. Which bytes change? Does the loss?)

# %% [markdown]
# ## A plan for Llama-3 70B
# The formula counts what persists between steps. Within a step, some weights are whole for a moment. So plan a real
# training, number by number: Llama-3 70B ([Grattafiori et al. 2024](https://arxiv.org/abs/2407.21783), table 3) at stage
# 3 on 128 GPUs of 80 GB, with one of its sequences of 8,192 tokens on each. Full
# [recomputation](../docs/glossary.md#activation-recomputation) keeps activations small. A [loss in
# chunks](../docs/glossary.md#chunked-loss) of 1/16 of the tokens keeps [logits](../docs/glossary.md#logits) small.
#
# **Your guess.** How many GB does rank 0 need at its peak?

# %%
from course_utils import TrainingRun, estimate, measure

options = {"recompute": "full", "loss_chunks": 16, "world_size": 128, "zero_stage": 3}
llama = TrainingRun("llama3-70b", 1, 8192, "bf16-master", **options)
psi_70 = llama.model.parameters
print(f"16Ψ/D = {16 * psi_70 / 128 / 1e9:.2f} GB")
predict("11.peak", unit="GB")

# %% [markdown]
# Now the plan: L = 80 blocks, h = 8,192 and V = 128,256 words. A block has what embedding and head leave, divided by
# 80. At the peak, some block goes backward, its neighbor is on its way, and a third block's gradients leave.

# %%
L, V, tokens, hidden = 80, 128_256, 8192, 8192
outer = 2 * V * hidden  # numbers in embedding and head
block = (psi_70 - outer) // L
plan = {
    "parameters": 4 * psi_70 // 128,  # fp32, sharded
    "gradients": 4 * psi_70 // 128,
    "optimizer_states": 8 * psi_70 // 128,
    "activations": 2 * L * tokens * hidden,  # one checkpoint per block, bf16
    "communication": 2 * outer + 2 * block + 2 * block + 4 * block,
}
for name, count, each in (("embedding and head", outer, 2), ("a block, twice", 2 * block, 2)):
    print(f"whole in bf16: {name}, {each * count / 1e9:.2f} GB")
print(f"gradients of a finished block, flat in fp32: {4 * block / 1e9:.2f} GB")

# %%
rank = measure(llama)  # about 12 seconds
reveal("11.peak", rank.peak)
rows = {"planned": plan, rank.word: rank.breakdown}
share, least = sum(plan.values()) / rank.peak, 16 * psi_70 / 128 / rank.peak
title = f"The plan finds {share:.0%} of the peak, and 16Ψ/D alone {least:.0%}"
for kind, size in (plan | {"temporaries": 0}).items():
    found = rank.breakdown[kind]
    print(f"{kind:16s} planned {size / 1e9:5.2f}, {rank.word} {found / 1e9:5.2f} GB")
print(f"the course's estimate of the peak: {estimate(llama).total / 1e9:.2f} GB")
stack(rows, title, provenance=str(rank.provenance))

# %% [markdown]
# **The gap** has three causes. The block that goes backward has its activations again, and its own gradients, whole in
# bf16, until they leave. And each operation needs temporaries. All else agrees to 0.01 GB, checked by the
# simulation. A GPU would add the context and NCCL's buffers.
#
# Of the peak, only the first three rows shrink with D. From some D on, more ranks hardly help:

# %%
for D in (8, 16, 32, 64, 256, 512):  # change this
    peak = estimate(llama.replace(world_size=D)).total
    print(f"{D:3d} ranks: 16Ψ/D = {16 * psi_70 / D / 1e9:5.1f} GB, peak {peak / 1e9:5.1f} GB")

# %% [markdown]
# (Predict the last line for 1,024 ranks, then try.) So memory alone would allow HSDP in groups of 32. Whether the links
# allow it is a question of time: see *When does computing hide the sending?*
#
# ### Wrap the embedding and the head
# The largest unit is the outermost, embedding and head: nobody wrapped them, so they stay whole from forward to the end
# of backward. In the plan, that is 4.20 GB while blocks run. torchtitan wraps them, too
# ([parallelize.py](https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/parallelize.py)).
#
# **Your turn.** Here is a small model with many words. Return all modules that should be units of their own.


# %%
def units(embedding, blocks, head):
    return [*blocks]  # change this line


def peak_with(units, words=32_000):
    blocks = [nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(words, h), *blocks, nn.Linear(h, words)).to("cuda")
    for unit in units(model[0], model[1:-1], model[-1]):
        fully_shard(unit, mp_policy=bf16)
    fully_shard(model, mp_policy=bf16)  # what is left
    torch.cuda.reset_peak_memory_stats()
    model(torch.zeros(128, dtype=torch.long, device="cuda")).square().mean().backward()
    return torch.cuda.max_memory_allocated() / 1e6


# %%
with on_gpu(ranks=64):
    peak = peak_with(units)
print(f"peak {peak:.0f} MB; embedding and head whole in bf16: {2 * 2 * 32_000 * h / 1e6:.0f} MB")
print("Right." if peak < 250 else "Not yet: embedding or head is whole for too long.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return [embedding, *blocks, head]`
#
# </details>

# %% [markdown]
# ## Four knobs and their bytes
# You also choose how much to wrap, when to reshard, how far ahead to gather, and which format to use.
#
# **Your guess.** The peak on 64 ranks with one unit per block is printed below. What is it if the whole model is *one*
# unit?


# %%
def peak_of(policy=bf16, reshard=True, ahead=1, whole=False, autocast=False):
    model = six_blocks()
    blocks = [] if whole else list(model[:-1])
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
    torch.cuda.reset_peak_memory_stats()
    x = torch.randn(128, h, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(x).square().mean()
    loss.backward()
    return torch.cuda.max_memory_allocated()


# %%
with on_gpu(ranks=64):
    one_by_one = peak_of()
print(f"16Ψ/D = {16 * psi / 64 / 1e6:.0f} MB; peak {one_by_one / 1e6:.0f} MB")
predict("11.unit", unit="MB")

# %%
import gc

fp32 = MixedPrecisionPolicy()
knobs = {
    "no reshard (stage 2)": {"reshard": False},
    "one unit": {"whole": True},
    "all in fp32": {"policy": fp32},
    "autocast": {"policy": fp32, "autocast": True},
}
knobs["more prefetch"] = {"ahead": 2}  # change this
peaks = {}
with on_gpu(ranks=64):
    for name, choice in knobs.items():
        peaks[name] = peak_of(**choice)
        gc.collect()  # FSDP2's hooks keep a model alive in reference cycles
for name, peak in peaks.items():
    more = (peak - one_by_one) / (2 * (8 * h * h + 5 * h))
    print(f"{name:20s} {peak / 1e6:5.0f} MB, {more:+5.2f} bf16 blocks against one unit per block")
reveal("11.unit", peaks["one unit"], unit="MB")

# %% [markdown]
# | knob | what it buys | what it costs |
# |---|---|---|
# | `fully_shard` on each block | two blocks are whole: one runs, the next arrives | one all-gather per block |
# | `reshard_after_forward=False` | no second gather: 2Ψ, not 3Ψ | all blocks whole at the end of forward |
# | `MixedPrecisionPolicy` in bf16 | gathers and weights of half the size | (shards stay fp32) |
# | [autocast](../docs/glossary.md#autocast) instead | sensitive operations in fp32 | gathers in fp32, copies in bf16 |
# | one more block of prefetch | its gather overlaps with computing | its flat buffer |
#
# Autocast keeps a bf16 copy of every weight that it casts, and resharding cannot free those copies. So use FSDP2's
# policy. (Gather 3 blocks ahead: how many blocks does it cost?)

# %% [markdown]
# ## Two streams
# FSDP2 gathers on a stream of its own, and one unit ahead: W2 arrives while block 1 computes (F1). Draw it. Bytes are
# counted in the middle of each block, by a hook that you could paste into your own script:


# %%
def in_the_middle():
    model, seen = six_blocks(), {}
    for number, block in enumerate(model[:-1], 1):
        fully_shard(block, mp_policy=bf16)

        def note(*_, number=number):
            name = f"{'B' if f'F{number}' in seen else 'F'}{number}"
            seen[name] = torch.cuda.memory_allocated()

        block[1].register_forward_hook(note)
        block[1].register_full_backward_hook(note)
    fully_shard(model, mp_policy=bf16)
    shards = torch.cuda.memory_allocated()
    model(torch.randn(16, h, device="cuda")).square().mean().backward()
    return shards, seen


with on_gpu(ranks=64):
    shards, seen = in_the_middle()

# %% [markdown]
# Times are arithmetic, per parameter of a block: forward takes 2 [FLOPs](../docs/glossary.md#flops) per token, backward
# 4. A gather sends 2 bytes, the reduce-scatter of gradients (g) 4. The rates are an A100's [data-sheet
# rates](../docs/glossary.md#data-sheet-rate), over [NVLink](../docs/glossary.md#nvlink), the direct link between a
# machine's GPUs.


# %%
def streams(tokens, flops=312e12, link=300e9):
    compute, sent, free, start, end = [], [], 0, 0, 0
    for name in seen:  # F1, …, F6, B6, …, B1
        begin = max(free, start)  # when the block before it starts, and the link is free
        arrived = free = begin + 1e12 * 2 / link
        sent.append((f"W{name[1]}", begin, arrived, "parameters"))
        if compute and compute[-1][0][0] == "B":
            begin = max(free, end)
            free = begin + 1e12 * 4 / link
            sent.append(("g", begin, free, "gradients"))
        start = max(end, arrived)
        end = start + 1e12 * (2 if name[0] == "F" else 4) * tokens / flops
        compute.append((name, start, end, "activations"))
    begin = max(free, end)
    sent.append(("g", begin, begin + 1e12 * 4 / link, "gradients"))
    return compute, sent


# %%
from course_utils.lessons.shared.time_axis import time_axis

compute, sent = streams(tokens=2048)  # change this
whole = [size - shards for size in seen.values()]
memory = {"parameters": [shards] * len(seen), "communication": whole}
starts = [start for _, start, _, _ in compute]
title = "Each block is gathered twice, while the block before it computes"
source = "bytes: simulated rank 0 of 64; times: closed form at data-sheet rates"
label = "ms for blocks of a billion parameters"
rows = {"compute": compute, "communicate": sent}
time_axis(rows, memory, starts, title, xlabel=label, unit="MB", provenance=source)

# %% [markdown]
# On top, gathers are dark and reduce-scatters light. Below: rank 0's shards, and all that is whole for a moment. In
# backward that is more: two blocks, and fp32 gradients. In forward, every gather but the first hides. Now draw it for 512 tokens. Where does the GPU wait?

# %% [markdown]
# ## Try it
# Move the sliders. On how many A100s of 40 GB does Llama-3 8B fit at stage 1? At stage 2? At stage 3, when do more
# ranks stop helping?

# %%
from course_utils.lessons.sharding.widget import shard_sliders

shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096, loss_chunks=8)

# %%
options = {"recompute": "full", "loss_chunks": 8, "world_size": 64}
small = TrainingRun("llama3-8b", 1, 4096, "bf16-master", **options)  # change this
for stage in (1, 2, 3):
    at = {D: small.replace(world_size=D, zero_stage=stage) for D in (2, 4, 8, 16, 64, 1024)}
    peaks = {D: round(estimate(run).total / 1e9, 1) for D, run in at.items()}
    print(f"PyTorch's stage {stage}, GB by ranks: {peaks}")

# %% [markdown]
# The sliders name what a program gets of an A100's 40 GiB. Where does each line fall below it? (Predict the three lines
# for 4 sequences per rank.)
#
# Why does no number of ranks help stage 1? That is PyTorch's stage 1, not ZeRO's. DDP's buckets hold the gradients once
# more, and `ZeroRedundancyOptimizer` gives whole tensors to ranks: one of them has all moments of an embedding. Take
# away both:

# %%
stage_1 = small.replace(zero_stage=1)
views = estimate(stage_1.replace(bucket_view=True))
uneven, even = views["optimizer_states"], 12 * small.model.parameters // 64
print(f"PyTorch's defaults on 64 ranks {estimate(stage_1).total / 1e9:.1f} GB")
print(f"gradients as views of the buckets {views.total / 1e9:.1f} GB")
print(f"and even shares of the states {(views.total - uneven + even) / 1e9:.1f} GB")

# %% [markdown]
# Megatron's [distributed
# optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html) cuts one contiguous
# buffer into even shares. A stage 1 like that would fit, by this estimate.

# %% [markdown]
# ## When does computing hide the sending?
# Sending and computing can overlap. A token costs about 6 FLOPs per parameter ([Kaplan et
# al. 2020](https://arxiv.org/abs/2001.08361), section 2.1). A step sends a fixed number of bytes per parameter. So the
# parameters cancel: with enough tokens per rank, computing takes longer than sending.
#
# **Your guess.** By its data sheet, an A100 computes 312·10¹² FLOPs per second and sends 300 GB/s over NVLink. Stage 3
# sends 3Ψ numbers of 2 bytes. How many tokens does each rank need?

# %%
predict("11.tokens", unit="tokens")


# %%
def tokens_to_hide(bytes_each, flops=312e12, link=300e9):  # change this
    return bytes_each / 6 * flops / link


ways = {
    "stage 3 over NVLink": tokens_to_hide(6),
    "the same, gradients in fp32": tokens_to_hide(2 * 2 + 4),
    "stages 0 to 2 over 100 Gbit/s": tokens_to_hide(4, link=100e9 / 8),
    "stage 3 over 100 Gbit/s": tokens_to_hide(6, link=100e9 / 8),
}
ways["H100s, gradients in fp32, over 400 Gbit/s"] = tokens_to_hide(8, 989e12, 400e9 / 8)
ways["the same over NVLink"] = tokens_to_hide(8, 989e12, 450e9)
for way, tokens in ways.items():
    print(f"{way:45s}{tokens:7,.0f} tokens")
reveal("11.tokens", ways["stage 3 over NVLink"], unit="tokens")

# %% [markdown]
# Computing and sending take equally long at
#
# $$\text{tokens} = \frac{\text{bytes per parameter}}{6} \cdot \frac{\text{FLOPs per second}}{\text{bytes per second}}$$
#
# The second line is FSDP2 as you ran it. The last two are for the plan of Llama-3 70B, on H100s with a network of 400
# Gbit/s per GPU. Recomputation adds a third of computing, so three quarters of these tokens are enough, but 8,192 are
# not: the plan fits in memory and waits for the network. HSDP in groups of one machine would gather over NVLink,
# where 8,192 tokens are plenty. But 16Ψ/8 is more than 80 GB. So real trainings of this size also split each matrix
# within a machine ([lesson 15](15_which_cut_when.ipynb)).
#
# On a real cluster, small shards also cost latency. And FSDP2 gathers again for each
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch), so stage 3 sends at least 2Ψ for each.
#
# ZeRO leaves one thing alone: every rank keeps all activations of its own micro-batch. Lesson 15 shards those, too, and
# [lesson 06](06_recomputation.ipynb) moves them to the host.

# %% [markdown]
# ## The script's next line
# Your script changes from DDP to FSDP2. It keeps all that it had: checkpoints, compiled blocks, micro-batches. **Predict**
# its peak on one of 8 ranks before you apply the change to `my_train.py`.

# %%
from course_utils.lessons.shared.growing_script import script

script(11)

# %% [markdown]
# From 2.91 to 0.92 GB. The states of GPT-2's 124 million parameters take 16Ψ/8 = 0.25 GB, not 2 GB. The rest does not
# shrink with D: activations of 8 sequences, and what is whole for a moment, above all the embedding, which is also the
# head. Three lines have reasons of their own. Each block is compiled by itself, since FSDP2 gathers between the blocks.
# The policy gathers in bf16, so autocast has no weights left to copy. And every micro-batch sends its gradients: to send
# them once, each rank would have to keep them whole (`set_requires_gradient_sync`), and that costs memory again. PyTorch
# warns that a compiled block returns a view. That is harmless, because nothing changes it in place.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(11)

# %% [markdown]
# ## In your own script
# Shard a model with FSDP2 and gather it in bf16. The model is made on torch's *meta* device and gets its bytes after
# sharding, so it may be larger than a GPU. `torchrun` starts this script on any number of GPUs or CPUs. Without
# `torchrun`, it runs as one process. (`torch.nn.utils.clip_grad_norm_` works on shards, too: before `step`.)

# %%
import os
import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = f"cuda:{dist.get_node_local_rank(0)}" if torch.cuda.is_available() else "cpu"
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("gloo" if device == "cpu" else "nccl", **alone)
model = nn.Sequential(*[nn.Linear(64, 64, device="meta") for _ in range(4)])  # yours, on "meta"
for module in (*model, model):  # each layer is a unit, and so is what remains
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
model.to_empty(device=device)  # allocates the shards alone
torch.manual_seed(dist.get_rank())  # each rank draws the numbers of its own rows
for weight in model.parameters():
    nn.init.normal_(weight.to_local(), std=0.02)  # or load a checkpoint here
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: it steps the shards
model(torch.randn(8, 64, device=device)).float().square().mean().backward()  # on its own batch
optimizer.step()
print(sum(weight.to_local().nbytes for weight in model.parameters()), "bytes on this rank")
dist.destroy_process_group()

# %% [markdown]
# ## Take home
# **Remember** ZeRO divides the states by D, but not what is whole for a moment: the largest unit and its neighbors.
#
# **Breaks when** activations or one huge unit set the peak, or a link is too slow for few tokens.
#
# **Cheat-sheet line** stage 1: 4Ψ + 12Ψ/D · stage 2: 2Ψ + 14Ψ/D · stage 3: 16Ψ/D bytes, for 2Ψ, 2Ψ, 3Ψ numbers sent
# (PyTorch's stage 1: 3Ψ) · HSDP in groups of S: 16Ψ/S · peak at stage 3: + outer unit + 2 blocks in 16-bit + 1 block in fp32.
#
# Now solve the [exercises of this lesson](../exercises/11_zero_and_fsdp.ipynb).
