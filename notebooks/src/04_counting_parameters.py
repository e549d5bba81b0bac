# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 15
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Counting parameters
#
# **60 minutes.** You should know what a matrix product is, and from [lesson 01](01_where_did_the_memory_go.ipynb) that
# each parameter costs a training step about 16 bytes. You need no GPU.
#
# Weights, gradients, optimizer states, checkpoints on disk, traffic between GPUs: all are *N times something*, and N
# follows from the architecture, to the last unit. You count GPT-2, Llama and Mixtral, and find what went wrong in
# well-known publications.

# %% [markdown]
# ## A table that is wrong
# In 2019, OpenAI published GPT-2 in four sizes. Table 2 of the paper ([Radford et al.
# 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)) lists
# their parameters:
#
# | layers L | hidden size h | parameters |
# |---|---|---|
# | 12 | 768 | 117 million |
# | 24 | 1,024 | 345 million |
# | 36 | 1,280 | 762 million |
# | 48 | 1,600 | 1,542 million |
#
# All four are wrong. Since August 2019, a footnote in the README of OpenAI's [code](https://github.com/openai/gpt-2)
# says so: they "were wrong due to an error". It does not say which error. **You will find it.**
#
# Start with the model. This module holds everything in GPT-2 that has parameters, and cannot even run. Counting needs no
# forward pass.

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
# The model has a [vocabulary](../docs/glossary.md#vocabulary) of V = 50,257 words. A table, the
# [embedding](../docs/glossary.md#embedding), stores h numbers for each. It is looked up, not multiplied. A second table
# has P = 1,024 learned [positions](../docs/glossary.md#learned-and-rotary-positions). The rest is L
# [blocks](../docs/glossary.md#transformer-block) of attention and MLP. The head turns h numbers into V
# [logits](../docs/glossary.md#logits). It is [tied](../docs/glossary.md#tied-head): it uses the table of words again.
#
# **Your guess.** How many percent of the smallest GPT-2's parameters are in the table of words?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("04.embedding", unit="%")

# %% [markdown]
# Add up `numel()`. On torch's `meta` device a tensor has a shape and a type, but no memory. So even GPT-3 fits on your
# laptop.

# %%
from collections import Counter

with torch.device("meta"):
    model = GPT(V=50257)  # change this
parts = Counter()
for name, parameter in model.named_parameters():
    parts[name.split(".")[0]] += parameter.numel()
reveal("04.embedding", 100 * parts["words"] / parts.total(), unit="%")
for part, size in parts.items():
    print(f"{part:10s} {size:12,}  {size / parts.total():6.1%}")
print(f"all        {parts.total():12,}")

# %% [markdown]
# The paper's 117 million is 7 million short. But short of what? Change V to Llama 3's 128,256, and predict the table's
# percentage.

# %% [markdown]
# ## To scale
# Here is that model as areas. Each matrix is measured in squares of h·h = 768² numbers.

# %%
from course_utils.lessons.parameters.figures import to_scale

title = "Two thirds of a block are its MLP, almost a third of the model is a table"
to_scale("gpt2", title)  # change this: "gpt2-xl"

# %% [markdown]
# What is too thin to see? A layer from n to m numbers has m [biases](../docs/glossary.md#bias). The four layers go from
# h to 3h, from h to h, from h to 4h and from 4h to h. Before attention and before the MLP there is a LayerNorm, with a
# scale and a shift for each of the h numbers. Heads have nothing: they cut the same matrices into pieces.
#
# **Your turn.** Write N by hand. Only the line of `block` is missing: matrices, biases and norms.


# %%
def gpt(V, P, h, L):
    """Return the number of parameters of a GPT-2."""
    block = 0  # write this line
    return h * V + h * P + L * block + 2 * h


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


for h, L in ((768, 12), (1600, 48)):
    with torch.device("meta"):
        gap = gpt(50257, 1024, h, L) - count(GPT(h=h, L=L, heads=1))
    print(f"h = {h}:", f"Not yet: a block is off by {gap // L:+,}." if gap else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `block = 12 * h**2 + 13 * h`. The matrices have 3h² + h² + 4h² + 4h², the biases 3h + h + 4h + h, the two norms 2·2h.
#
# </details>
#
# ## The clue
# The smallest model is off by 7.4 million. Is the error in the blocks? The largest model has 4 times as many, each with
# (1600/768)² times as many parameters: together 17 times. Or is it in a table? Its rows are only twice as long.
#
# **Your guess.** By how many million is the paper's largest model off?

# %%
predict("04.paper", unit="million")

# %%
paper = {(768, 12): 117, (1024, 24): 345, (1280, 36): 762, (1600, 48): 1542}
for (h, L), said in paper.items():
    with torch.device("meta"):
        N = count(GPT(h=h, L=L, heads=1))
    missing = N - said * 10**6
    print(f"{N:13,}, {missing / 1e6:5.2f} M more than in the paper: {missing / h:6,.0f} · h")
reveal("04.paper", missing / 1e6, unit="million")

# %% [markdown]
# There is your clue. Divided by h, about the same number is missing in all four models, however many layers they have.
# The differences are what rounding to millions hides. So something is missing once, with rows of h numbers.
#
# **Your turn.** Which suspect explains all four rows of the paper? Two are cleared below. Give the third a number.

# %%
suspects = {
    "positions forgotten": {"P": 0},
    "biases forgotten": {"bias": False},
    "another number of words": {"V": 50257},  # write the number
}
for name, changes in suspects.items():
    fit = 0
    for (h, L), said in paper.items():
        with torch.device("meta"):
            fit += round(count(GPT(h=h, L=L, heads=1, **changes)) / 1e6) == said
    verdict = "Guilty." if fit == len(paper) else "Not yet." if "V" in changes else "Cleared."
    print(f"{name}: fits {fit} of 4 rows. {verdict}")

# %% [markdown]
# <details><summary>Who was it?</summary>
#
# From 50,257 words take about 9,700, and all four rows fit. GPT-1, of the year before, had 40,478 words (its released
# `config.json`). Set V to that: all four counts round to the paper's. Four independent mistakes would not. Whether it
# happened this way, only OpenAI could say.
#
# </details>
#
# The first suspect is found elsewhere: a lecture's formula ends before h·P. This is right for models whose positions
# have no parameters, and leaves 1,024·h out of a GPT-2.

# %% [markdown]
# ## How to count wrong in one line
# Two lines of PyTorch look alike. One adds up `network.parameters()`, the other everything in `network.state_dict()`.
# Which sum is larger for GPT-2 XL, and why? Some versions of GPT-2 also have a causal mask in each block, a **buffer**.

# %%
with torch.device("meta"):
    xl = GPT(h=1600, L=48, heads=25)  # change this
    for block in xl.blocks:
        block.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool).tril())
listed = count(xl)
saved = sum(tensor.numel() for tensor in xl.state_dict().values())
masks = sum(buffer.numel() for buffer in xl.buffers())
tied = xl.head.weight.numel()
print(f"parameters() {listed:,}, state_dict() {saved:,}")
print(f"the difference {saved - listed:,}: tied head {tied:,}, masks {masks:,}")

# %% [markdown]
# `parameters()` lists each tensor once, `state_dict()` each name. Memory holds the tied matrix once, with one gradient
# and one set of states. A buffer goes to the GPU and into the state dict, but has no gradient and no states. Change the
# line to `GPT()`, the smallest model, and predict both differences.
#
# How do you find tied weights in somebody else's model? Ask for second names.

# %%
names = {name for name, _ in xl.named_parameters(remove_duplicate=False)}
print(f"{len(names)} names, second ones: {names - {name for name, _ in xl.named_parameters()}}")

# %% [markdown]
# ## When is 12·L·h² good enough?
# Your count was N = hV + hP + L·(12h² + 13h) + 2h. Many texts count only the matrices of the blocks: $N \approx 12 L
# h^2$. So do the scaling laws of [Kaplan et al. 2020](https://arxiv.org/abs/2001.08361) (section 2.1). In the smallest
# GPT-2, this leaves out a third.
#
# **Your guess.** By how many percent does 12·L·h² miss GPT-3, with h = 12,288 and L = 96?

# %%
predict("04.rule", unit="%")

# %%
for P, h, L in ((1024, 768, 12), (1024, 1600, 48), (2048, 12288, 96)):  # change this
    with torch.device("meta"):
        N = count(GPT(P=P, h=h, L=L, heads=1))
    rule, words = 12 * L * h**2, 50257 * h
    off, less = rule / N - 1, (rule + words) / N - 1
    print(f"h = {h:6,}, L = {L}: 12Lh² is off by {off:+.2%}, 12Lh² + Vh by {less:+.2%}")
reveal("04.rule", -100 * off, unit="%")

# %% [markdown]
# The table grows like h, a block like h². Add (2048, 12288, 12), wide and shallow, and predict its errors. The figure
# shows GPTs from h = 256 to 8,192, with one layer per 64 of width.

# %% tags=["hide-input"]
from course_utils.figures import lines


def errors(V, tables):
    """Return N in millions, and the error in percent of 12Lh² plus so many tables of words."""
    sizes = [(2**i, 2**i // 64) for i in range(8, 14)]
    exact = [h * (V + 1024) + L * (12 * h**2 + 13 * h) + 2 * h for h, L in sizes]
    rules = [12 * L * h**2 + tables * V * h for h, L in sizes]
    off = [100 * (rule / N - 1) for rule, N in zip(rules, exact)]
    return [N / 1e6 for N in exact], off


curves = {"12Lh², V = 50,257": errors(50257, 0), "12Lh², V = 128,256": errors(128256, 0)}
curves["12Lh² + Vh"] = errors(50257, 1)
title = "12·L·h² leaves out the words: useless below 100 million parameters, good above 10 billion"
lines(curves, title, "N, millions of parameters", "rule minus N, in % of N", log_x=True)

# %% [markdown]
# 12·L·h² leaves out V·h, so its error is about
#
# $$\frac{V}{12 L h + V}$$
#
# It is below 5 % once L·h exceeds $\frac{19}{12} V$. GPT-2 XL's 48 · 1,600 is just not enough.

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
# larger Llamas' head is a matrix of its own. Here is one to scale, then its modules:

# %%
to_scale("llama3-8b", "Llama 3 8B: narrow keys and values, and three matrices in the MLP")


# %%
def linear(n, m, bias=False):
    return nn.Linear(n, m, bias=bias)


def swiglu(h, f):
    return nn.ModuleDict({"gate": linear(h, f), "up": linear(h, f), "down": linear(f, h)})


class Block(nn.Module):
    def __init__(self, h, k, f, qkv_bias=False):
        super().__init__()
        self.queries, self.output = linear(h, h, qkv_bias), linear(h, h)
        self.keys, self.values = linear(h, k, qkv_bias), linear(h, k, qkv_bias)
        self.norm1, self.norm2, self.mlp = nn.RMSNorm(h), nn.RMSNorm(h), swiglu(h, f)


# %%
class Llama(nn.Module):
    def __init__(self, V, h, L, k, f, qkv_bias=False):
        super().__init__()
        self.words, self.head, self.norm = nn.Embedding(V, h), linear(h, V), nn.RMSNorm(h)
        self.blocks = nn.ModuleList(Block(h, k, f, qkv_bias) for _ in range(L))


# %% [markdown]
# Is this the published network? A checkpoint on Hugging Face that is cut into several files has an index of them
# (`model.safetensors.index.json`). Its `total_size` is the bytes of all tensors, in
# [bf16](../docs/glossary.md#fp16-and-bf16). Half of it is N, counted by somebody else.

# %%
from course_utils import PRESETS

total_size = {"llama3-8b": 16_060_522_496, "llama3-70b": 141_107_412_992}
total_size |= {"mistral-7b": 14_483_464_192, "qwen2.5-7b": 15_231_233_024}
print("model, N in our modules, modules − checkpoint, formula − modules")
for name, size in total_size.items():
    one = PRESETS[name]
    V, h, L, k, f = one.vocab, one.hidden, one.layers, one.kv, one.ffn  # change this
    with torch.device("meta"):
        ours = count(Llama(V, h, L, k, f, bool(one.qkv_bias)))
    N = 2 * V * h + L * (2 * h**2 + 2 * h * k + 3 * f * h + 2 * h) + h
    print(f"{name:10s} {ours:14,} {ours - size // 2:8,} {N - ours:10,}")

# %% [markdown]
# All agree with their checkpoints. One differs from the formula: its queries, keys and values have biases, L·(h + 2k)
# numbers. Change `one.kv` to `one.hidden`, as wide as queries. Predict: by how many billion does `llama3-8b` grow? That
# is what grouped queries save. (They also keep fewer bytes per token, see lesson 05.)
#
# And 12·L·h²?

# %%
for name in ("llama3.2-1b", "llama3.2-3b", "tinyllama-1.1b", "llama3-8b", "llama3-70b"):
    one = PRESETS[name]
    with torch.device("meta"):
        block = count(Block(one.hidden, one.kv, one.ffn)) / one.hidden**2
    off = 12 * one.layers * one.hidden**2 / one.parameters - 1
    print(f"{name:14s} a block is {block:5.2f} h², 12Lh² is off by {off:+.1%}")

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
# **Estimate.** Only the MLP exists eight times. Attention, norms, words and head are shared. **Measure.** In each block
# of a Llama, replace the MLP by a router and E MLPs.

# %%
V, h, L, k, f = 32000, 4096, 32, 1024, 14336
E, chosen = 8, 2  # change this
shared = L * (2 * h**2 + 2 * h * k + 2 * h) + 2 * V * h + h
expert, router = L * 3 * f * h, L * E * h
stored, active = shared + router + E * expert, shared + router + chosen * expert
with torch.device("meta"):
    mixtral = Llama(V, h, L, k, f)
    for block in mixtral.blocks:
        experts = nn.ModuleList(swiglu(h, f) for _ in range(E))
        block.mlp = nn.ModuleDict({"router": linear(h, E), "experts": experts})
reveal("04.experts", stored / 1e9, unit="billion")
reveal("04.active", active / 1e9, unit="billion")
print(f"shared {shared:,}, one expert in all blocks {expert:,}, routers {router:,}")
print(f"stored {stored:,}, minus the modules {stored - count(mixtral)}")
print(f"minus half of the released checkpoint's bytes {stored - 93_405_585_408 // 2}")

# %% [markdown]
# The 56 counts seven copies of attention, words and head that do not exist. Its 7 is 7.24, rounded down. Mistral AI
# says 46.7 and 12.9 billion ([Mixtral of experts](https://mistral.ai/news/mixtral-of-experts/), 2023), as you found.
# Change E to 64, and predict both numbers.
#
# Which number matters? Memory holds every expert with its gradient and states, used or not: **stored** parameters cost
# bytes. A token is multiplied only with the **active** ones: they cost time. How much faster is that than a dense model
# of the same size? Count the products with matrices, without the words, which are looked up:

# %%
dense, sparse = (2 * (size - V * h) / 1e9 for size in (stored, active))
print(f"forward, 10⁹ FLOPs per token: dense {dense:.1f}, Mixtral {sparse:.1f}")
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

shown = ["gpt2", "gpt2-xl", "gpt3-175b", "llama3.2-1b", "llama3-8b", "llama3-70b"]
shown += ["mixtral-8x7b"]  # change this
title = "In each family, the larger the model, the more of it is MLP"
shares({name: parts_of(name) for name in shown}, title)

# %% [markdown]
# ## From N to bytes
# A lecture says that the states of an 8-billion model are "roughly 100 GB": weights, gradients and Adam's states, at 16
# bytes per parameter. The exact N says over a quarter more. And do fp32 weights really take 4·N bytes? Put GPT-2 XL on
# a GPU, yours or a simulated one.

# %%
from course_utils import on_gpu

print(f"Llama 3 8B: 16·N = {16 * PRESETS['llama3-8b'].parameters / 1e9:.1f} GB")
with on_gpu():
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        on_card = GPT(h=1600, L=48, heads=25)  # change this
    held = torch.cuda.memory_allocated() - before
needed = sum(parameter.nbytes for parameter in on_card.parameters())
rounded = sum(-(-parameter.nbytes // 512) * 512 for parameter in on_card.parameters())
print(f"4·N = {needed:,} bytes, held {held:,}: gap {needed - held:+,} ({needed / held - 1:+.1%})")
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

# %%
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
