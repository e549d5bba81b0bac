# ---
# jupyter:
#   course:
#     minutes: 45
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Counting parameters
#
# **45 minutes.** You should know what a matrix product is, and from [lesson 01](01_where_did_the_memory_go.ipynb) that
# each parameter costs a training step about 16 bytes. No GPU is needed: nothing here has to run, it only has to be
# counted.
#
# Weights, gradients, optimizer states, checkpoints on disk, the traffic between GPUs: all of them are *N times
# something*. So N is the one number about a model that you want to be sure of, and it follows from the architecture
# alone, to the last unit. You will count GPT-2, Llama and Mixtral by hand, check each line against the real modules,
# and find that well-known publications have counted wrong.

# %% [markdown]
# ## Where do 124 million parameters sit?
# The smallest GPT-2 has a [vocabulary](../docs/glossary.md#vocabulary) of V words, and for each of them a vector of h
# numbers: the [embedding](../docs/glossary.md#embedding), a table that is looked up, not multiplied. The rest is
# twelve [blocks](../docs/glossary.md#transformer-block) of attention and MLP.

# %%
from course_utils import PRESETS
from course_utils.interactive.guesses import predict, reveal

small = PRESETS["gpt2"]
V, h, L = small.vocab, small.hidden, small.layers
print(f"V = {V:,} words, h = {h} numbers each, L = {L} blocks")

# %% [markdown]
# **Your guess first.** What part of all of GPT-2's parameters is that table of words?

# %%
predict("04.embedding", unit="%")

# %% [markdown]
# **Estimate.** The table is V·h. **Measure.** The real network is built on torch's `meta` device, where a tensor has a
# shape and a type but no memory behind it. So even GPT-3 fits on your laptop, as long as you only count.

# %%
from course_utils.lessons.parameters.counting import network_without_memory

network = network_without_memory("gpt2")
everything = sum(parameter.numel() for parameter in network.parameters())
table = network.get_parameter("embedding.weight").numel()
print(f"V·h = {V * h:,}; the module's table holds {table:,}: {V * h - table:+,}")
print(f"all parameters of the module: {everything:,}")

# %%
reveal("04.embedding", 100 * table / everything, unit="%")

# %% [markdown]
# Almost a third, in a model that people call a stack of attention layers. Remember it: rules of thumb that count
# blocks alone will be wrong by that much here.

# %% [markdown]
# ## One block, matrix by matrix
# A block of GPT-2 has four linear layers. A linear layer from n numbers to m has a matrix of m·n weights and m
# [biases](../docs/glossary.md#bias).
#
# | layer | from | to | weights | biases |
# |---|---|---|---|---|
# | queries, keys, values | h | 3h | 3h² | 3h |
# | attention's output | h | h | h² | h |
# | MLP, up | h | 4h | 4h² | 4h |
# | MLP, down | 4h | h | 4h² | h |
#
# Two LayerNorms come on top, each with a scale and a shift for each of the h numbers: 2·2h. The number of heads is
# nowhere in it: heads cut the same matrices into pieces.
#
# **Your guess.** Divide all of a block's parameters by h². What is left?

# %%
predict("04.block", unit="h²")

# %% [markdown]
# **Estimate.** Add up the columns, for GPT-2 XL.

# %%
h = PRESETS["gpt2-xl"].hidden
attention = (3 * h**2 + 3 * h) + (h**2 + h)
mlp = (4 * h**2 + 4 * h) + (4 * h**2 + h)
norms = 2 * 2 * h
block = attention + mlp + norms
print(f"attention 4h² + 4h = {attention:,}, MLP 8h² + 5h = {mlp:,}, norms 4h = {norms:,}")
print(f"a block: {block:,}; 12h² + 13h = {12 * h**2 + 13 * h:,}")

# %% [markdown]
# **Measure.** Every tensor of the first block of the real network, added up line by line.

# %%
from course_utils.lessons.parameters.counting import block_terms, counted_block, counts

xl = network_without_memory("gpt2-xl")
counts(block_terms("gpt2-xl"), counted_block(xl))

# %%
reveal("04.block", block / h**2, unit="h²")

# %% [markdown]
# **The gap** between 12 and what you see is 13h/h²: biases and norms. Two thirds of a block are its MLP. And without
# biases? Later models leave them out; then a LayerNorm loses its shift, too, and 2h is all that is left beside 12h².

# %%
from dataclasses import replace

plain = replace(PRESETS["gpt2-xl"], bias=False, qkv_bias=False)
without = sum(counted_block(network_without_memory(plain)).values())
print(f"without biases: {without:,}; 12h² + 2h = {12 * h**2 + 2 * h:,}")
print(f"biases are {100 * (block - without) / block:.2f} % of a block")

# %% [markdown]
# ## The whole model, to the unit
# Around L blocks there are the table of words, a table of P learned
# [positions](../docs/glossary.md#learned-and-rotary-positions), and one last norm:
#
# **N = hV + L·(12h² + 13h) + 2h + hP**
#
# The head, which turns h numbers into V [logits](../docs/glossary.md#logits), is missing. In GPT-2 it is
# [tied](../docs/glossary.md#tied-head): the same matrix as the table, used a second time.
#
# The GPT-2 paper ([Radford et al.
# 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf), table 2)
# says that the largest model has 1,542 million parameters. **Your guess.** By how many million is that off?

# %%
predict("04.paper", unit="million")

# %%
from course_utils.lessons.parameters.counting import GPT2_CORRECTED, GPT2_PAPER

for name, said in GPT2_PAPER.items():
    model = PRESETS[name]
    V, P, h, L = model.vocab, model.max_positions, model.hidden, model.layers
    N = h * V + L * (12 * h**2 + 13 * h) + 2 * h + h * P
    modules = sum(parameter.numel() for parameter in network_without_memory(name).parameters())
    print(f"{name:11s} N = {N:13,}  minus the modules' count: {N - modules:+d}  "
          f"paper: {said:5,} M  called today: {GPT2_CORRECTED[name]:5,} M")  # fmt: skip

# %%
reveal("04.paper", N / 1e6 - GPT2_PAPER["gpt2-xl"], unit="million")

# %% [markdown]
# **The gap.** The closed form and the modules agree to the unit, four times. The paper does not, four times. OpenAI's
# first two checkpoints carried the paper's numbers, too: the small model came out as 117M in February 2019, the medium
# one as 345M in May. In August both were renamed, to 124M and 355M, when the large model came out. Since then the
# README of the [code](https://github.com/openai/gpt-2) has a footnote that the original counts "were wrong due to an
# error". It does not say which error. You will find one that fits in the exercises.

# %%
from course_utils.lessons.parameters.counting import counted_model, model_terms

counts(model_terms("gpt2-xl"), counted_model(xl))

# %% [markdown]
# ### How to count wrong in one line
# Two lines of PyTorch look alike. One adds up `network.parameters()`, the other everything in `network.state_dict()`.
#
# **Your guess.** By how many million do they differ for GPT-2 XL?

# %%
predict("04.tied", unit="million")

# %%
listed = sum(parameter.numel() for parameter in xl.parameters())
saved = sum(tensor.numel() for tensor in xl.state_dict().values())
V, h = PRESETS["gpt2-xl"].vocab, PRESETS["gpt2-xl"].hidden
print(f"parameters(): {listed:,}; state_dict(): {saved:,}; V·h = {V * h:,}")
print(f"state_dict() minus parameters() minus V·h: {saved - listed - V * h}")
reveal("04.tied", (saved - listed) / 1e6, unit="million")

# %% [markdown]
# **The gap** is the tied head. `parameters()` lists each tensor once, however many names it has; `state_dict()` lists
# names, so the one matrix appears twice. In memory it is there once, with one gradient and one set of optimizer states.

# %% [markdown]
# ## When is 12·L·h² good enough?
# Many texts, and the scaling laws of [Kaplan et al. 2020](https://arxiv.org/abs/2001.08361) (section 2.1), count the
# matrices of the blocks and nothing else: N ≈ 12·L·h². You have seen a third of GPT-2 outside of it.
#
# **Your guess.** By how many percent does 12·L·h² miss GPT-3, with h = 12,288 and L = 96?

# %%
predict("04.rule", unit="%")

# %%
from course_utils.lessons.parameters.counting import blocks_alone, with_embedding

for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b"):
    model = PRESETS[name]
    short, better = (100 * (rule(model) / model.parameters - 1) for rule in (blocks_alone, with_embedding))
    print(f"{name:11s} 12Lh²: {short:+7.2f} %   12Lh² + Vh: {better:+6.2f} %")

# %%
reveal("04.rule", 100 * (1 - blocks_alone(PRESETS["gpt3-175b"]) / PRESETS["gpt3-175b"].parameters), unit="%")

# %% [markdown]
# Why does it get better? The table grows like h, a block like h². The next picture is a ladder of GPTs from h = 256 to
# 8,192 with a layer for each 64 of width, once with GPT-2's vocabulary and once with the 128,256 words of Llama 3.

# %%
from course_utils.lessons.parameters.counting import gpt_ladder, rule_errors
from course_utils.figures import lines

errors = {
    "12Lh², V = 50,257": rule_errors(blocks_alone, gpt_ladder(50257)),
    "12Lh², V = 128,256": rule_errors(blocks_alone, gpt_ladder(128256)),
    "12Lh² + Vh": rule_errors(with_embedding, gpt_ladder(50257)),
}
title = "12·L·h² forgets the words: useless below 100 million parameters, good above 10 billion"
lines(errors, title, "N, millions of parameters", "rule minus N, in % of N", log_x=True)

# %% [markdown]
# **The gap** in one line: what 12·L·h² forgets is V·h, so the error is about V/(12·L·h + V). It is below 5 % once L·h
# exceeds 19·V/12.

# %%
for V in (50257, 128256):
    need = 19 * V / 12
    print(f"V = {V:,}: 12Lh² is within 5 % from L·h = {need:,.0f} on")
for name in ("gpt2", "gpt2-xl", "gpt3-175b"):
    print(f"{name:9s} has L·h = {PRESETS[name].layers * PRESETS[name].hidden:,}")

# %% [markdown]
# ## Llama: four changes, none of them free
# Llama's block has the same skeleton and other parts (keys stands for keys and values):
#
# | GPT-2 | Llama | parameters of a block |
# |---|---|---|
# | keys as wide as queries | [grouped queries](../docs/glossary.md#grouped-queries): width k | 2h² becomes 2h·k |
# | GELU: 2 matrices of 4h·h | [SwiGLU](../docs/glossary.md#swiglu): 3 matrices of f·h | 8h² becomes 3f·h |
# | LayerNorm: scale and shift | [RMSNorm](../docs/glossary.md#rmsnorm): scale alone | 4h becomes 2h |
# | biases | none | 9h becomes 0 |
#
# Outside the blocks: [rotary positions](../docs/glossary.md#learned-and-rotary-positions) have no parameters, and the
# head is a matrix of its own in the larger ones.
#
# Llama 3 with 8 billion parameters has 32 query heads, and 8 heads of keys and values.
#
# **Your guess.** How many billion parameters do its grouped queries save?

# %%
llama = PRESETS["llama3-8b"]
V, h, L, k, f = llama.vocab, llama.hidden, llama.layers, llama.kv, llama.ffn
print(f"h = {h:,}, L = {L}, k = {llama.kv_heads} · {llama.head_size} = {k:,}, f = {f:,}, V = {V:,}")
predict("04.grouped", unit="billion")

# %%
all_heads = L * 2 * h * h
grouped = L * 2 * h * k
print(f"keys and values: {all_heads:,} with a head for each query, {grouped:,} in groups of {h // k}")
reveal("04.grouped", (all_heads - grouped) / 1e9, unit="billion")

# %% [markdown]
# A tenth of the model. Most of the point lies elsewhere, though: smaller keys and values mean fewer bytes to keep for
# each token (lesson 05). Now the whole block, and the whole model, by letters and by modules.

# %%
llama_network = network_without_memory("llama3-8b")
counts(block_terms("llama3-8b"), counted_block(llama_network))

# %%
counts(model_terms("llama3-8b"), counted_model(llama_network))

# %% [markdown]
# Is our network the published one? Each released checkpoint on Hugging Face comes with an index of its files
# (`model.safetensors.index.json`), whose `total_size` is the number of bytes of all tensors, in
# [bf16](../docs/glossary.md#fp16-and-bf16). Half of it is N, counted by somebody else.

# %%
from course_utils.lessons.parameters.counting import CHECKPOINT_BYTES, total

for name in ("llama3-8b", "llama3-70b", "mistral-7b", "qwen2.5-7b"):
    N, counted = total(model_terms(name)), CHECKPOINT_BYTES[name] // 2
    print(f"{name:12s} by letters {N:14,}   checkpoint {counted:14,}   difference {N - counted:+d}")

# %% [markdown]
# **No gap**, though one of the four has biases on its queries, keys and values. And 12·L·h²? Look at the first column
# before you trust it.

# %%
for name in ("llama3.2-1b", "llama3.2-3b", "tinyllama-1.1b", "llama3-8b", "llama3-70b"):
    model = PRESETS[name]
    per_block = total(block_terms(name)) / model.hidden**2
    print(f"{name:14s} a block is {per_block:5.2f} h² (k = {model.kv / model.hidden:.3f} h, "
          f"f = {model.ffn / model.hidden:.2f} h), 12Lh² is off by "
          f"{100 * (blocks_alone(model) / model.parameters - 1):+6.1f} %")  # fmt: skip

# %% [markdown]
# Two of them are within 2 %, and that is luck: too many parameters in one place make up for too few in another. For
# Llama, take 2h² + 2h·k + 3f·h for a block and V·h once or twice. It is just as short.

# %% [markdown]
# ## Eight times seven is not 56
# Mixtral-8x7B is Mistral-7B with eight MLPs in each block, its [experts](../docs/glossary.md#mixture-of-experts). A
# small matrix, the router, sends each token to two of them. Texts have read the name as 8 · 7 = 56 billion parameters.
#
# **Your guesses.** How many billion are stored? And how many does one token use?

# %%
predict("04.experts", unit="billion")
predict("04.active", unit="billion")

# %% [markdown]
# **Estimate.** Only the MLP is there eight times. Attention, norms, words and head are shared.

# %%
mixtral = PRESETS["mixtral-8x7b"]
V, h, L, k, f, E = mixtral.vocab, mixtral.hidden, mixtral.layers, mixtral.kv, mixtral.ffn, mixtral.experts
shared = L * (2 * h**2 + 2 * h * k + 2 * h) + 2 * V * h + h
expert, router = L * 3 * f * h, L * E * h
stored, active = shared + router + E * expert, shared + router + mixtral.experts_per_token * expert
print(f"shared {shared:,}, one expert in all blocks {expert:,}, routers {router:,}")
print(f"stored: {stored:,}; used by a token: {active:,}")

# %% [markdown]
# **Measure.**

# %%
experts_network = network_without_memory("mixtral-8x7b")
modules = sum(parameter.numel() for parameter in experts_network.parameters())
idle = sum(p.numel() for name, p in experts_network.named_parameters() if ".experts." in name) * (E - 2) // E
print(f"stored: {stored - modules:+d}, active: {active - (modules - idle):+d} (by letters minus by modules)")
print(f"by letters minus the released checkpoint: {stored - CHECKPOINT_BYTES['mixtral-8x7b'] // 2:+d}")
reveal("04.experts", stored / 1e9, unit="billion")
reveal("04.active", active / 1e9, unit="billion")

# %% [markdown]
# **The gap** to 56: seven copies of attention, words and head that do not exist, and a name that rounds 7.24 down.
# Mistral AI says 46.7 and 12.9 billion ([Mixtral of experts](https://mistral.ai/news/mixtral-of-experts/), 2023), as
# you found.

# %%
mistral = PRESETS["mistral-7b"].parameters
print(f"8 Mistral-7B: {8 * mistral:,}; minus 7 times what is shared: {8 * mistral - 7 * shared:,}")
print(f"plus the routers: {8 * mistral - 7 * shared + router:,}")

# %% [markdown]
# Which of the two counts? Memory holds every expert, its gradient and its states, used or not: **stored** parameters
# cost bytes. A token is multiplied with the **active** ones: they cost time.

# %% [markdown]
# ## Where the parameters sit
# Everything so far in one picture, each model as 100 %. Mixtral's bar shows what is stored.

# %%
from course_utils.lessons.parameters.figures import percent, shares
from course_utils.lessons.parameters.counting import parts

names = ("gpt2", "gpt2-xl", "gpt3-175b", "llama3.2-1b", "llama3-8b", "llama3-70b", "mixtral-8x7b")
found = {name: parts(name) for name in names}
one, other = (percent(found[name]["embedding"], PRESETS[name].parameters) for name in ("gpt2", "gpt3-175b"))
shares(found, f"In each family, the larger the model, the more of it is MLP: GPT's words fall from {one} to {other}")

# %% [markdown]
# ## From N to bytes
# A lecture says that the states of an 8-billion model are "roughly 100 GB": weights, gradients and
# Adam's states, at 16 bytes a parameter. **Your guess**, with the N that you know now?

# %%
predict("04.states", unit="GB")

# %%
reveal("04.states", 16 * total(model_terms("llama3-8b")))

# %% [markdown]
# One more question to settle: is N times 4 bytes really what fp32 weights take in a step? Simulate GPT-2 XL's.

# %%
from course_utils import TrainingRun, format_bytes, measure

step = measure(TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16", recompute="full"))
weights = step.moments["end of step 2"]["parameters"]
N = PRESETS["gpt2-xl"].parameters
print(f"4·N = {4 * N:,} bytes, {step.word} {weights:,}: {4 * N - weights:+,} ({step.provenance})")

# %% [markdown]
# **The gap** is not a parameter but rounding. PyTorch's allocator hands out multiples of 512 bytes, and a vector of
# 1,600 numbers in fp32 is 12.5 of them.

# %%
from math import prod

from course_utils.models import parameter_shapes

sizes = [4 * prod(shape) for shape in parameter_shapes(PRESETS["gpt2-xl"]).values()]
odd = [size for size in sizes if size % 512]
print(f"{len(odd)} of {len(sizes)} tensors end in half a block of 512 bytes: {sum(512 - size % 512 for size in odd):,}")
print(f"together with 4·N: {format_bytes(4 * N + sum(512 - size % 512 for size in odd), 'B', 0)}")

# %% [markdown]
# ## Build your own
# Move the sliders and watch where the parameters go. Then try this: beginning with GPT-2, reach a model of 1 billion
# parameters of which the words are less than 5 %. Then make it a Llama with eight experts and see what a token uses.
#
# <details><summary>An answer</summary>
#
# With GPT-2's 50,257 words the table alone limits the width, so the model has to be narrow and very deep, such as 768
# wide with 128 layers. With a third of the words the usual shape does: about 2,048 wide, 22 layers. With experts the
# MLP multiplies, and a token uses two of them.
#
# </details>

# %%
from course_utils.lessons.parameters.widget import model_builder

model_builder("gpt2")

# %% [markdown]
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it. A pocket calculator helps.

# %%
from course_utils.lessons import quiz

quiz(4)

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | GPT-2 has 117, 345, 762 and 1,542 million parameters (its paper) | every one is too low, and OpenAI agrees |
# | 8×7 is roughly 56 billion (lecture) | experts share everything but their MLPs |
# | the states of an 8-billion model are roughly 100 GB (lecture) | 16 bytes times the exact N is over a quarter more |
#
# ## Take home
# **Remember** N follows from the architecture, to the unit: a GPT block is 12h² + 13h, and the words are V·h more.
#
# **Breaks when** you forget the words in a small model, count a tied head twice, or take 12h² for a block that has
# grouped queries, SwiGLU or experts.
#
# **Cheat-sheet line** GPT: N = hV + L(12h² + 13h) + 2h + hP · Llama: N = hV (twice if untied) + L(2h² + 2hk + 3fh + 2h)
# and h · experts: E MLPs stored, those chosen active, a router of E·h.
#
# Now solve the [exercises of this lesson](../exercises/04_counting_parameters.ipynb).
