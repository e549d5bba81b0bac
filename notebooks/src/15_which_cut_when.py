# ---
# jupyter:
#   course:
#     minutes: 65
#     cpu_seconds: 15
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · Which cut when
#
# **65 minutes.** You should know what a block keeps ([lesson 05](05_activations.ipynb)), what an all-reduce sends
# ([lesson 10](10_data_parallelism.ipynb)), [ZeRO](../docs/glossary.md#zero) ([lesson 11](11_zero_and_fsdp.ipynb)) and
# pipelines ([lesson 14](14_model_and_pipeline_parallelism.ipynb)). You need no GPU.
#
# A model can be cut between layers, and also *inside* them: through matrices, through the sequence, between experts.
# Each cut divides something, keeps something whole, and sends something. Which one do you choose on 64 GPUs? First by
# memory, then by traffic.

# %% [markdown]
# ## Cut every matrix: tensor parallelism
# In [tensor parallelism](../docs/glossary.md#tensor-parallelism), each of t ranks has a part of *every* matrix. The
# MLP's first matrix is cut by its outputs (*column-parallel*), the second by its inputs (*row-parallel*). Nothing is
# sent between the two. After them, each rank has a part of a sum, so one
# [all-reduce](../docs/glossary.md#all-reduce) follows ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)). By
# hand, with both ranks in one process:

# %%
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(11)
t, h = 2, 64  # change this
x, up, down = torch.randn(8, h), torch.randn(4 * h, h), torch.randn(h, 4 * h)
whole = F.gelu(x @ up.T) @ down.T
parts = []
for rank in range(t):
    hidden = F.gelu(x @ up.chunk(t, dim=0)[rank].T)  # 4h/t columns: the other ranks have the rest
    parts.append(hidden @ down.chunk(t, dim=1)[rank].T)  # a part of the sum
print(f"norms: complete {whole.norm():.1f}, one part {parts[0].norm():.1f}", end=", ")
print(f"sum of {t} parts {sum(parts).norm():.1f}; between the matrices {tuple(hidden.shape)}")

# %% [markdown]
# Attention is cut in the same way: each rank has a/t heads. Here is a block in plain PyTorch. torch's
# `parallelize_module` cuts it by a plan of names, as it would in a script of yours.


# %%
class Attention(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.head = h // a

    def forward(self, x):
        heads = [each(x).unflatten(-1, (-1, self.head)) for each in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in heads), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


# %%
class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(h), nn.LayerNorm(h), Attention(h, a)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# %%
from torch.distributed.tensor import DTensor, parallel

columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
cuts = {f"attention.{name}": columns() for name in "qkv"} | {"attention.out": rows()}
cuts |= {"mlp.0": columns(), "mlp.2": rows()}

# %% [markdown]
# What goes over the links? A dispatch mode sees every operation, also those that send.


# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Notes the collectives of a rank: name, and bytes of the larger of input and output."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # let the DTensor become this rank's part first
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.name() and "wait" not in func.name():
            name = func.name().partition("::")[2].removesuffix("_tensor").removesuffix("_into")
            self.calls.append((name, max(args[0].nbytes, result.nbytes)))
        return result


# %% [markdown]
# A block without dropout keeps 32·s·b·h bytes, its input included. Of these, 24 lie between column-parallel and
# row-parallel matrices: queries, keys, values, attention's output, and the two wide tensors of the MLP.
#
# **Your guess.** By what factor does cutting in 8 reduce what this block keeps?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("15.kept", unit="times")

# %%
from course_utils import on_gpu

s, b, h = 1024, 4, 1024


def one_of(t, plan, rows=s):
    """Rank 0 of t: bytes that the block keeps, and its messages in forward and backward."""
    with on_gpu(ranks=t):
        mesh = torch.distributed.init_device_mesh("cuda", (t,))
        block = Block(h, 16).to("cuda", torch.bfloat16)
        parallel.parallelize_module(block, mesh, dict(plan))
        before = torch.cuda.memory_allocated()
        x = torch.randn(b, rows, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with Sent() as sent:
            y = block(x)
            kept = torch.cuda.memory_allocated() - before - y.nbytes
            y.sum().backward()
    return kept, sent.calls


# %%
sizes = {t: one_of(t, cuts)[0] for t in (2, 4, 8)}  # change this
for t, kept in sizes.items():
    formula = (8 + 24 / t) * s * b * h
    print(
        f"t = {t}: (8 + 24/t)·s·b·h = {formula / 1e6:6.1f} MB, gap {(formula - kept) / 1e6:.1f} MB"
    )
reveal("15.kept", 32 * s * b * h / sizes[8], unit="times")

# %% [markdown]
# The factor stays below t. Weights and what lies between the matrices are divided. The norms' inputs and outputs, 8
# bytes, stay complete on every rank. The gap is the norms' and attention's fp32 numbers.
#
# With dropout and eager attention, as GPT-3 had them, a block keeps, in units of s·b·h bytes ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), table 2):
#
# | one GPU | tensor parallel | and sequence parallel |
# |---|---|---|
# | 34 + 5·a·s/h | 10 + 24/t + 5·a·s/(h·t) | (34 + 5·a·s/h)/t |
#
# **Your guess.** GPT-3: a = 96, s = 2,048, h = 12,288. By what factor does tensor parallelism of 8 reduce what its
# blocks keep?

# %%
predict("15.tensor", unit="times")

# %%
a, s3, h3, L, t = 96, 2048, 12288, 96, 8  # change this
one = (34 + 5 * a * s3 / h3) * s3 * h3 * L
cut = (10 + 24 / t + 5 * a * s3 / (h3 * t)) * s3 * h3 * L
print(f"all blocks: {one / 1e9:.0f} GB, one of {t} ranks {cut / 1e9:.1f} GB, ", end="")
print(f"with sequence parallelism {one / t / 1e9:.1f} GB")
reveal("15.tensor", one / cut, unit="times")

# %% [markdown]
# ## What it sends
# Per block, four all-reduces of s·b·h numbers: after attention's `out` and the MLP's `down` in forward, and in backward
# where the gradients of the two inputs are summed. In a ring, each rank sends 2(t − 1)/t times the tensor. So with 2
# bytes per number:
#
# $$4 \cdot \frac{2(t - 1)}{t} \cdot 2 \, s \, b \, h \text{ bytes per block}$$


# %%
def sends(calls, t):
    """Bytes that each rank sends in a ring: an all-reduce goes around twice."""
    return sum((2 if name == "all_reduce" else 1) * (t - 1) / t * size for name, size in calls)


t = 8  # change this
kept, calls = one_of(t, cuts)
formula = 4 * 2 * (t - 1) / t * 2 * s * b * h
print(f"formula: 4 messages, {formula / 1e6:.0f} MB per rank and block")
print(f"torch: {len(calls)} messages, {sends(calls, t) / 1e6:.0f} MB", {name for name, _ in calls})

# %% [markdown]
# **The gap** is two messages. The plan cuts q, k and v one by one, so backward sums the gradient of their input three
# times, where one sum would do. A plan with one matrix for all three would send four messages. Or give the *module* a
# distributed input: then the three gradients are added first.
#
# **Your turn.** `parallel.PrepareModuleInput(input_layouts=..., desired_input_layouts=...)` makes a module's input such
# a tensor. The norm's output is complete on every rank, before and after: `Replicate()`. Write the value.

# %%
from torch.distributed.tensor import Replicate, Shard

mine = None  # write this line again, with Replicate() twice
_, calls = one_of(8, cuts | {"attention": mine} if mine else cuts)
right = abs(sends(calls, 8) - formula) < 1
print("Right: four messages." if right else f"Not yet: {len(calls)} messages. Name both layouts.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `mine = parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())`
#
# </details>
#
# ZeRO sends weights, the same bytes for any number of tokens. Tensor parallelism sends activations, and the next
# product must wait for the sum. So it stays within a machine, where links are fast.

# %% [markdown]
# ## Cut the sequence
# *[Sequence parallelism](../docs/glossary.md#sequence-parallelism)* also cuts the norms' parts, along the sequence.
# Each all-reduce becomes a reduce-scatter and an all-gather: together the same bytes. The closed form then keeps 32/t.
# `Shard(1)` says that dimension 1, the sequence, is cut:

# %%
gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
sequence = cuts | {name: parallel.SequenceParallel() for name in ("norm1", "norm2")}
sequence |= {"attention": gather, "mlp": gather}
sequence |= {name: rows(output_layouts=Shard(1)) for name in ("attention.out", "mlp.2")}
t = 8  # change this
kept, calls = one_of(t, sequence, rows=s // t)
sbh = s * b * h
print(f"sends {sends(calls, t) / 1e6:.0f} MB; tensor parallelism's formula {formula / 1e6:.0f} MB")
print(f"keeps {kept / sbh:.2f}·s·b·h; formula 32/t = {32 / t:.2f}, gap {(32 / t) - kept / sbh:.2f}")
print(f"two gathered inputs, whole instead of cut: {2 * 2 * (1 - 1 / t):.2f}·s·b·h")

# %% [markdown]
# **The gap** has a name. torch keeps the *gathered* inputs of attention and MLP, because the matrices' gradients need
# them. Megatron-LM keeps each rank's part and gathers again in backward: one more message, and 32/t holds (Korthikanti
# et al. 2022, section 4.2.2).
#
# *Context parallelism* cuts the sequence everywhere, also in attention, and leaves the weights whole. Each of c ranks
# has s/c tokens: all activations are divided by c. Only attention needs other ranks' keys and values. In *ring
# attention* ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)) they go around, one part at a time. Softmax is exact
# nevertheless: a part gives an output y and the logarithm of its sum of exponentials.


# %%
def attend(q, k, v):
    scores = q @ k.T / q.shape[-1] ** 0.5
    log_sum = scores.logsumexp(-1, keepdim=True)
    return (scores - log_sum).exp() @ v, log_sum


torch.manual_seed(11)
q, k, v = torch.randn(3, 12, 16, dtype=torch.float64)
ranks = 4  # change this
own = q.chunk(ranks)[0]  # rank 0's queries; keys and values arrive part by part
whole, _ = attend(own, k, v)

# %% [markdown]
# **Your turn.** Two outputs come together: each weighs as much as its sum of exponentials. Write the line.

# %%
y, log_sum = attend(own, k.chunk(ranks)[0], v.chunk(ranks)[0])
for keys, values in zip(k.chunk(ranks)[1:], v.chunk(ranks)[1:], strict=True):
    other, other_sum = attend(own, keys, values)
    both = torch.logaddexp(log_sum, other_sum)
    y = (y + other) / 2  # write this line again, with log_sum, other_sum and both
    log_sum = both
off = (y - whole).abs().max().item()
print("Right: exact." if off < 1e-12 else f"Not yet: off by up to {off:.2f}.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `y = y * (log_sum - both).exp() + other * (other_sum - both).exp()`
#
# </details>
#
# Per block and forward, each rank sends its keys and values c − 1 times: 2·(c − 1)/c·s·b·h numbers, less with grouped
# queries. In backward, keys, values and their gradients go around. While one part is computed, the next can travel. In
# torch: `torch.distributed.tensor.experimental.context_parallel`.

# %% [markdown]
# ## Cut between experts
# In a [mixture of experts](../docs/glossary.md#mixture-of-experts), a router sends each token to k of E experts. With
# *expert parallelism*, each of e ranks has E/e of them. Tokens travel: an all-to-all brings them to their experts, a
# second one brings results back, and both happen again in backward. Each rank sends k·(e − 1)/e·s·b·h numbers, four
# times per layer, if routing is equal.
#
# Equal routing is a hope. How many bytes an expert keeps depends on what the router chooses in each step.

# %%
h, tokens, E, k, ranks = 1024, 4096, 64, 2, 8
with on_gpu():
    layers = nn.Linear(h, 4 * h, bias=False), nn.GELU(), nn.Linear(4 * h, h, bias=False)
    expert = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    expert(torch.randn(8, h, device="cuda", dtype=torch.bfloat16))  # cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = expert(x)
    per_token = (torch.cuda.memory_allocated() - before) / tokens
print(f"an expert keeps {per_token:,.0f} bytes per token: 20·h = {20 * h:,}")

# %% [markdown]
# Each of 8 ranks has 4,096 tokens, so 8,192 pairs of token and expert per rank on average.
#
# **Your guess.** How many GB do the experts of *one* rank keep in the worst case?

# %%
predict("15.experts", unit="GB")

# %%
torch.manual_seed(0)
every = ranks * tokens  # each token chooses k different experts, and a rank has E/ranks of them
print(
    f"interval: 0 to {k * every * per_token / 1e9:.2f} GB; equal {k * tokens * per_token / 1e9:.2f}"
)
for taste in (0, 1, 3):  # change this: how much the router prefers the first experts
    scores = torch.randn(every, E) + taste * torch.linspace(1, 0, E)
    rank_of = scores.topk(k).indices.flatten() // (E // ranks)
    pairs = torch.bincount(rank_of, minlength=ranks)
    low, high = (each.item() * per_token / 1e9 for each in (pairs.min(), pairs.max()))
    print(f"preference {taste}: the emptiest rank {low:.2f} GB, the fullest {high:.2f} GB")
reveal("15.experts", k * every * per_token)

# %% [markdown]
# So a promise is an interval: from nothing to everything. A rank has E/e ≥ k experts, so all pairs may come to it. A
# *capacity factor* cuts the interval: an expert takes at most 1.25 times its equal share, say, and drops the rest
# ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section 2.2). A balancing loss only makes it likely. No
# simulation knows what a router will choose: plan with the upper end that you allow.

# %% [markdown]
# ## Which cut, when?
# | | cuts | keeps whole | sends, per rank | can it hide? |
# |---|---|---|---|---|
# | replicas | nothing | all states | gradients, once per step | behind the last backward |
# | ZeRO-1 | optimizer states | weights, gradients | gradients and weights, once per step | yes |
# | ZeRO-3, FSDP | all states | a block at a time | weights twice, gradients once, per micro-batch | yes |
# | tensor | matrices, and what is between them | norms' activations | 4 all-reduces of s·b·h per block, 6 if recomputed | no |
# | sequence | also norms' activations | (torch: gathered inputs) | the same bytes | no |
# | context | all activations | all states | keys, values, their gradients | yes |
# | expert | experts | the rest | 4 all-to-alls of k·s·b·h per layer | partly |
# | pipeline | layers | p micro-batches on the first stage | s·b·h per cut and direction | yes, the bubble not |
#
# Take Llama-3 70B on 64 H100s, 8 per machine, with full recomputation: 512 sequences of 4,096 tokens per step.
#
# **First by memory.** A plan has d · t · p = 64 ranks. States are 16 bytes per parameter. A stage keeps a checkpoint of
# 2·s·b·h bytes per block and micro-batch.

# %%
from course_utils.figures import stack

N, L, h, s, card = 70_553_706_496, 80, 8192, 4096, 80 * 10**9


def memory(d, t, p, stage):
    """Bytes of one rank: weights, gradients, states by ZeRO's stage, and checkpoints of b = 1."""
    own = N / (t * p)
    sizes = {
        "parameters": 2 * own / (d if stage >= 3 else 1),
        "gradients": 2 * own / (d if stage >= 2 else 1),
        "optimizer_states": 12 * own / (d if stage >= 1 else 1),
        "activations": L / p * min(p, 512 / d) * 2 * s * h,
    }
    return {kind: int(size) for kind, size in sizes.items()}


# %%
plans = {"ZeRO-1": (64, 1, 1, 1), "ZeRO-3": (64, 1, 1, 3), "tensor 8, ZeRO-1": (8, 8, 1, 1)}
plans |= {"tensor 8, ZeRO-3": (8, 8, 1, 3), "pipeline 8, ZeRO-1": (8, 1, 8, 1)}  # change this
plans["tensor 8, pipeline 8"] = 1, 8, 8, 0
needs = {name: memory(*plan) for name, plan in plans.items()}
title = "Llama-3 70B on 64 GPUs: only ZeRO-1 alone does not fit"
stack(needs, title, capacity=card, capacity_label="H100", provenance="closed form, b = 1")

# %% [markdown]
# (Left out: the block that is computed again, the loss, what is gathered. The simulation below has them.)
#
# **Then by traffic.** Within a machine, GPUs talk over [NVLink](../docs/glossary.md#nvlink) at 450 GB/s, between
# machines at 50 GB/s (400 Gb/s): [data-sheet rates](../docs/glossary.md#data-sheet-rate), which no program reaches.
#
# **Your guess.** Take the best plan that fits. How many percent longer than its arithmetic alone does a step take, if
# stages wait, and messages and arithmetic take turns?

# %%
predict("15.plan", unit="%")


# %%
def seconds(d, t, p, stage, b=1, network=50e9, link=450e9):
    """Arithmetic, bubble, and messages of a step: tensor, data, pipeline."""
    m, stream, weights = 512 / (d * b), 2 * s * b * h, 2 * N / (t * p)
    arithmetic = 512 * s * (6 * N + 12 * s * h * L) * 4 / 3 / 64 / 989e12  # one more forward
    tensor = m * L / p * 6 * 2 * (t - 1) / t * stream / link
    data_link = link if t * d <= 8 else network  # ranks of one tensor group, then replicas
    data = (3 * m if stage == 3 else 2) * weights * (d - 1) / d / data_link
    pipeline = 2 * m * stream / t / network if p > 1 else 0
    return arithmetic, arithmetic * (p - 1) / m, tensor, data, pipeline


# %%
waits_for("15.plan")
print(f"{'seconds per step':22s} arithmetic  bubble  tensor   data  pipeline  in turn  hidden")
for name, plan in plans.items():
    a, bubble, tensor, data, pipeline = each = seconds(*plan)
    hidden = max(a + bubble + tensor, data + pipeline)
    fits = "" if sum(needs[name].values()) < card else "does not fit"
    print(f"{name:22s} {a:10.1f} {bubble:7.1f} {tensor:7.1f} {data:6.1f} {pipeline:9.1f}", end=" ")
    print(f"{sum(each):8.1f} {hidden:7.1f}  {fits}")

# %% [markdown]
# The last two columns rank differently. *In turn* adds everything up. *Hidden* is the best case: messages travel during the
# arithmetic, and only what is longer counts. ZeRO-3 sends most, but all of it can hide: while one block computes, the
# next is gathered. Tensor parallelism's messages cannot, because the next product needs their sum. Nor can a bubble.
#
# A larger micro-batch divides ZeRO-3's messages, and only those: weights are gathered less often.
#
# `cheapest` tries every plan that divides the model, also larger micro-batches, and counts what we left out:

# %%
from course_utils import TrainingRun, gpu
from course_utils.lessons.parallelism.cluster_plans import Cluster, Plan, account, cheapest

llama = TrainingRun("llama3-70b", 1, 4096, "bf16-master", recompute="full")
cluster = Cluster(gpu("H100-80GB"), nodes=8, per_node=8, network=50e9)  # change this
for words, overlapped in (("all hide that can", True), ("no message hides", False)):
    best = cheapest(llama, cluster, 512, overlapped)
    if best:
        print(f"fastest if {words}: {best.plan}, b = {best.micro_batch}, ", end="")
        print(
            f"{best.memory / 1e9:.1f} GB, {best.total:.1f} s in turn, {best.overlapped:.1f} hidden"
        )
if best:
    reveal("15.plan", 100 * (best.total / best.seconds["compute"] - 1), unit="%")

# %% [markdown]
# Change the network to `5e9`, predict the fastest plan, and run. Then try `gpu("A100-80GB")`, or `nodes=4`.
#
# How far from data-sheet rates is a real training? Llama 3.1 70B saw about 15 trillion tokens in 7.0 million H100 hours
# ([Meta's model card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)). MFU is
# model [FLOPs](../docs/glossary.md#flops) utilization ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311),
# section 4.1, here without attention's own products):

# %%
gpu_seconds, rate = 7.0e6 * 3600, 989e12
print(f"MFU {6 * N * 15e12 / (gpu_seconds * rate):.0%}", end="; ")
print(f"a step like ours on 64 such GPUs takes {gpu_seconds / 15e12 * 512 * 4096 / 64:.0f} s")

# %% [markdown]
# That step is longer than any in the table: no kernel reaches the data-sheet rate, sequences grew longer late in that
# training, and the hours include failures. So rank plans by the table's seconds, but promise nothing.

# %% [markdown]
# ## Try rank 0 of 64
# A plan is a promise about memory. Check it before you rent 64 GPUs: write the model, cut it, and run one rank. Here is
# a Llama in plain PyTorch, with *tensor 8, ZeRO-3*.


# %%
from torch.utils.checkpoint import checkpoint


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


# %%
class LlamaBlock(nn.Module):
    def __init__(self, h=8192, head=128, kv=1024, f=28672):
        super().__init__()
        self.norm1, self.norm2, self.head = nn.RMSNorm(h), nn.RMSNorm(h), head
        self.q, self.k, self.v, self.out = linear(h, h), linear(h, kv), linear(h, kv), linear(h, h)
        self.gate, self.up, self.down = linear(h, f), linear(h, f), linear(f, h)

    def forward(self, x):
        y = self.norm1(x)
        heads = [each(y).unflatten(-1, (-1, self.head)) for each in (self.q, self.k, self.v)]
        q, k, v = (one.transpose(1, 2) for one in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


# %%
class Llama(nn.Module):
    def __init__(self, layers, V=128256, h=8192):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(V, h), nn.RMSNorm(h), linear(h, V)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(layers))

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# %% [markdown]
# First the matrices are cut within a machine, then `fully_shard` shards each part over the 8 machines:

# %%
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

inner = {name: columns() for name in ("q", "k", "v", "gate", "up")}
inner |= {name: rows() for name in ("out", "down")}
outer = {"tokens": rows(input_layouts=Replicate()), "head": columns(use_local_output=False)}


def cut_model(model, mesh):
    parallel.parallelize_module(model, mesh["tensor"], dict(outer))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        parallel.parallelize_module(block, mesh["tensor"], dict(inner))
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy)


# %%
def rank_0(layers):
    """Bytes of rank 0 of 64 in its second step: after backward, and at the peak."""
    with on_gpu(ranks=64):
        shape, names = (8, 8), ("data", "tensor")
        mesh = torch.distributed.init_device_mesh("cuda", shape, mesh_dim_names=names)
        with torch.device("meta"):  # no rank could hold the whole model
            model = Llama(layers)
        cut_model(model, mesh).to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.zeros(1, 4096, dtype=torch.int64, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with parallel.loss_parallel():
                model(ids, ids).backward()
            after = torch.cuda.memory_allocated()
            optimizer.step()
            optimizer.zero_grad()
        numbers = sum(weight.numel() for weight in model.parameters())
        return numbers, after, torch.cuda.max_memory_allocated()


# %% [markdown]
# Blocks are equal, so each adds the same bytes, and 4 and 8 of them tell what 80 take.
#
# **Your guess.** How many GB is the peak of rank 0 with all 80 blocks?

# %%
predict("15.rank", unit="GB")

# %%
found = {layers: rank_0(layers) for layers in (4, 8)}  # change this: all 80 take a minute or two
for layers, (numbers, after, _) in found.items():
    states = 16 * numbers / 64 / 1e9
    print(f"{layers} blocks: 16·N/64 = {states:.3f} GB, after backward {after / 1e9:.3f} GB")
(low, (*_, first)), (high, (*_, last)) = found.items()
peak = first + (80 - low) * (last - first) / (high - low)
closed = account(llama, cluster, Plan(8, tensor=8, stage=3), 512).memory
print(f"beyond what is there after backward: {(first - found[low][1]) / 1e9:.1f} GB", end=" ")
print(f"with {low} blocks, {(last - found[high][1]) / 1e9:.1f} GB with {high}")
print(f"80 blocks: simulated, on a line through both, {peak / 1e9:.1f} GB", end="; ")
print(f"closed form {closed / 1e9:.1f} GB, gap {(closed - peak) / 1e9:.1f} GB")
reveal("15.rank", peak, unit="GB")

# %% [markdown]
# After backward, a rank has 16·N/64 bytes: parameters, gradients and two moments in fp32 make 4 + 4 + 8. The small gap
# is the allocator's: a tensor may take a block that is up to 1 MiB too large ([lesson
# 12](12_allocator_and_fragmentation.ipynb)).
#
# At the peak there is more, and equally much with any number of blocks: the gathered weights of a block, its gradients
# before and while they are summed in fp32, its activations. The closed form counts one gathered block
# and the loss, and cuts checkpoints along the sequence, but counts no gradients on their way. A large part is one line's
# fault: `fully_shard(model)` makes embedding and head *one* unit. Shard `model.tokens` and `model.head` by themselves in
# `cut_model`, and predict: does the peak fall?

# %% [markdown]
# ## In your own script
# Tensor parallelism for a module of yours. Run it with `torchrun --standalone --nproc-per-node 4 script.py`, or alone.

# %%
import os

import torch
from torch import distributed as dist, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

cuda = torch.cuda.is_available()
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
if cuda:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
mesh = dist.init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))

# %%
torch.manual_seed(0)  # every rank begins with the same weights and the same x
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(mesh.device_type)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(8, 64, device=mesh.device_type)
model(x).square().mean().backward()
optimizer.step()
print({name: tuple(weight.to_local().shape) for name, weight in model.named_parameters()})
dist.destroy_process_group()

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(15)

# %% [markdown]
# ## Take home
# **Remember** Choose by memory first, then by traffic: what must be divided, which messages wait, and over which links
# they go.
#
# **Breaks when** tensor parallelism leaves the machine, a router prefers some experts, or a plan is believed before its
# rank 0 has run.
#
# **Cheat-sheet line** tensor parallel, per block: keeps (10 + 24/t + 5as/ht)·sbh, with sequence parallelism
# (34 + 5as/h)·sbh/t · sends 4 · 2(t − 1)/t · 2·s·b·h bytes per rank · context: 2(c − 1)/c·s·b·h numbers forward · expert:
# 4 all-to-alls of k·s·b·h numbers, kept activations from 0 to all.
#
# Now solve the [exercises of this lesson](../exercises/15_which_cut_when.ipynb).
