# ---
# jupyter:
#   course:
#     minutes: 55
#     cpu_seconds: 15
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Counting parameters
#
# **55 minutes.** You should know what a matrix product is, and from [lesson 01](01_where_did_the_memory_go.ipynb) that
# each parameter costs a training step about 16 bytes. You need no GPU.
#
# Weights, gradients, optimizer states, checkpoints on disk, traffic between GPUs: all are *N times something*. N
# follows from the architecture, to the last unit. This lesson counts GPT-2, Llama and Mixtral, checks each line against
# real modules, and finds miscounts in well-known publications. In the exercises you write such modules yourself.

# %% [markdown]
# ## Where do 124 million parameters sit?
# The smallest GPT-2 has a [vocabulary](../docs/glossary.md#vocabulary) of V = 50,257 words. A table, the
# [embedding](../docs/glossary.md#embedding), stores a vector of h = 768 numbers for each. It is looked up, not
# multiplied. The rest is twelve [blocks](../docs/glossary.md#transformer-block) of attention and MLP.
#
# **Your guess.** How many percent of GPT-2's parameters are in that table of words?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("04.embedding", unit="%")

# %% [markdown]
# This module holds everything in GPT-2 that has parameters. `nn.TransformerEncoderLayer` is one block. Counting needs
# no forward pass.

# %%
import torch
from torch import nn


class GPT(nn.Module):
    def __init__(self, V=50257, P=1024, h=768, L=12, heads=12, bias=True) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(V, h), nn.Embedding(P, h)
        blocks = (nn.TransformerEncoderLayer(h, heads, 4 * h, bias=bias) for _ in range(L))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(h, bias=bias)
        self.head = nn.Linear(h, V, bias=False)
        self.head.weight = self.words.weight  # one matrix under two names


# %% [markdown]
# **Estimate.** The table has V·h numbers. **Measure.** On torch's `meta` device a tensor has a shape and a type, but no
# memory. So even GPT-3 fits on your laptop.

# %%
from collections import Counter

from course_utils import plus_minus

with torch.device("meta"):
    model = GPT(V=50257)  # change this
parts = Counter()
for name, parameter in model.named_parameters():
    parts[name.split(".")[0]] += parameter.numel()
for part, count in parts.items():
    print(f"{part:10s} {count:12,}  {count / parts.total():6.1%}")
gap = plus_minus(50257 * 768 - parts["words"])
print(f"all        {parts.total():12,}; V·h minus the modules' table: {gap}")
reveal("04.embedding", 100 * parts["words"] / parts.total(), unit="%")

# %% [markdown]
# The table is almost a third of what people call a stack of attention layers. Change V to Llama 3's 128,256, and
# predict the table's percentage.

# %% [markdown]
# ## One block, matrix by matrix
# A block of GPT-2 has four linear layers. From n to m numbers, a layer has m·n weights and m
# [biases](../docs/glossary.md#bias).
#
# | layer | from | to | weights | biases |
# |---|---|---|---|---|
# | queries, keys, values | h | 3h | 3h² | 3h |
# | attention's output | h | h | h² | h |
# | MLP, up | h | 4h | 4h² | 4h |
# | MLP, down | 4h | h | 4h² | h |
#
# Two LayerNorms add a scale and a shift for each of the h numbers: 2·2h. Heads only cut the same matrices into pieces.
#
# **Your guess.** Divide a block's parameters by h². What do you get?

# %%
predict("04.block", unit="h²")

# %% [markdown]
# **Estimate.** The table's rows, for GPT-2 XL. **Measure.** Every tensor of a block, summed by module.

# %%
h, heads = 1600, 25  # change this
with torch.device("meta"):
    block = nn.TransformerEncoderLayer(h, heads, 4 * h)
parts = Counter()
for name, parameter in block.named_parameters():
    print(f"{name:25s} {tuple(parameter.shape)!s:13s} {parameter.numel():12,}")
    parts[name.split(".")[0]] += parameter.numel()

# %%
formulas = {"self_attn": 4 * h**2 + 4 * h, "linear1": 4 * h**2 + 4 * h, "linear2": 4 * h**2 + h}
formulas |= {"norm1": 2 * h, "norm2": 2 * h}
for part, count in parts.items():
    gap = plus_minus(formulas[part] - count)
    print(f"{part:10s} by formula {formulas[part]:11,}, in the module {count:11,}: {gap}")
print(f"a block: {parts.total():,}; 12h² + 13h = {12 * h**2 + 13 * h:,}")
reveal("04.block", parts.total() / h**2, unit="h²")

# %% [markdown]
# Biases and norms add $13h / h^2$ to 12. Two thirds of a block are its MLP. Change the heads to 5, and predict the
# count. Later models have no biases, not even the LayerNorm's shift:

# %%
with torch.device("meta"):
    plain = nn.TransformerEncoderLayer(h, heads, 4 * h, bias=False)
without = sum(parameter.numel() for parameter in plain.parameters())
print(f"without biases: {without:,}; 12h² + 2h = {12 * h**2 + 2 * h:,}")
print(f"biases are {1 - without / parts.total():.2%} of a block")

# %% [markdown]
# ## The whole model, to the unit
# Around L blocks there are the table of words, a table of P learned
# [positions](../docs/glossary.md#learned-and-rotary-positions), and a last norm:
#
# $$N = hV + L \cdot (12h^2 + 13h) + 2h + hP$$
#
# Where is the head, which turns h numbers into V [logits](../docs/glossary.md#logits)? In GPT-2 it is
# [tied](../docs/glossary.md#tied-head): it uses the table's matrix again.
#
# A lecture's formula ends before hP. This is right for models whose positions have no parameters, and leaves something
# out of a GPT-2.
#
# The GPT-2 paper ([Radford et al.
# 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf), table 2)
# says that the largest model has 1,542 million parameters.
#
# **Your guess.** By how many million is that count off?

# %%
predict("04.paper", unit="million")


# %%
def gpt(V: int, P: int, h: int, L: int) -> int:
    return h * V + L * (12 * h**2 + 13 * h) + 2 * h + h * P


paper = {
    (768, 12): (117, 124),
    (1024, 24): (345, 355),
    (1280, 36): (762, 774),
    (1600, 48): (1542, 1558),
}
for (h, L), (said, today) in paper.items():
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in GPT(h=h, L=L, heads=1).parameters())
    N = gpt(50257, 1024, h, L)
    gap = plus_minus(N - counted)
    print(
        f"N = {N:13,}, minus the modules' count: {gap}; "
        f"paper {said:5,} M, called today {today:5,} M"
    )
reveal("04.paper", N / 1e6 - said, unit="million")
missed = N - gpt(50257, 0, h, L)
print(f"without hP, the lecture's formula misses {missed:,} parameters of the largest")

# %% [markdown]
# The paper is wrong in all four sizes. Since August 2019, a footnote in the README of OpenAI's
# [code](https://github.com/openai/gpt-2) says that the original counts "were wrong due to an error", but not due to
# which. One error fits. GPT-1 had 40,478 words (its released `config.json`). Give GPT-2's blocks that table of words:

# %%
old = 40_478  # change this
for (h, L), (said, _) in paper.items():
    print(
        f"h = {h:5,}, L = {L}: "
        f"with {old:,} words {gpt(old, 1024, h, L) / 1e6:8.2f} M, the paper says {said:5,} M"
    )

# %% [markdown]
# All four rows round to the paper's counts. Four independent mistakes would not. Whether it happened this way, only
# OpenAI could say. Change the number of words to 50,257 and to 41,000: how many rows still fit?

# %% [markdown]
# ### How to count wrong in one line
# Two lines of PyTorch look alike. One adds up `network.parameters()`, the other everything in `network.state_dict()`.
#
# **Your guess.** By how many million do the two sums differ for GPT-2 XL?

# %%
predict("04.tied", unit="million")

# %%
with torch.device("meta"):
    xl = GPT(h=1600, L=48, heads=25)  # change this
listed = sum(parameter.numel() for parameter in xl.parameters())
saved = sum(tensor.numel() for tensor in xl.state_dict().values())
print(f"parameters(): {listed:,}; state_dict(): {saved:,}")
print(f"their difference minus V·h: {saved - listed - xl.words.weight.numel()}")
reveal("04.tied", (saved - listed) / 1e6, unit="million")

# %% [markdown]
# The difference is the tied head. `parameters()` lists each tensor once, `state_dict()` each name. Memory holds the
# matrix once, with one gradient and one set of states. Change the line to `GPT()`, the smallest model, and predict the
# difference.
#
# How do you find tied weights in somebody else's model? Ask for second names. A state dict makes new tensor objects, so
# compare their addresses (`meta` has none).

# %%
names = [name for name, _ in xl.named_parameters(remove_duplicate=False)]
second = set(names) - {name for name, _ in xl.named_parameters()}
print(
    f"{len(names)} names, {len(list(xl.parameters()))} tensors; second names: {', '.join(second)}"
)
saved_small = GPT(V=100, P=8, h=32, L=1, heads=1).state_dict()
addresses = Counter(tensor.data_ptr() for tensor in saved_small.values())
shared = [name for name, tensor in saved_small.items() if addresses[tensor.data_ptr()] > 1]
print(
    f"{len(saved_small)} names, {len(addresses)} addresses; sharing an address: {', '.join(shared)}"
)

# %% [markdown]
# **Buffers** also go to the GPU and into the state dict, but have no gradient and no states. Some versions of GPT-2
# have one in each block, a causal mask.

# %%
with torch.device("meta"):
    for block in xl.blocks:
        block.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool).tril())
learned = sum(parameter.numel() for parameter in xl.parameters()) - listed
more = sum(tensor.numel() for tensor in xl.state_dict().values()) - saved
print(f"parameters(): {plus_minus(learned)}; state_dict(): {plus_minus(more)}")
print(f"on a GPU: {sum(buffer.nbytes for buffer in xl.buffers()):,} bytes, at 1 byte each")

# %% [markdown]
# ## When is 12·L·h² good enough?
# Many texts count only the matrices of the blocks: $N \approx 12 L h^2$. So do the scaling laws of [Kaplan et al.
# 2020](https://arxiv.org/abs/2001.08361) (section 2.1). In the smallest GPT-2, this leaves out a third.
#
# **Your guess.** By how many percent does 12·L·h² miss GPT-3, with h = 12,288 and L = 96?

# %%
predict("04.rule", unit="%")

# %%
sizes = {(1024, 768, 12), (1024, 1280, 36), (1024, 1600, 48), (2048, 12288, 96)}  # change this
for P, h, L in sorted(sizes):
    with torch.device("meta"):
        N = sum(parameter.numel() for parameter in GPT(P=P, h=h, L=L, heads=1).parameters())
    rule, words = 12 * L * h**2, 50257 * h
    off, less = (plus_minus(100 * (each / N - 1), 2) for each in (rule, rule + words))
    print(f"h = {h:6,}, L = {L:3}: 12Lh² {off:>6} %, 12Lh² + Vh {less:>6} %")
reveal("04.rule", 100 * (1 - 12 * 96 * 12288**2 / gpt(50257, 2048, 12288, 96)), unit="%")

# %% [markdown]
# The table grows like h, a block like h². Add (2048, 12288, 12), wide and shallow, and predict its errors. The figure
# shows GPTs from h = 256 to 8,192, with one layer per 64 of width.

# %% tags=["hide-input"]
from course_utils.figures import lines


def errors(V: int, tables: int) -> tuple[list[float], list[float]]:
    """N in millions, and the error in percent of 12Lh² plus `tables` tables of words."""
    widths = [2**i for i in range(8, 14)]
    ladder = [(gpt(V, 1024, h, h // 64), 12 * h // 64 * h**2 + tables * V * h) for h in widths]
    return [N / 1e6 for N, _ in ladder], [100 * (rule / N - 1) for N, rule in ladder]


curves = {"12Lh², V = 50,257": errors(50257, 0), "12Lh², V = 128,256": errors(128256, 0)}
curves["12Lh² + Vh"] = errors(50257, 1)
title = "12·L·h² leaves out the words: useless below 100 million parameters, good above 10 billion"
lines(curves, title, "N, millions of parameters", "rule minus N, in % of N", log_x=True)

# %% [markdown]
# 12·L·h² leaves out V·h, so its error is about
#
# $$\frac{V}{12 L h + V}$$
#
# It is below 5 % once L·h exceeds $\frac{19}{12} V$.

# %%
for V in (50257, 128256):
    print(f"V = {V:,}: 12Lh² is within 5 % from L·h = {19 * V / 12:,.0f} on")
for _, h, L in sorted(sizes):
    print(f"h = {h:,} and L = {L}: L·h = {L * h:,}")

# %% [markdown]
# ## Llama: four changes, none of them free
# Llama's block has four other parts ("keys" means keys and values):
#
# | GPT-2 | Llama | parameters of a block |
# |---|---|---|
# | keys as wide as queries | [grouped queries](../docs/glossary.md#grouped-queries): width k | 2h² becomes 2h·k |
# | GELU: 2 matrices of 4h·h | [SwiGLU](../docs/glossary.md#swiglu): 3 matrices of f·h | 8h² becomes 3f·h |
# | LayerNorm: scale and shift | [RMSNorm](../docs/glossary.md#rmsnorm): only a scale | 4h becomes 2h |
# | biases | none | 9h becomes 0 |
#
# Outside the blocks, [rotary positions](../docs/glossary.md#learned-and-rotary-positions) have no parameters. The
# larger Llamas' head is a matrix of its own.
#
# Llama 3 8B has 32 heads of queries, and 8 of keys and values.
#
# **Your guess.** How many billion parameters do grouped queries save in it?

# %%
V, h, L, k, f = 128256, 4096, 32, 8 * 128, 14336
print(f"h = {h:,}, L = {L}, k = 8 heads of 128 = {k:,}, f = {f:,}, V = {V:,}")
predict("04.grouped", unit="billion")

# %%
every, grouped = L * 2 * h * h, L * 2 * h * k
print(f"keys and values: {every:,} with a head for each query, {grouped:,} in groups of {h // k}")
reveal("04.grouped", (every - grouped) / 1e9, unit="billion")

# %% [markdown]
# Grouped queries save a tenth of the model. (They also keep fewer bytes per token, see lesson 05.) Now the whole model:


# %%
def swiglu(h: int, f: int) -> nn.Module:
    up = {name: nn.Linear(h, f, bias=False) for name in ("gate", "up")}
    return nn.ModuleDict(up | {"down": nn.Linear(f, h, bias=False)})


class Block(nn.Module):
    def __init__(self, h: int, k: int, f: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.queries, self.output = nn.Linear(h, h, bias=qkv_bias), nn.Linear(h, h, bias=False)
        self.keys, self.values = nn.Linear(h, k, bias=qkv_bias), nn.Linear(h, k, bias=qkv_bias)
        self.norm1, self.norm2, self.mlp = nn.RMSNorm(h), nn.RMSNorm(h), swiglu(h, f)


class Llama(nn.Module):
    def __init__(self, V: int, h: int, L: int, k: int, f: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(V, h)
        self.head = nn.Linear(h, V, bias=False)
        self.norm = nn.RMSNorm(h)
        self.blocks = nn.ModuleList(Block(h, k, f, qkv_bias) for _ in range(L))


# %%
with torch.device("meta"):
    llama = Llama(V, h, L, k, f)  # change this
parts = Counter()
for name, parameter in llama.named_parameters():
    part = ".".join(word for word in name.split(".")[:-1] if not word.isdigit())
    parts[part] += parameter.numel()
formulas = {"words": V * h, "head": V * h, "norm": h, "blocks.norm1": L * h, "blocks.norm2": L * h}
formulas |= dict.fromkeys(("blocks.queries", "blocks.output"), L * h**2)
formulas |= dict.fromkeys(("blocks.keys", "blocks.values"), L * h * k)
formulas |= dict.fromkeys(("blocks.mlp.gate", "blocks.mlp.up", "blocks.mlp.down"), L * f * h)
for part, count in parts.items():
    print(
        f"{part:16s} {formulas[part]:13,} by formula, minus the modules': "
        f"{plus_minus(formulas[part] - count)}"
    )
N = sum(formulas.values())
print(f"{'N':16s} {N:13,} by formula, minus the modules': {plus_minus(N - parts.total())}")

# %% [markdown]
# Change k in the line `Llama(V, h, L, k, f)` to h. Predict which rows differ now.
#
# Is our network the published one? A checkpoint on Hugging Face that is cut into several files has an index of them
# (`model.safetensors.index.json`). Its `total_size` is the bytes of all tensors, in
# [bf16](../docs/glossary.md#fp16-and-bf16). Half of it is N, counted by somebody else.

# %%
from course_utils import PRESETS

total_size = {"llama3-8b": 16_060_522_496, "llama3-70b": 141_107_412_992}
total_size |= {"mistral-7b": 14_483_464_192, "qwen2.5-7b": 15_231_233_024}
for name, size in total_size.items():
    one = PRESETS[name]
    with torch.device("meta"):
        network = Llama(one.vocab, one.hidden, one.layers, one.kv, one.ffn, bool(one.qkv_bias))
    N = sum(parameter.numel() for parameter in network.parameters())
    gap = plus_minus(N - size // 2)
    print(f"{name:12s} our modules {N:14,}   checkpoint {size // 2:14,}   difference {gap}")

# %% [markdown]
# All agree, though one of the four models has biases on its queries, keys and values. And 12·L·h²?

# %%
for name in ("llama3.2-1b", "llama3.2-3b", "tinyllama-1.1b", "llama3-8b", "llama3-70b"):
    one = PRESETS[name]
    with torch.device("meta"):
        weights = Block(one.hidden, one.kv, one.ffn).parameters()
        block = sum(parameter.numel() for parameter in weights)
    rule = 12 * one.layers * one.hidden**2 / one.parameters - 1
    print(
        f"{name:14s} a block is {block / one.hidden**2:5.2f} h², "
        f"12Lh² is off by {plus_minus(100 * rule, 1):>5} %"
    )

# %% [markdown]
# Two models are within 2 %, by luck: too many parameters in one place make up for too few in another. For Llama, take
# $2h^2 + 2hk + 3fh$ for a block and $hV$ once or twice.

# %% [markdown]
# ## Eight times seven is not 56
# Mixtral-8x7B is Mistral-7B with eight MLPs in each block, its [experts](../docs/glossary.md#mixture-of-experts). A
# small matrix, the router, sends each token to two of them. Texts have read the name as 56 billion parameters.
#
# **Your guesses.** How many billion parameters does it store? And how many does one token use?

# %%
predict("04.experts", unit="billion", asks="stored")
predict("04.active", unit="billion", asks="used by a token")

# %% [markdown]
# **Estimate.** Only the MLP exists eight times. Attention, norms, words and head are shared.

# %%
waits_for("04.active")
V, h, L, k, f = 32000, 4096, 32, 1024, 14336
E, chosen = 8, 2  # change this
shared = L * (2 * h**2 + 2 * h * k + 2 * h) + 2 * V * h + h
expert, router = L * 3 * f * h, L * E * h
stored, active = shared + router + E * expert, shared + router + chosen * expert
print(f"shared {shared:,}, one expert in all blocks {expert:,}, routers {router:,}")
print(f"stored: {stored:,}; used by a token: {active:,}")

# %% [markdown]
# **Measure.** In each of the Llama's blocks, replace the MLP by a router and E MLPs.

# %%
with torch.device("meta"):
    mixtral = Llama(V, h, L, k, f)
    for block in mixtral.blocks:
        experts = nn.ModuleList(swiglu(h, f) for _ in range(E))
        block.mlp = nn.ModuleDict({"router": nn.Linear(h, E, bias=False), "experts": experts})
counted = sum(parameter.numel() for parameter in mixtral.parameters())
in_experts = sum(
    parameter.numel() for name, parameter in mixtral.named_parameters() if ".experts." in name
)
used = counted - in_experts * (E - chosen) // E
print(
    "formula minus modules: "
    f"stored {plus_minus(stored - counted)}, active {plus_minus(active - used)}"
)
print(
    "stored, minus half of the released checkpoint's bytes: "
    f"{plus_minus(stored - 93_405_585_408 // 2)}"
)
reveal("04.experts", stored / 1e9, unit="billion")
reveal("04.active", active / 1e9, unit="billion")

# %% [markdown]
# The 56 counts seven copies of attention, words and head that do not exist. Its 7 is 7.24, rounded down. Mistral AI
# says 46.7 and 12.9 billion ([Mixtral of experts](https://mistral.ai/news/mixtral-of-experts/), 2023), as you found.
# Change E to 64, and predict both numbers.

# %% [markdown]
# Which number matters? Memory holds every expert with its gradient and states, used or not: **stored** parameters cost
# bytes. A token is multiplied only with the **active** ones: they cost time. How much faster is that than a dense model
# of the same size? Count the products with matrices, without the words, which are looked up:

# %%
dense, sparse = (2 * (count - V * h) for count in (stored, active))
print(f"forward FLOPs per token: dense {dense / 1e9:.1f} · 10⁹, Mixtral {sparse / 1e9:.1f} · 10⁹")
print(f"{dense / sparse:.2f} times fewer, at the same 16·N = {16 * stored / 1e9:,.0f} GB of states")

# %% [markdown]
# This is the most that experts can gain. A router that sends many tokens to one expert, or experts on several GPUs,
# lose some of it.

# %% [markdown]
# ## Where the parameters sit
# Each model is 100 %, and Mixtral's bar shows what is stored. Add "qwen2.5-7b". Predict: is its head larger than
# Llama's?

# %%
from course_utils.lessons.parameters.counting import parts_of
from course_utils.lessons.parameters.figures import shares

# change this
shown = ("gpt2", "gpt2-xl", "gpt3-175b", "llama3.2-1b", "llama3-8b", "llama3-70b", "mixtral-8x7b")
title = "In each family, the larger the model, the more of it is MLP"
shares({name: parts_of(name) for name in shown}, title)

# %% [markdown]
# ## From N to bytes
# A lecture says that the states of an 8-billion model are "roughly 100 GB": weights, gradients and Adam's states, at 16
# bytes per parameter.
#
# **Your guess.** With the exact N, how many GB are they for Llama 3 8B?

# %%
predict("04.states", unit="GB")

# %%
reveal("04.states", 16 * sum(formulas.values()))

# %% [markdown]
# Over a quarter more than the lecture says. Do fp32 weights really take 4·N bytes? Put GPT-2 XL on a GPU, yours or a
# simulated one.

# %%
from course_utils import on_gpu

with on_gpu():
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        on_card = GPT(h=1600, L=48, heads=25)  # change this
    held = torch.cuda.memory_allocated() - before
needed = sum(parameter.nbytes for parameter in on_card.parameters())
rounded = sum(-(-parameter.nbytes // 512) * 512 for parameter in on_card.parameters())
off = plus_minus(100 * (needed / held - 1), 1)
print(f"4·N = {needed:,} bytes, held {held:,}: gap {plus_minus(needed - held)} ({off} %)")
print(f"rounding each tensor up to a multiple of 512 bytes adds {rounded - needed:,}")

# %% [markdown]
# **The gap** is the allocator's. It hands out multiples of 512 bytes, and a vector of 1,600 fp32 numbers is 12.5 of
# them. Most of the gap has another cause: a rest below 1 MiB is not cut off from a larger piece (lesson 12). Change h
# to 2,048 and the heads to 32. Predict: what is left of the gap?

# %% [markdown]
# ## Build your own
# Start from GPT-2 (or write another preset's name below), and reach 1 billion parameters with less than 5 % in the
# words. Then make it a Llama with eight experts. How many parameters does a token use?
#
# <details><summary>An answer</summary>
#
# With GPT-2's 50,257 words the table limits the width: 768 wide with 128 layers works. With a third of the words the
# usual shape works: about 2,048 wide, 22 layers. Experts multiply the MLP, and a token uses two of them.
#
# </details>

# %%
from course_utils.lessons.parameters.widget import model_builder

model_builder("gpt2")  # change this

# %% [markdown]
# ## Five questions
# A pocket calculator helps.

# %%
from course_utils.lessons import quiz

quiz(4)

# %% [markdown]
# ## In your own script
# Print where your model's parameters sit, on any device. Each tensor counts once; the last line shows tied names and
# buffers.

# %%
from collections import Counter

from torch import nn

model = nn.ModuleDict({"words": nn.Embedding(50257, 768)})  # or your own
model["head"] = nn.Linear(768, 50257, bias=False)
model["block"] = nn.TransformerEncoderLayer(768, 12, batch_first=True)
model["head"].weight = model["words"].weight

depth = 2
counts, sizes = Counter(), Counter()
for name, parameter in model.named_parameters():
    module = ".".join(name.split(".")[:-1][:depth])
    counts[module] += parameter.numel()
    sizes[module] += parameter.nbytes
for module, count in counts.items():
    print(f"{module:20s} {count:12,} {count / counts.total():7.1%} {sizes[module]:14,} bytes")
every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
tied = sorted(every - {name for name, _ in model.named_parameters()})
buffers = sum(b.nbytes for b in model.buffers())
print(f"{counts.total():,} parameters; tied: {tied}; buffers: {buffers:,} bytes")

# %% [markdown]
# ## Take home
# **Remember** N follows from the architecture, to the unit: a GPT block has 12h² + 13h, and the words add V·h.
#
# **Breaks when** you forget the words in a small model, count a tied head twice, or use 12h² for a block with grouped
# queries, SwiGLU or experts.
#
# **Cheat-sheet line** GPT: N = hV + L(12h² + 13h) + 2h + hP · Llama: N = hV (twice if untied) +
# L(2h² + 2hk + 3fh + 2h) + h · experts: E MLPs stored, those chosen active, a router of E·h.
#
# This lesson corrects claims 12, 16 and 21 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/04_counting_parameters.ipynb).
