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
# # 18 · Who is right?
#
# **65 minutes.** You should know what a block keeps ([lesson 05](05_activations.ipynb)), what recomputation leaves
# ([lesson 06](06_recomputation.ipynb)), and what autocast adds ([lesson 03](03_mixed_precision.ipynb)). You need no
# GPU.
#
# Here you read three published formulas for the memory of a training step, find the term that each one lacks, and
# correct it. Then a recorded GPU judges them, and you. Each was made for something. *For what?*

# %% [markdown]
# ## Three formulas
# You train GPT-2 XL on one GPU: 32 sequences of 1,024 tokens, [bf16](../docs/glossary.md#fp16-and-bf16) autocast,
# AdamW, [flash attention](../docs/glossary.md#flashattention), nothing recomputed. How many bytes does that take? Three
# public answers, with N parameters, L layers, width h, a heads and a vocabulary of V:


# %%
def zero(N, L, h, a, V, s, b):  # Rajbhandari et al. 2020, section 3
    states = 2 * N + 2 * N + 12 * N  # weights, gradients, what Adam keeps
    return states + 2 * 12 * h * b * s * L


def playbook(N, L, h, a, V, s, b):  # the text of the Ultra-Scale Playbook, 2025
    states = 2 * N + 2 * N + 12 * N
    return states + L * s * b * h * (34 + 5 * a * s / h)


def llm_analysis(N, L, h, a, V, s, b):  # analysis.py of llm-analysis, 2023
    states = 2 * N + 4 * N + 12 * N  # its gradients are fp32
    attention = 11 * h + 2 * (2 * h + 4 * a)  # the second part is flash attention's
    mlp = 2 * h + 4 * 4 * h
    norms = 2 * 4 * h
    loss = s * b * (2 * V + 4 * h)
    return states + L * s * b * (attention + mlp + norms) + loss


# %% [markdown]
# **Your guess.** Divide the largest of the three answers by the smallest: what do you get?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("18.fold", unit="times")

# %%
xl = {"N": 1_557_611_200, "L": 48, "h": 1600, "a": 25, "V": 50257, "s": 1024, "b": 32}
formulas = {"ZeRO": zero, "Ultra-Scale Playbook": playbook, "llm-analysis": llm_analysis}
said = {name: formula(**xl) for name, formula in formulas.items()}
for name, size in said.items():
    print(f"{name:21s} {size / 1e9:6.1f} GB")
reveal("18.fold", max(said.values()) / min(said.values()), unit="times")

# %% [markdown]
# ## The judge
# Execute the step. A GPT in plain PyTorch, with dropout as in GPT-2, and with either kernel for attention:

# %%
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, h, a, eager):
        super().__init__()
        self.qkv, self.out, self.a, self.eager = nn.Linear(h, 3 * h), nn.Linear(h, h), a, eager

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        if self.eager:
            future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(future, -torch.inf)
            y = F.dropout(scores.softmax(-1), 0.1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


# %%
class Block(nn.Module):
    def __init__(self, h, a, eager=False):
        super().__init__()
        self.norm1, self.norm2, self.attend = (
            nn.LayerNorm(h),
            nn.LayerNorm(h),
            Attention(h, a, eager),
        )
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        x = x + F.dropout(self.attend(self.norm1(x)), 0.1)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1)


# %%
class GPT(nn.Module):
    def __init__(self, L, h, a, V):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks = nn.Sequential(*(Block(h, a) for _ in range(L)))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = F.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]], 0.1)
        return self.head(self.norm(self.blocks(x)))


# %% [markdown]
# Inside `on_gpu()`, "cuda" is your GPU, if it is large enough, or a [simulated
# one](../docs/glossary.md#simulated-gpu) that counts every tensor. `weigh` notes the most that was allocated in each
# part of a second step, when AdamW's states exist. Its hook runs when backward has made the logits' gradient.


# %%
def note(moment):
    made = sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
    notes[moment] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), made
    torch.cuda.reset_peak_memory_stats()


# %%
def weigh(model, text):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        note("before the step")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        logits.register_hook(lambda gradient: note("the loss's backward"))
        del logits
        note("forward")
        loss.backward()
        note("the rest of backward")
        optimizer.step()
        optimizer.zero_grad()
        note("optimizer")


# %% [markdown]
# **Your guess.** Which of the three answers is nearest to the step's peak? How many GB is that peak?

# %%
predict("18.peak", unit="GB")

# %%
from course_utils import on_gpu
from course_utils.lessons.calculators import calculators, recorded

with on_gpu(needs="138 GB"):
    model = GPT(L=48, h=1600, a=25, V=50257).to("cuda")
    text = torch.randint(50257, (32, 1025), device="cuda")
    notes = {}
    weigh(model, text)

# %%
from course_utils import TrainingRun
from course_utils.figures import bars

for moment, (most, _, gradients) in notes.items():
    print(f"{moment:21s} at most {most / 1e9:6.1f} GB, with {gradients / 1e9:3.1f} GB of gradients")
peak = max(most for most, _, _ in list(notes.values())[1:])
reveal("18.peak", peak)
card = recorded.RECORDED["gpt2-xl", 32].counted
print(f"a GPU counted {card / 1e9:.1f} GB; this step is {peak / card - 1:+.2%} off")
gpt = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16")
said = calculators.answers(gpt) | {"counted by a GPU": card}
title = "Nine answers for one step of GPT-2 XL, and what a GPU counted"
bars(said, title, highlight="counted by a GPU", provenance=recorded.PROVENANCE)

# %% [markdown]
# The peak is in the backward of the loss, where no gradient of a weight exists yet. The figure has six more
# calculators. Before you laugh, read what each was made for:
#
# | who | made for |
# |---|---|
# | Hugging Face accelerate, `estimate.py` | the size of a checkpoint, and what Adam adds (states only) |
# | DeepSpeed's documentation, ZeRO-2 | model states, explicitly without activations (states only) |
# | ZeRO, section 3 | showing where the memory goes, to shard it |
# | Megatron-LM, `theoretical_memory_usage.py` | a line in the log before training starts |
# | llm-analysis, `analysis.py` | comparing many configurations without running one |
# | Korthikanti et al. 2022 | activations of GPTs in 2022, to recompute fewer of them (activations only) |
# | Ultra-Scale Playbook, text | teaching the formulas of a GPT |
# | Ultra-Scale Playbook, `memory.js` | trying the Playbook's settings in a browser |
# | EleutherAI cookbook, `calc_transformer_mem.py` | planning GPT-NeoX trainings on a cluster |
#
# Tools change. `course_utils/estimating/published.py` has all nine as we read them, each with what it leaves out.

# %% [markdown]
# ## On its home ground
# Four of the nine share a term: $s \cdot b \cdot h \cdot (34 + 5as/h)$ bytes per block ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198)). It is for [eager attention](../docs/glossary.md#eager-attention), and
# everything in 16 bits. For GPT-2 XL that is 114·h bytes per token. Weigh one block.
#
# **Your guess.** How many times h does a block keep per token with a flash kernel, everything in 16 bits?

# %%
predict("18.flash", unit="h")


# %%
def kept(eager, autocast):
    """Return the bytes that a block keeps for backward, its input included."""
    form = torch.float32 if autocast else torch.bfloat16
    block = Block(1600, 25, eager).to("cuda", form)
    x = torch.randn(32, 1024, 1600, device="cuda", dtype=form, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        block(x)  # autocast's copies of the weights exist from here on
        before = torch.cuda.memory_allocated()
        y = block(x)
        return torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes


tokens, h = 32 * 1024, 1600
with on_gpu(needs="25 GB"):
    blocks = {(eager, auto): kept(eager, auto) for eager in (True, False) for auto in (False, True)}
for (eager, auto), size in blocks.items():
    recipe = ("eager" if eager else "flash") + (", autocast" if auto else ", all in 16 bits")
    print(f"{recipe:22s} {size / tokens / h:7.3f} · h")
reveal("18.flash", blocks[False, False] / tokens / h, unit="h")

# %% [markdown]
# At home the formula is right to 0.03 %. A flash kernel writes no matrix of s × s numbers, so 80 of the 114 do not
# exist. Under autocast, neither number is right.
#
# **Your turn.** Correct the Playbook's block for autocast and flash. First drop a term. Then think: which two tensors of a
# block are twice as wide in fp32?


# %%
def corrected_block(L, h, a, s, b):
    return L * s * b * h * (34 + 5 * a * s / h)  # write this line again


mine = corrected_block(L=1, h=1600, a=25, s=1024, b=32)
off = mine / blocks[False, True] - 1
print("Right." if abs(off) < 0.005 else f"Not yet: {off:+.1%} off the block that was weighed.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return L * s * b * (38 * h + 4 * a + 16)`. The inputs of both norms are the fp32 residual stream: 2·h more for each.
# The last two terms are small: flash attention's logsumexp, one fp32 number per head, and the norms' means and
# deviations.
#
# </details>

# %% [markdown]
# ## The 60 GB question
# ZeRO has 12·h·b·s·L numbers instead, the "60 GB" that so many texts repeat ([Rajbhandari et al.
# 2020](https://arxiv.org/abs/1910.02054), footnote 3). The footnote does not say which twelve. **Your guess.** How many
# GB do the blocks keep in 16 bits *beyond* ZeRO's number, with flash attention?

# %%
predict("18.sixty", unit="GB")

# %%
b, s, a, L = 32, 1024, 25, 48
zeros = 2 * 12 * h * b * s * L
flash, eager = L * blocks[False, False], L * blocks[True, False]
print(f"ZeRO {zeros / 1e9:.1f} GB; weighed: flash {flash / 1e9:.1f}, eager {eager / 1e9:.1f} GB")
reveal("18.sixty", flash - zeros)
missing = {
    "GELU's input 8·h, dropout's masks 2·h": 10 * s * b * h * L,
    "norms' statistics, flash's logsumexp": (16 + 4 * a) * s * b * L,
}
missing["left over"] = flash - zeros - sum(missing.values())
missing["eager: 5·a·s more, and no logsumexp"] = (5 * s - 4) * a * s * b * L
missing["left over with eager"] = eager - flash - list(missing.values())[-1]
for name, size in missing.items():
    print(f"{name:38s} {size / 1e9:9.4f} GB")

# %% [markdown]
# **The gap** is closed. Neither kernel keeps 60 GB. One choice of tensors gives exactly ZeRO's 24 bytes: inputs of four
# matrices 14, queries, keys and values 6, inputs of two norms 4. What is left over is the random state of the kernel,
# and eager attention's causal mask.
#
# ### Other texts' figures
# A lecture, after the [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), gives more
# figures. For one sequence of 4,096 tokens, Llama-3 8B has 97 GB of [activations](../docs/glossary.md#activations), 17
# GB with [selective recomputation](../docs/glossary.md#selective-recomputation), 1 GB with full, and up to 1,500 GB for
# long sequences. A model of 10⁹ parameters takes 16 GB of states, and 25 GB with 8,192 tokens and selective
# recomputation. Here is where they come from:


# %%
def blocks_of_gpt(L, s, h, a):
    return L * s * (34 * h + 5 * a * s)


said = {  # Llama-3 8B has 32 layers, h = 4,096, 32 heads, kv = 1,024, and ffn = 14,336
    "97: GPT's formula, eager attention": blocks_of_gpt(L=32, s=4096, h=4096, a=32),
    "17: without s²": blocks_of_gpt(L=32, s=4096, h=4096, a=0),
    "1: one input per block": 32 * 2 * 4096 * 4096,
    "… left out, the block that is recomputed": blocks_of_gpt(L=1, s=4096, h=4096, a=32),
    "… left out, the loss: fp32 log-softmax": 4 * 4096 * 128_256,
    "up to 1,500: the first at s = 16,384": blocks_of_gpt(L=32, s=16_384, h=4096, a=32),
    "a real Llama's blocks with flash": 32 * 4096 * (12 * 4096 + 4 * 1024 + 8 * 14_336),
    "25: 16 bytes · 10⁹": 16 * 10**9,
    "… and 34·s·h·L of Llama 3.2 1B": blocks_of_gpt(L=16, s=8192, h=2048, a=0),
    "ZeRO's 60, by GPT's formula, s = 1,000": 32 * blocks_of_gpt(L=48, s=1000, h=1600, a=25),
}
for name, size in said.items():
    print(f"{name:42s} {size / 2**30:8,.1f} GiB = {size / 1e9:8,.1f} GB")

# %% [markdown]
# So the lecture's "GB" are GiB, by the formula of a *GPT* with eager attention. Nearly all of the 97 is 5·a·s²·b. A real
# Llama keeps a fifth, and nothing is recomputed. The sum for 8,192 tokens mixes two models: states of 10⁹ parameters,
# and activations of a larger one.
#
# The lecture also says "over 50 GB" for one sequence of 4,096 tokens of a small Llama, states included. In which
# recipe?

# %%
from course_utils import estimate

small = TrainingRun("llama3.2-1b", micro_batch=1, seq_len=4096)  # change this
for kernel in ("eager", "flash"):
    for precision in ("fp32", "amp-bf16", "bf16-master"):
        if kernel == "eager" or precision != "fp32":  # there is no flash kernel for fp32
            total = estimate(small.replace(precision=precision, attention=kernel)).total
            print(f"{precision:11s} {kernel} attention: {total / 1e9:.1f} GB, estimated")

# %% [markdown]
# With eager attention, in fp32 or under autocast, it does. With 16-bit weights or a fused kernel it does not. The
# kernel and the recipe belong to every figure.

# %% [markdown]
# ## Near, and why
# llm-analysis says 135.0 GB, the GPU 134.7. So it is right? A total's error is the sum of its parts' [signed
# errors](../docs/glossary.md#signed-error). **Your guess.** Drop the signs of its parts' errors, and add them up: how
# many GB?

# %%
predict("18.cancel", unit="GB")

# %% [markdown]
# Cut each answer, and the simulated peak, into the same parts. `measure` trains the same model on a simulated GPU and
# knows each tensor at the peak. Eight signed terms add up to the complete gap, to the byte:

# %%
from course_utils import measure
from course_utils.lessons.calculators.figures import gap_map

step = measure(gpt)
terms = calculators.gaps(gpt, step)["llm-analysis"]
reveal("18.cancel", sum(map(abs, terms.values())))
gap_map(gpt, step, "GPT-2 XL, answer minus peak in GB: llm-analysis is near as its errors cancel")

# %% [markdown]
# llm-analysis counts gradients in full, though none exist at the peak, and too much in the blocks. It counts too little
# for the loss, and no copies or temporaries. The two sides cancel. A total that fits proves little. Ask about another
# model, a Llama with two sequences of 8,192 tokens:

# %%
llama = TrainingRun("llama3.1-8b", micro_batch=2, seq_len=8192, precision="amp-bf16")  # change this
gap_map(llama, measure(llama), "Llama 3.1 8B: the scores explain the four highest answers")

# %% [markdown]
# Read the columns. *Gradients at the peak*: nearly every calculator adds up the largest value of each kind, but the
# peak is the largest sum at one moment. *Number of parameters*: $12h^2 + 13h$ per block describes a GPT. A Llama has
# three wide matrices and fewer keys. Its block keeps 22·h + 4·kv + 8·ffn bytes per token under autocast.

# %% [markdown]
# ## Three more terms
# The largest term that llm-analysis lacks is the loss. Weigh a head and its loss alone, per token and entry of the
# vocabulary:

# %%
V = 50257  # change this
with on_gpu(needs="30 GB"):
    head = nn.Linear(h, V, bias=False, device="cuda")
    x = torch.randn(tokens, h, device="cuda", requires_grad=True)
    targets = torch.randint(V, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(head(x), targets)
    forward = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    most = torch.cuda.max_memory_allocated() - before
known = 2 * tokens * h + 2 * h * V  # the head's input and weight, in 16 bits
for moment, size in {"kept": forward, "at the peak": most}.items():
    print(f"{moment:12s} {(size - known) / (tokens * V):5.2f} bytes per token and entry")

# %% [markdown]
# **Your turn.** llm-analysis has 2 bytes per token and entry. Correct its loss, and its states: which of weights (4 bytes
# per parameter), gradients (4) and Adam's moments (8) are there when the loss's backward begins?


# %%
def corrected_loss(h, V, s, b):
    return s * b * (2 * V + 4 * h)  # write this line again


def corrected_states(N):
    return 2 * N + 4 * N + 12 * N  # and this one


loss_off = corrected_loss(h, V, s, b) / (most - known + 6 * tokens * h) - 1
at_rest = notes["before the step"][1] + notes["the loss's backward"][2]
states_off = corrected_states(xl["N"]) / at_rest - 1
right = abs(loss_off) < 0.01 and abs(states_off) < 0.01
print("Right." if right else f"Not yet: the loss is {loss_off:+.1%} off, states {states_off:+.1%}.")

# %% [markdown]
# <details><summary>The lines</summary>
#
# `return s * b * (10 * V + 6 * h)`: a 16-bit log-softmax, an fp32 copy of the logits, and a gradient of 4 bytes. Outside
# of the blocks are also the last norm's input in fp32, and the head's in 16 bits.
#
# `return 12 * N`: no gradient exists yet.
#
# </details>
#
# A third term is in none of the nine: autocast's 16-bit [weight copies](../docs/glossary.md#autocast), 2 bytes per
# number in a matrix. In a GPT nearly all parameters are in matrices.

# %% [markdown]
# ## The ledger
# Now add your three corrected lines and the copies: a closed form for a GPT under autocast with a flash kernel.
#
# **Your guess.** A GPU counted steps of GPT-2 of four sizes. By how many percent is the closed form off, at worst?

# %%
predict("18.ledger", unit="%")


# %%
def ledger(N, L, h, a, V, s, b):
    states, copies = 12 * N, 2 * N
    return states + copies + L * s * b * (38 * h + 4 * a + 16) + s * b * (6 * h + 10 * V)


errors = [ledger(**one.letters) / one.counted - 1 for one in recorded.RECORDED.values()]
reveal("18.ledger", 100 * max(map(abs, errors)), unit="%")
print(f"{recorded.PROVENANCE}; errors in percent of what it counted")
recorded.judged(formulas | {"ledger": ledger})

# %% [markdown]
# **The gap.** The ledger adds up large tensors. *Simulated tensors* adds up all of them, and the
# [workspaces](../docs/glossary.md#workspace) of cuBLAS, 68 MB on this card: most of a small model's gap. The last column
# also follows the allocator, whose blocks can be larger than their tensors. It ends within 0.3 % of the card. The
# simulations were written down before the card was asked.
#
# Look at llm-analysis: within 1 % for the smallest step and the largest, by chance, and far too low between them. Now
# change 12·N to 16·N in the ledger, "to be safe". What happens to the errors, and where most?
#
# So three lines of paper, each corrected by a measurement, are right to a few percent, and for large steps to a few
# thousandths. For a Llama they are other lines (see above). [Where the numbers come
# from](../docs/evidence.md) has 159 steps that others published, and how far the nine are off them.

# %% [markdown]
# ## Another GB
# Not every difference is a term. [DeepSpeed's documentation](https://deepspeed.readthedocs.io/en/latest/memory.html)
# gives "15.93GB" for a T5 of 2,851 million parameters on 8 GPUs under ZeRO-2. **Your guess.** How many GB is it?

# %%
predict("18.gib", unit="GB")

# %%
T5, ranks = 2_851_000_000, 8
size = 4 * T5 + 16 * T5 // ranks
print(f"4N + 16N/8 = {size:,} bytes = {size / 1e9:.2f} GB = {size / 2**30:.2f} GiB")
reveal("18.gib", size)
for power, unit in enumerate(("K", "M", "G", "T"), start=1):
    less = 100 * (1 - 1000**power / 1024**power)
    print(f"{unit}iB read as {unit}B: {less:.1f} % too little")

# %% [markdown]
# **The difference** is one letter, the i, and it grows with the prefix.

# %% [markdown]
# ## What the sources got wrong
# **Your guess.** A lecture says "roughly 100 GB" for the states of an 8B model with mixed-precision Adam. How many GB
# are they?

# %%
predict("18.states", unit="GB")

# %%
from course_utils.lessons.calculators.errata import ErrataTable

reveal("18.states", 16 * llama.model.parameters)
ErrataTable()

# %% [markdown]
# Each claim is an [erratum](../docs/glossary.md#erratum), with evidence that is computed now. The table is also [a page
# of its own](../docs/errata.md). Read it for the *kinds* of mistake. There are few:
#
# | kind of mistake | how you notice |
# |---|---|
# | a formula outside its range | look up the model, kernel and recipe that it was derived for |
# | the sum of the largest instead of the largest sum | ask when each part exists |
# | GB for GiB | two figures that differ by 7 % |
# | a word for a number ("half", "square root") | recompute it |
# | a number copied from the neighboring row | open the source |
# | right in total, wrong in parts | ask for the parts |
#
# Most of these texts are excellent, and this course is built on them. A claim that can be checked is a gift.

# %% [markdown]
# ## In your own script
# Before you believe a calculator, ask it twice: with twice the batch, states must stay and activations double. Then let
# your own step judge. Which part of it peaks, and do gradients exist there?

# %%
import torch
from torch import nn


def most(moment):
    if device == "cuda":
        print(f"{moment:10s} at most {torch.cuda.max_memory_allocated() / 1e9:.3f} GB")
        torch.cuda.reset_peak_memory_stats()


device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)  # yours
optimizer = torch.optim.AdamW(model.parameters())
numbers = sum(weight.numel() for weight in model.parameters())
print(f"12·N: {12 * numbers / 1e9:.3f} GB; 16·N: {16 * numbers / 1e9:.3f} GB")

# %%
for _ in range(2):  # AdamW's states exist from the second step on
    with torch.autocast(device, torch.bfloat16):
        loss = model(torch.randn(64, 512, device=device)).square().mean()
    most("forward")
    loss.backward()
    most("backward")
    optimizer.step()
    optimizer.zero_grad()
    most("optimizer")

# %% [markdown]
# Without a card, `python3 -m course_utils watch train.py` counts the same on a simulated one.
#
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(18)

# %% [markdown]
# ## Take home
# **Remember** Cut every answer into parts and compare part by part: a formula is right for what it was made for, and a
# total can be right by chance.
#
# **Breaks when** you take a formula to another model, kernel or recipe than it was derived for, or add up parts that
# never exist at the same time.
#
# **Cheat-sheet line** autocast, flash, at the peak: 12·N + 2 per matrix number + L·s·b·(38·h GPT; 22·h + 4·kv + 8·ffn
# Llama) + s·b·V·(10 GPT; 12 Llama) · off by 7 %? GB and GiB.
#
# Now solve the [exercises of this lesson](../exercises/18_who_is_right.ipynb).
