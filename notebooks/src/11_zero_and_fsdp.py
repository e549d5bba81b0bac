# ---
# jupyter:
#   course:
#     minutes: 75
#     cpu_seconds: 45
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · ZeRO and FSDP
#
# **75 minutes.** You should know data parallelism ([lesson 10](10_data_parallelism.ipynb)) and the 16 bytes per
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
from course_utils.interactive.guesses import predict, reveal, waits_for

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
from course_utils.estimating.sharding import zero_bytes
from course_utils.figures import stack
from course_utils.lessons.sharding.zero import cut_three_ways

for stage, formula in enumerate(("4Ψ + 12Ψ", "4Ψ + 12Ψ/D", "2Ψ + 14Ψ/D", "16Ψ/D")):
    print(f"stage {stage}: {formula:11s} = {zero_bytes(N, D, stage) / 1e9:.4g} GB")
reveal("11.stage3", zero_bytes(N, D, 3))
stack(
    cut_three_ways(N, D),
    f"Sharding over {D} ranks cuts {16 * N / 1e9:.0f} GB to {zero_bytes(N, D, 3) / 1e9:.1f} GB",
    capacity=32_000_000_000,
    capacity_label="a GPU of 32 GB",
    provenance="formulas of Rajbhandari et al. 2020, section 5",
)

# %% [markdown]
# Figure 1 in [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054) shows these numbers, rounded. More ranks
# cannot push stage 1 below $4\Psi$, or stage 2 below $2\Psi$. (Set D to 1,024: which of the four numbers still change?)
# The paper's table 1 shows this for a trillion parameters:

# %%
for psi, name in ((N, "7.5 billion"), (128 * 10**9, "128 billion"), (10**12, "1 trillion")):
    for d in (4, 64, 1024):
        sizes = "".join(f"{zero_bytes(psi, d, stage) / 1e9:10,.2f}" for stage in (1, 2, 3))
        print(f"{name:11s} on {d:4d} ranks, GB at stage 1, 2, 3: {sizes}")

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


def six_blocks():
    blocks = (nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(6))
    return nn.Sequential(*blocks, nn.Linear(h, h)).to("cuda")


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

from course_utils import on_gpu, plus_minus

kept = {}
for stage in (3, 2):
    with on_gpu(ranks=D):
        dist.init_process_group("nccl")
        kept[stage] = two_steps(reshard=stage == 3)
for moment, each in {"built": 4, "after backward": 16, "after the step": 12}.items():
    size = each * psi // D
    at_3, at_2 = (kept[stage][moment] for stage in (3, 2))
    gap = plus_minus(size - at_3)
    print(
        f"{moment:14s} stage 3: "
        f"estimated {size:,}, simulated {at_3:,}, the gap {gap}; stage 2: {at_2:,}"
    )
at_3, at_2 = (kept[stage]["peak"] for stage in (3, 2))
print(f"peak of forward and backward, stages 3 and 2: {at_3:,} {at_2:,}")
reveal("11.real", kept[2]["after backward"], unit="MB")

# %% [markdown]
# Stage 2 keeps as little as stage 3. FSDP2 frees whole weights in backward, ZeRO-2 keeps them. Only the peak differs.
# (Set D to 64 and predict: which rows fall by a factor of 8, and which does not?)
#
# **The gap** at stage 3 is 0: torch's own `fully_shard` keeps what the formula says. But this is a simulated rank, and
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
        shard = weight.to_local()
        rows, own = len(weight), len(shard)
        print(
            f"{name}: rank 0 has {own} of {rows} rows; "
            f"8 · {own} − {rows} = {8 * own - rows} rows of padding"
        )

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
gap = plus_minus(share - moments)
print(f"moments of rank 0: estimated 8Ψ/D = {share:,}, simulated {moments:,}; the gap {gap} bytes")
print(f"the moments of one large matrix: {8 * largest:,} bytes")

# %% [markdown]
# **The gap** comes from *uneven shares*. `ZeroRedundancyOptimizer` hands out whole tensors. Of 12 large matrices on 8
# ranks, rank 0 gets two. (What happens on 12 ranks?)

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
# Bytes can be simulated, but values need real processes. `SentBytes` sees each *collective*, an exchange among all
# ranks, and adds up its bytes. (torch's `CommDebugMode` counts how many there are.)


# %%
def sharded(dtype, reshard):
    import torch
    from torch import distributed as dist, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from course_utils.lessons.sharding.sent import SentBytes

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 1001), nn.GELU(), nn.Linear(1001, 250))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    # the default is this machine's GPUs, if it has any
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    x = torch.randn(8, 250).chunk(dist.get_world_size())[dist.get_rank()]
    with SentBytes() as sent:
        loss = (model(x) - x).square().mean()
        loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()  # steps the shards
    after = (model(x) - x).square().mean()
    return [loss.item(), after.item()], sent.by_kind


def each_sharded(trainings):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {name: sharded(**choices) for name, choices in trainings.items()}


# %%
def zero_1():
    import torch
    from torch import distributed as dist, nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from course_utils.lessons.sharding.sent import SentBytes

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(250, 1001), nn.GELU(), nn.Linear(1001, 250))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    x = torch.randn(8, 250).chunk(dist.get_world_size())[dist.get_rank()]
    with SentBytes() as sent:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    after = (model(x) - x).square().mean()
    return {"stage 1": ([loss.item(), after.item()], sent.by_kind)}


# %%
numbers = 2 * 250 * 1001 + 1001 + 250
per_number = {}
alone = {"one process": {"dtype": "float32", "reshard": True}}
trainings = {
    "stage 3": {"dtype": "float32", "reshard": True},
    "stage 2": {"dtype": "float32", "reshard": False},
    "stage 3, bf16": {"dtype": "bfloat16", "reshard": True},  # change this
}
found = [run_ranks(each_sharded, 1, trainings=alone)]
found += [run_ranks(each_sharded, 2, trainings=trainings), run_ranks(zero_1, 2)]
for ranks in found:
    for name in ranks[0]:
        before, after = torch.tensor([rank[name][0] for rank in ranks]).mean(0)
        per_number[name] = {
            kind: round(size / numbers, 1) for kind, size in ranks[0][name][1].items()
        }
        print(
            f"{name:13s} loss {before:.3f}, after a step {after:.3f}; "
            f"bytes per parameter: {per_number[name]}"
        )
ddp = per_number["stage 1"]["all-reduce"]  # what plain data parallelism sends
reveal("11.price", sum(per_number["stage 3"].values()) / ddp, unit="times")

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
# `"reshard": False`. Which bytes change? Does the loss?)

# %% [markdown]
# ## The peak within a step
# The formula counts what persists between steps. Within a step, some weights are whole for a moment.
#
# **Your guess.** Llama-3 8B is at stage 3 on 64 ranks, with one sequence of 4,096 tokens on each. Full
# [recomputation](../docs/glossary.md#activation-recomputation) keeps activations small. A [loss in
# chunks](../docs/glossary.md#chunked-loss) of 1/8 of the tokens keeps [logits](../docs/glossary.md#logits) small. How
# many GB does rank 0 need at its peak?

# %%
from course_utils import TrainingRun, estimate, format_bytes, measure
from course_utils.lessons.sharding.zero import formula

options = {"recompute": "full", "loss_chunks": 8, "world_size": 64, "zero_stage": 3}
llama = TrainingRun("llama3-8b", 1, 4096, "bf16-master", **options)
print(f"16Ψ/D = {format_bytes(sum(formula(llama).values()), 'GB', 2)}")
predict("11.peak", unit="GB")

# %% [markdown]
# `measure` does the same for any run, here in about 15 seconds.

# %%
waits_for("11.peak")
rank = measure(llama)
rows = {"ZeRO's formula": formula(llama), f"peak, {rank.word}": rank.breakdown}
ratio = rank.peak / sum(formula(llama).values())
title = f"Gathered weights raise the peak to {ratio:.1f} times ZeRO's formula"
stack(rows, title, provenance=str(rank.provenance))

# %%
from course_utils.lessons.sharding.zero import gathered_terms
from course_utils.measuring.compare import Comparison

reveal("11.peak", rank.peak)
off = plus_minus(estimate(llama).total - rank.peak)
print(f"estimated − {rank.word}: {off} bytes (both are the course's own), of it")
for term, size in Comparison(llama, estimate(llama), rank).terms.items():
    print(f"    {term:46s} {plus_minus(size):>7s}")
gap = plus_minus(sum(formula(llama).values()) - rank.peak)
print(f"the gap, ZeRO's formula − {rank.word}: {gap} bytes, of it")
for name, size in gathered_terms(llama).items():
    print(f"    {name:34s} {format_bytes(size, 'GB', 2):>8s}")
together = sum(gathered_terms(llama).values())
communication = rank.breakdown["communication"]
print(f"    together {together:,} bytes; {rank.word} communication {communication:,} bytes")

# %% [markdown]
# The estimate leaves out the allocator's rounding, tiny tensors, and the last norm's gradient (*elsewhere*), which is
# whole until the embedding's is there, too.
#
# ZeRO's formula has none of the four gathered terms, and none shrinks with D. The largest unit is the outermost:
# embedding and head. It stays gathered in bf16 from forward to the end of backward. Then its whole gradient follows. A
# finished block's gradients are flattened in fp32 for the reduce-scatter. So from some D on, more ranks hardly help:

# %%
for D in (8, 32, 128, 512):  # change this
    run = llama.replace(world_size=D)
    states = format_bytes(sum(formula(run).values()), "GB", 1)
    peak = format_bytes(estimate(run).total, "GB", 1)
    print(f"{D:3d} ranks: 16Ψ/D = {states:>7s}, estimated peak {peak:>7s}")

# %% [markdown]
# (Predict the last line for 1,024 ranks, then try.)
#
# The outermost unit is so large because nobody wrapped the embedding and the head. Make each of them a unit of its own,
# and neither is whole while a block runs. (torchtitan wraps them, too:
# [parallelize.py](https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/parallelize.py).) Here is a
# small model with many words:


# %%
def peak_with_words(apart, words=32_000):  # change this
    blocks = [nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(words, h), *blocks, nn.Linear(h, words)).to("cuda")
    units = model if apart else blocks
    for unit in units:
        fully_shard(unit, mp_policy=bf16)
    fully_shard(model, mp_policy=bf16)  # what is left
    torch.cuda.reset_peak_memory_stats()
    model(torch.zeros(128, dtype=torch.long, device="cuda")).square().mean().backward()
    return torch.cuda.max_memory_allocated()


for apart in (False, True):
    with on_gpu(ranks=64):
        peak = peak_with_words(apart)
    where = "as two units" if apart else "in the outermost unit"
    print(f"embedding and head {where}: peak {peak / 1e6:.0f} MB")

# %% [markdown]
# ## Four knobs and their bytes
# You choose what to wrap, when to reshard, how far ahead to gather, and which format to use.
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
print(
    f"16Ψ/D = {16 * psi / 64 / 1e6:.0f} MB; peak of forward and backward {one_by_one / 1e6:.0f} MB"
)
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
    blocks = plus_minus((peak - one_by_one) / (2 * (8 * h * h + 5 * h)), 2)
    print(f"{name:20s} {peak / 1e6:5.0f} MB, {blocks:>5} bf16 blocks against one unit per block")
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
#
# At stage 3, the timeline of a similar GPT is a comb:

# %%
from course_utils.figures import timeline
from course_utils.lessons.sharding.zero import gpt_of_six_blocks

comb = measure(gpt_of_six_blocks(ranks=64))
title = "Each of the 6 blocks is gathered and freed twice, in forward and in backward"
timeline(comb, title, unit="MB", steps=[2])

# %% [markdown]
# ## Try it
# Move the sliders. On how many A100s of 40 GB does Llama-3 8B fit at stage 1? At stage 2? At stage 3, when do more
# ranks stop helping?

# %%
from course_utils.lessons.sharding.widget import shard_sliders

shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096, loss_chunks=8)

# %%
from course_utils import gpu

card = gpu("A100-40GB")  # change this
ranks = (2, 4, 8, 16, 32, 64, 128, 1024)
for stage in (1, 2, 3):
    peaks = {D: estimate(llama.replace(world_size=D, zero_stage=stage)).total for D in ranks}
    enough = [D for D, peak in peaks.items() if peak <= card.room]
    said = f"fits from {enough[0]} ranks on" if enough else "does not fit, even on 1,024 ranks"
    print(
        f"PyTorch's stage {stage}: Llama-3 8B {said}; "
        f"on 64 ranks it needs {format_bytes(peaks[64], 'GB', 1)}"
    )

# %% [markdown]
# (Predict the three lines for an "A100-80GB", then for an "RTX4080-16GB".)
#
# Why does no number of ranks help stage 1? That is PyTorch's stage 1, not ZeRO's. DDP's buckets hold the gradients once
# more, and `ZeroRedundancyOptimizer` gives whole tensors to ranks: one of them has all moments of an embedding. Take
# away both:

# %%
from course_utils.estimating.formula_of_ranks import rank_0_states

stage_1 = llama.replace(zero_stage=1)
views = stage_1.replace(bucket_view=True)
uneven = rank_0_states(views)["optimizer_states"]
even = formula(views)["optimizer_states"]
print(f"PyTorch's defaults {format_bytes(estimate(stage_1).total, 'GB', 1)}")
print(f"gradients as views of the buckets {format_bytes(estimate(views).total, 'GB', 1)}")
print(
    f"and even shares of the states {format_bytes(estimate(views).total - uneven + even, 'GB', 1)}"
)
print(f"an {card.name} gives a program {format_bytes(card.room, 'GB', 1)}")

# %% [markdown]
# Megatron's [distributed
# optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html) cuts one contiguous
# buffer into even shares. A stage 1 like that would fit, by this estimate.

# %% [markdown]
# ## When does computing hide the sending?
# Sending and computing can overlap. A token costs about 6 [FLOPs](../docs/glossary.md#flops) per parameter ([Kaplan et
# al. 2020](https://arxiv.org/abs/2001.08361), section 2.1). A step sends a fixed number of bytes per parameter. So the
# parameters cancel: with enough tokens per rank, computing takes longer than sending.
#
# **Your guess.** By its [data-sheet rates](../docs/glossary.md#data-sheet-rate), which nobody exceeds, an A100 computes
# 312·10¹² FLOPs per second and sends 300 GB/s over [NVLink](../docs/glossary.md#nvlink), the direct link between a
# machine's GPUs. Stage 3 sends 3Ψ numbers of 2 bytes. How many tokens does each rank need?

# %%
predict("11.tokens", unit="tokens")

# %%
from course_utils.figures import bars
from course_utils.lessons.sharding.zero import tokens_to_hide

rates = gpu("A100-80GB").rates  # change this
ways = {
    "stage 3 over NVLink": tokens_to_hide(3 * 2, rates.tensor, rates.link),
    "… with gradients in fp32": tokens_to_hide(2 * 2 + 4, rates.tensor, rates.link),
    "stages 0 to 2 over 100 Gbit/s": tokens_to_hide(2 * 2, rates.tensor, 100e9 / 8),
    "stage 3 over 100 Gbit/s": tokens_to_hide(3 * 2, rates.tensor, 100e9 / 8),
}
reveal("11.tokens", ways["stage 3 over NVLink"], unit="tokens")
title = "On a slower link, each rank needs more tokens to hide the sending"
source = "closed form at data-sheet rates; real GPUs and real links are slower"
bars(ways, title, unit="tokens", provenance=source)

# %% [markdown]
# Computing and sending take equally long at
#
# $$\text{tokens} = \frac{\text{bytes per parameter}}{6} \cdot \frac{\text{FLOPs per second}}{\text{bytes per second}}$$
#
# The second bar is FSDP2 as you ran it. (An "H100-80GB" computes three times as fast. Does it need more tokens, or
# fewer?) On a real cluster, small shards also cost latency. And FSDP2 gathers again for each
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch), so stage 3 sends at least 2Ψ for each.
#
# ZeRO leaves two things alone. Every rank keeps all activations of its own micro-batch: [lesson
# 14](14_model_and_pipeline_parallelism.ipynb) splits the matrices to shard those. And nothing moves to the host, as in
# [lesson 06](06_recomputation.ipynb)'s [offloading](../docs/glossary.md#offloading).

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(11)

# %% [markdown]
# ## In your own script
# Shard a model with FSDP2 and gather it in bf16. The model is made on torch's *meta* device and gets its bytes after
# sharding, so it may be larger than a GPU. `torchrun` starts this script on any number of GPUs or CPUs. Without
# `torchrun`, it runs as one process.

# %%
import os
import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("gloo" if device == "cpu" else "nccl", **alone)
model = nn.Sequential(*[nn.Linear(64, 64, device="meta") for _ in range(4)])  # yours, on "meta"
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*model, model):  # each layer is a unit, and so is what remains
    fully_shard(module, mp_policy=policy)
model.to_empty(device=device)  # allocates the shards alone
torch.manual_seed(dist.get_rank())  # each rank draws the numbers of its own rows
for weight in model.parameters():
    nn.init.normal_(weight.to_local(), std=0.02)  # or load a checkpoint here
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: it steps the shards
model(torch.randn(8, 64, device=device)).float().square().mean().backward()  # on its own batch
optimizer.step()
own = sum(weight.to_local().nbytes for weight in model.parameters())
print(own, "bytes of weights on rank", dist.get_rank())
dist.destroy_process_group()

# %% [markdown]
# ## Take home
# **Remember** ZeRO divides the states by D, but not what is whole for a moment: the largest unit and its neighbors.
#
# **Breaks when** activations or one huge unit set the peak, or a link is too slow for few tokens.
#
# **Cheat-sheet line** stage 1: 4Ψ + 12Ψ/D · stage 2: 2Ψ + 14Ψ/D · stage 3: 16Ψ/D bytes, for 2Ψ, 2Ψ, 3Ψ numbers sent
# (PyTorch's stage 1: 3Ψ) · peak at stage 3: + outer unit + 2 blocks in 16-bit + 1 block in fp32.
#
# Now solve the [exercises of this lesson](../exercises/11_zero_and_fsdp.ipynb).
