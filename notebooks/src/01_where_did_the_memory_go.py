# ---
# jupyter:
#   course:
#     minutes: 70
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Where did the memory go?
#
# **70 minutes.** You should know what forward and backward passes are, and have trained a network once. You need no
# GPU.
#
# This lesson accounts for a training step of GPT-2 XL. You read a training script of 60 lines, change it, and judge a
# public disagreement: does this model train on a 32 GB card?

# %% [markdown]
# ## Why count bytes?
# Larger models that read more text are better, but with diminishing returns ([Kaplan et al.
# 2020](https://arxiv.org/abs/2001.08361)). Meta trained Llama 3.1 70B on about 15 trillion tokens, in 7.0 million hours
# of H100 GPUs ([model
# card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)). How long would one GPU
# take? How many tokens per second did each train on?

# %%
gpu_hours, tokens = 7.0e6, 15e12  # change this
print(f"on one GPU: {gpu_hours / 24 / 365.25:,.0f} years")
print(f"throughput: {tokens / gpu_hours / 3600:,.0f} tokens per second on each GPU")

# %% [markdown]
# So one lifetime is too short, and a training needs many GPUs. What fits on one decides how the model is split. Two
# more levers raise the *throughput*, and both are about memory. One is a better implementation:
# [FlashAttention](../docs/glossary.md#flashattention) computes the same attention without writing its largest matrices,
# and [PagedAttention](../docs/glossary.md#pagedattention) wastes little when a model is served. The other is a better
# design: [grouped queries](../docs/glossary.md#grouped-queries) need fewer keys and values, and a [mixture of
# experts](../docs/glossary.md#mixture-of-experts) computes with only a part of its parameters for each token. (The
# 405B model took 30.84 million hours. Change the number.)

# %% [markdown]
# ## The puzzle
# GPT-2 XL's weights are small:

# %%
from course_utils import gpu

h, L, a, V, positions = 1600, 48, 25, 50257, 1024  # GPT-2 XL
N = L * (12 * h**2 + 13 * h) + (V + positions + 2) * h  # lesson 04 counts them
card = gpu("RTX5090-32GB")  # change this
print(f"N = {N:,} parameters, in 16 bits {2 * N / 1e9:.1f} GB")
print(f"{card.name}: {card.memory / 1e9:.1f} GB, a program gets {card.room / 1e9:.1f} GB")

# %% [markdown]
# A card "of 32 GB" has about 32 *GiB* ([lesson 00](00_start_here.ipynb)). The driver keeps a part, and the weights fill
# a tenth. Does a program get as much of a `"V100-32GB"`? Predict, change the card, run, change it back.
#
# Two public texts train this model with Adam on one 32 GB GPU: 32 sequences of about 1,000 tokens at a time, 16-bit
# arithmetic, [activation checkpointing](../docs/glossary.md#activation-recomputation). A newsletter's sum is 32–35 GB:
# you *can barely train it*. Slides list parts that add up to 41 GB: it *cannot be trained*. Their terms come from the
# [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)).
#
# **Your guess first.** Weights and gradients are in 16 bits, a copy of the weights and Adam's two states in fp32. All
# 32 sequences of 1,024 tokens are on the card at once. The texts name no kernel: take flash attention. How much is
# allocated at the step's peak?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("01.puzzle", unit="GB")

# %% [markdown]
# ## What lives when?
# In this training loop, `memory_allocated()` is what tensors take now, and `max_memory_allocated()` the most since the
# reset. Inside `with on_gpu():`, `"cuda"` is your GPU or a *simulated* one: the same operators, but no memory behind
# the tensors. Predict: what will differ between steps 1 and 2?

# %%
import torch
from torch import nn

from course_utils import on_gpu

with on_gpu():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4096, 1024, device="cuda")  # change this
    for number in (1, 2, 3):
        torch.cuda.reset_peak_memory_stats()
        loss = (model(x) - x).pow(2).mean()  # + activations, kept for backward
        kept = torch.cuda.memory_allocated()
        loss.backward()  # + gradients, − activations, one layer after the other
        optimizer.step()  # + Adam's states, in the first step only
        optimizer.zero_grad()  # − gradients
        left, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        print(f"step {number}: {kept / 1e6:.1f} MB after forward, peak {peak / 1e6:.1f} MB")
    print(f"left after a step: {left / 1e6:.1f} MB")

# %% [markdown]
# Change 4096 to 8192 rows: what grows, and by how many MB? Predict, run.
#
# What is left after a step? **Estimate**: the weights, Adam's two states, and the batch.

# %%
weights = sum(weight.nbytes for weight in model.parameters())
moments = 2 * weights  # fp32, as the weights
gap = weights + moments + x.nbytes - left
print(
    f"weights {weights / 1e6:.1f} MB, states {moments / 1e6:.1f} MB, batch {x.nbytes / 1e6:.1f} MB"
)
print(f"the gap: {gap:+,} bytes, 512 for the loss and 2 times {(-gap - 512) // 2:,}")

# %% [markdown]
# **The gap.** The loss is one number, in the smallest block. The rest is two
# [workspaces](../docs/glossary.md#workspace) of cuBLAS, the library that multiplies matrices: one from the first
# forward, one from the first backward, both counted as allocated. On an H100 each is 32 MiB.
#
# So the memory of steps 1 and 2 differs by two things: Adam's states, which appear at the end of step 1, and one small
# workspace. Some texts see "preparatory work" in step 1. No counted byte belongs to it. Time is another matter: in step
# 1 a real card also loads kernels and gets its first memory from the driver.
#
# **Your turn.** A peak counts from the last reset. Write the two lines of `peak_of`. It is right if the second peak is
# not the first one's.


# %%
def peak_of(work):
    """Return the most bytes that were allocated at once while work() ran."""
    # write two lines here
    return torch.cuda.max_memory_allocated()


def take(megabytes):
    return lambda: torch.empty(megabytes * 10**6, dtype=torch.uint8, device="cuda")


with on_gpu():
    large, small = peak_of(take(2000)), peak_of(take(500))
done = round((large - small) / 1e8) == 15
print(
    "Right."
    if done
    else f"Not yet: {large / 1e6:,.0f} and {small / 1e6:,.0f} MB should differ by 1,500."
)

# %% [markdown]
# <details><summary>The two lines</summary>
#
# `torch.cuda.reset_peak_memory_stats()`, then `work()`. Without the reset the second peak would be the first one again.
# Without the call nothing is allocated.
#
# </details>
#
# ### Which tensors are they?
# Counters do not say. A *memory snapshot* does. Once you switch the history on, PyTorch notes where each block is
# allocated. This works in any script on a GPU:


# %%
def allocated_blocks():
    segments = torch.cuda.memory._snapshot()["segments"]
    blocks = [block for segment in segments for block in segment["blocks"]]
    return {block["address"]: block for block in blocks if block["state"] == "active_allocated"}


with on_gpu():
    torch.cuda.memory._record_memory_history(stacks="python")
    before = allocated_blocks()
    loss = (model(x) - x).pow(2).mean()  # change this: model(x).relu().mean()
    for address, block in allocated_blocks().items():
        if address not in before:
            print(f"{block['size'] / 1e6:6.2f} MB from {block['frames'][0]['name']}")
    torch.cuda.memory._record_memory_history(enabled=None)

# %% [markdown]
# The two large ones are the inputs of GELU and of the second layer. `pow` needs the difference in backward. The last is
# the loss. `torch.cuda.memory._dump_snapshot("snapshot.pickle")` writes all this for PyTorch's own
# [viewer](https://docs.pytorch.org/memory_viz) ([lesson 12](12_allocator_and_fragmentation.ipynb)).

# %% [markdown]
# ## Four steps of a small Llama
# A *run* is a training written down: model, batch, number formats, optimizer, kernels, but no tensor. `measure(run)`
# takes the steps of the loop above and watches every allocation. Here: Llama 3.2 1B, four sequences of 1,024 tokens,
# [autocast](../docs/glossary.md#autocast) to [bf16](../docs/glossary.md#fp16-and-bf16), AdamW.
#
# **Your guess.** Its 1.24 billion parameters are in fp32. How much is left after `zero_grad`?

# %%
predict("01.left", unit="GB")

# %%
from course_utils import TrainingRun
from course_utils import measure
from course_utils.figures import timeline

four_steps = measure(TrainingRun("llama3.2-1b", micro_batch=4, seq_len=1024), steps=4)
reveal("01.left", four_steps.moments["end of step 4"].total)
for number, peak in four_steps.timeline.step_peaks().items():
    print(f"step {number}: peak {peak / 1e9:.2f} GB")
timeline(four_steps, "Optimizer states arrive at the end of step 1 and never leave")

# %% [markdown]
# In **forward** the [activations](../docs/glossary.md#activations) pile up. In **backward** they are freed, from the
# last layer to the first, and [gradients](../docs/glossary.md#gradients) take their place. The *weight copies* are
# autocast's 16-bit copy of each matrix. What is left has 12 bytes per parameter: weights and two states of 4.
#
# Step 1 peaks in its optimizer phase, with five numbers per parameter: weight, gradient, two states, and for a moment
# the square root of Adam's variance, which a [*foreach* optimizer](../docs/glossary.md#foreach-for-loop-fused) computes
# for all parameters at once. Step 2 peaks higher, in backward: activations now meet the states.
#
# Four lifetimes explain the figure: *[temporary](../docs/glossary.md#temporaries)* (a part of one phase), *from forward
# to backward* (activations), *from backward to zero_grad* (gradients), *the whole training* (parameters and [optimizer
# states](../docs/glossary.md#optimizer-states)).

# %% [markdown]
# ## Why are activations kept at all?
# Take one linear layer, $y = x W^T$. Backward has dL/dy and needs dL/dW:
#
# $$\frac{dL}{dW} = \left(\frac{dL}{dy}\right)^T x$$
#
# So the layer's *input* x must still be there in backward. Check this with values, on the CPU.

# %%
torch.manual_seed(0)
layer, tokens = nn.Linear(64, 16, bias=False), torch.randn(32, 64)
y = layer(tokens)
dy = torch.randn_like(y)
y.backward(dy)
by_hand = dy.T @ tokens
off = (by_hand - layer.weight.grad).abs().max()
print(f"largest difference from autograd's dL/dW: {off:.4f}, expected 0")

# %% [markdown]
# Take three operations of GPT-2 XL's width, on one sequence of 1,024 tokens in bf16: a linear layer, a GELU and the
# addition of a [residual connection](../docs/glossary.md#residual-connection). Their input has s·h = 1,024 · 1,600
# numbers of 2 bytes.
#
# **Your guess.** How many MB do they keep together?

# %%
predict("01.kept", unit="MB")

# %% [markdown]
# Only `y` has a name, so autograd holds everything else that stays allocated. (Adding `zero` makes the input need a
# gradient. The bytes are per sequence.)

# %%
total, b, s = 0, 32, 1024
with on_gpu():
    zero = torch.zeros((), device="cuda", requires_grad=True)
    linear = nn.Linear(h, h, bias=False, device="cuda", dtype=torch.bfloat16)
    gelu = nn.GELU()  # change this
    operations = {"linear": linear, "GELU": gelu, "residual addition": lambda x: x + x}
    for name, operation in operations.items():
        before = torch.cuda.memory_allocated()
        y = operation(torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16) + zero)
        kept = (torch.cuda.memory_allocated() - before - y.nbytes) // b
        total += kept
        del y
        print(f"{name} keeps {kept / 1e6:.2f} MB")
    del zero, linear, operations
reveal("01.kept", total, unit="MB")

# %% [markdown]
# The linear layer keeps its input. So does GELU: its slope depends on it. The addition, with slope 1 everywhere, keeps
# nothing. **Activations are not "the outputs of the layers": they are what some backward will need.** ReLU can read its
# slope off its *output*. Change `nn.GELU()` to `nn.ReLU()`: predict, run.

# %% [markdown]
# ## How much do the states take?
# The ZeRO paper counts mixed-precision Adam like this (section 3.1): weights and gradients in 16 bits, and in fp32 a
# [*master copy*](../docs/glossary.md#master-weights) of the weights, [momentum](../docs/glossary.md#momentum) and
# variance. The paper calls all these [*model states*](../docs/glossary.md#model-states-and-residual-memory). The rest
# is *residual memory*: activations, temporary buffers, and fragments that no tensor fits.
#
# **Your guess.** How many GB is that for GPT-2 XL's 1.56 billion parameters?

# %%
predict("01.states", unit="GB")

# %%
n = 2**24
with on_gpu():
    before = torch.cuda.memory_allocated()
    weights = torch.randn(n, device="cuda", dtype=torch.bfloat16)  # change this
    gradients = torch.zeros_like(weights)
    master = weights.float()
    momentum, variance = torch.zeros_like(master), torch.zeros_like(master)
    each = (torch.cuda.memory_allocated() - before) / n
    del weights, gradients, master, momentum, variance
print(f"{each:.2f} bytes per parameter, expected 2 + 2 + 4 + 4 + 4")
reveal("01.states", each * N)

# %% [markdown]
# The rule "16 GB per billion parameters" is these five tensors: no activations, no loss, no temporaries. Change
# `torch.bfloat16` to `torch.float32`: predict, run. (`float()` of fp32 weights makes no copy.)

# %% [markdown]
# ## A training script
# Here is a whole script, [train_01.py](train/train_01.py), in three cells. First one [transformer
# block](../docs/glossary.md#transformer-block): attention and an MLP, each behind a norm, each added to its input.

# %%
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %% [markdown]
# Then GPT-2: an embedding, L blocks, a norm. The loss compares [logits](../docs/glossary.md#logits), one number per
# token and word of the vocabulary, with the next tokens.


# %%
POSITIONS = 1024


class GPT(nn.Module):
    def __init__(self, h, L, a):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(POSITIONS, h)
        self.blocks, self.norm = nn.ModuleList(Block(h, a) for _ in range(L)), nn.LayerNorm(h)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, x, targets):  # the head shares the embedding's weights
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %% [markdown]
# And the loop. The sizes are those of the smallest GPT-2, so that it runs on a card of 16 GB.

# %%
import time


def train(h=768, L=12, a=12, b=8, s=1024, steps=20):
    model = GPT(h, L, a).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.randint(V, (b, s + 1), device="cuda")  # your data goes here
    for step in range(1, steps + 1):
        began = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        loss = model.loss(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the GPU
        tokens = b * s / (time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"step {step}: loss {value:.3f}, {tokens:,.0f} tokens/s, peak {peak:.2f} GB")


# %% [markdown]
# With a GPU, `python my_train.py` trains in a terminal. Without one, `python3 -m course_utils watch my_train.py`
# executes two of its steps on the simulated GPU. This cell does that for the script as it is shipped, and for yours:

# %%
from course_utils.lessons.shared.growing_script import script

script(1)

# %% [markdown]
# **The gap** is cuBLAS's workspaces, 17 MB, and what blocks have beyond their tensors. The formula counts tensors.
#
# The script grows with the course: lessons change a few of its lines, and the table gets a row. Change `b=8` to `b=4` in
# `my_train.py`, next to this notebook, save, and run the cell again. Does the peak halve?

# %% [markdown]
# ## The puzzle's step
# Now the same `Block` and `GPT` at GPT-2 XL's size, with the puzzle's recipe. Weights and gradients are in bf16. The
# optimizer has fp32 [master weights](../docs/glossary.md#master-weights), so the step copies gradients there, and
# weights back. `chunks` and `micro_batches` stay 1 for now.

# %%
from torch.utils.checkpoint import checkpoint


def loss_in(chunks, model, x, targets):
    if chunks == 1:
        return model.loss(x, targets)
    parts = zip(x.chunk(chunks, 1), targets.chunk(chunks, 1))  # the logits of one part at a time
    return sum(checkpoint(model.loss, *part, use_reentrant=False) for part in parts) / chunks


# %%
def training_step(model, groups, text, chunks, micro_batches):
    for part in text.chunk(micro_batches):
        loss = loss_in(chunks, model, model(part), part) / micro_batches
        loss.backward()  # gradients of micro-batches add up
    for weights, masters, adam in groups:
        for weight, master in zip(weights, masters):
            master.grad, weight.grad = weight.grad.float(), None
        adam.step()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master)
            master.grad = None


# %% [markdown]
# `weigh` builds all this and returns the most bytes that were allocated in step 2. Each block's `forward` becomes a
# checkpoint: it keeps the block's input alone, and backward computes the rest again.

# %%
import gc
from functools import partial


def weigh(one_at_a_time=False, chunks=1, micro_batches=1):
    gc.collect()  # frees the last model, whose blocks refer to themselves
    with on_gpu(needs="50 GB"):  # a smaller card than that is simulated
        model = GPT(h, L, a).to("cuda", torch.bfloat16)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        groups = []
        every = list(model.parameters())
        for weights in [[weight] for weight in every] if one_at_a_time else [every]:
            masters = [nn.Parameter(weight.detach().float()) for weight in weights]
            groups.append((weights, masters, torch.optim.AdamW(masters)))
        text = torch.randint(V, (32, 1024), device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            training_step(model, groups, text, chunks, micro_batches)
        return torch.cuda.max_memory_allocated()


# %%
model = optimizer = x = loss = None  # those of earlier cells would count, too
written_out = weigh()
reveal("01.puzzle", written_out)
print(f"a program gets {card.room / 1e9:.1f} GB")

# %% [markdown]
# A `TrainingRun` says the same in one line, and a real, larger card has taken this very step:

# %%
puzzle = TrainingRun(
    "gpt2-xl", micro_batch=32, precision="bf16-master", optimizer="adamw-foreach", recompute="full"
)
step = measure(puzzle)
real = measure(puzzle, source="recorded", device="NVIDIA H200")
print(
    f"{written_out / 1e9:.2f} GB by the loop above, {step.peak / 1e9:.2f} GB of tensors by the run"
)
print(f"{real.counters['allocated'] / 1e9:.2f} GB counted, {real.provenance}")

# %% [markdown]
# **The gap.** Both counters include what blocks have beyond their tensors, about 0.3 GB here. The card's is 0.1 GB
# higher. Masks are 0.05 GB of that: the run's model has dropout, as GPT-2 was published.
# An H200's two workspaces of cuBLAS are 0.05 GB larger. The rest is blocks, which lie differently on each card.
#
# In a run, `precision="bf16-master"` is the recipe of the loop. `"adamw-foreach"` copies all gradients at once and
# updates all parameters at once. With this recipe, plain `"adamw"` takes one parameter after the other.

# %% [markdown]
# ## The stack of 41 GB
# The slides list eight terms: 3 + 3 + 6 + 6 + 6 for weights, gradients and states, 8 for activations, 6 for a *flat
# fp32 buffer* of all gradients, 3 for fragmentation. Do they ever exist at the same time?

# %% tags=["hide-input"]
from course_utils.figures import stack

slides = {"parameters": 3, "gradients": 3, "optimizer_states": 18}
slides |= {"activations": 8, "temporaries": 6, "cached": 3}
rows = {"the slides' parts": {kind: size * 10**9 for kind, size in slides.items()}}
for name in ("forward", "loss", "backward", "optimizer"):
    rows[f"peak of {name}"] = step.phase_peaks[name]
title = (
    f"Activations never meet the fp32 buffer: 41 GB on paper, {step.peak / 1e9:.0f} GB in the step"
)
line = f"{card.name}: a program gets {card.room / 1e9:.1f} GB"
stack(rows, title, capacity=card.room, capacity_label=line, provenance=str(step.provenance))

# %% [markdown]
# Each term is real. But *a [peak](../docs/glossary.md#peak) is the largest sum of what is alive at once, not the sum of
# the largest*. Backward begins with all activations and no gradient. The optimizer runs with all gradients and no
# activation. What, then, fills the fullest moment?

# %%
step.explain(4)  # change this

# %% [markdown]
# The checkpoints of 48 blocks, and then the loss: three tensors of s·b·V numbers, one per token and word of the
# vocabulary. They are [log-softmax](../docs/glossary.md#log-softmax), and two gradients on the way to the logits. No
# text counts them. The slides' 8 GB are ZeRO's: the square root of all activations, a rule of thumb (lesson 06). Change
# 4 to 6: what comes next, states or activations?

# %% [markdown]
# ## Who is right about 32 GB?
# The puzzle's card is too small. In the figure only *forward* stays below what a program gets. *Loss* and *backward*
# hold the loss's tensors. The *optimizer* holds two fp32 numbers per parameter for a moment: the copies of all
# gradients, and foreach's square roots. Neither text says how it computes the loss or steps its optimizer.
#
# So change the loop's lines. Update one parameter at a time: its copy is freed before the next one is made. Then
# compute the loss in 8 [chunks](../docs/glossary.md#chunked-loss), so that no tensor of s·b·V numbers ever exists.

# %%
recipes = {
    "one gradient at a time": {"one_at_a_time": True},
    "… and the loss in 8 chunks": {"one_at_a_time": True, "chunks": 8},  # change this
}
for name, choices in recipes.items():
    size = weigh(**choices)
    print(f"{name}: {size / 1e9:.1f} GB, {(card.room - size) / 1e9:+.1f} GB free")

# %% [markdown]
# With both, all 32 sequences fit. One alone does not help: the peak moves to the other phase.
#
# Change a line and weigh again: `"micro_batches": 8` in place of the chunks (8 times 4 sequences, gradients added up,
# then one step, lesson 08). Or `torch.optim.AdamW(masters, fused=True)` in `weigh`: no square roots, but a loop that
# copies all gradients first still does (lesson 02). Each takes some seconds, which `estimate(run)` does not: it is a
# formula, arithmetic for a pencil ([formula.py](../course_utils/estimating/formula.py)).

# %%
from course_utils import estimate

one, pieces = {"optimizer": "adamw"}, {"micro_batch": 4, "accumulation_steps": 8}  # change this
choices = {
    "the puzzle": {},
    "8 micro-batches of 4": pieces,
    "… and one gradient at a time": one | pieces,
    "… with eager attention": one | pieces | {"attention": "eager"},
    "one gradient at a time, loss in 8 chunks": one | {"loss_chunks": 8},
    "… with eager attention, too": one | {"loss_chunks": 8, "attention": "eager"},
    "one gradient at a time, under autocast": one | {"precision": "amp-bf16"},
}
estimates = {name: estimate(puzzle.replace(**changes)) for name, changes in choices.items()}
title = "The recipe decides: all 32 sequences at once fit, with loss and optimizer in pieces"
print(f"the puzzle: estimated − simulated {estimates['the puzzle'].total - step.peak:+,} bytes")
stack(estimates, title, capacity=card.room, capacity_label=line, provenance="estimated")

# %% [markdown]
# **The gap** is two blocks of 512 bytes: the closed form leaves out tensors of a few numbers, such as the loss.
# ([evidence](../docs/evidence.md) compares the two for 484 runs.) Would 2 micro-batches of 16 be enough? Predict, change
# both numbers, run.
#
# [Eager attention](../docs/glossary.md#eager-attention) writes matrices of s·s numbers for each head, and backward
# needs them for the block that it recomputes. And autocast? Its weights and states are smaller, as it has no 16-bit
# weights next to the fp32 ones. But its checkpoints and its loss are wider.
#
# **The recipe decides.** With flash attention, the slides are right if the loss takes all 32 sequences at once. With
# eager attention, chunks of the loss are not enough, and ZeRO's authors had no other kind: FlashAttention is from
# [2022](https://arxiv.org/abs/2205.14135). In micro-batches, one gradient at a time, the step fits with either kernel.
# The newsletter's 32–35 GB is what 8 micro-batches need if all gradients are still upcast together, and that is more
# than a program gets. (Lesson 18 examines their 60 GB of activations, lesson 06 their "about 8 GB" with checkpointing.)
#
# A card has more than tensors ([lesson 18](18_who_is_right.ipynb)): CUDA's [context](../docs/glossary.md#context-cuda)
# (hundreds of MB, never counted as allocated), and what PyTorch has
# [reserved](../docs/glossary.md#allocated-and-reserved) beyond them (lesson 12). So "fits" needs more than a bar that
# ends just below the line.
#
# The slides name TensorFlow, too. Weights, gradients and states take the same bytes there and in JAX. Activations
# depend on what the framework's compiler fuses or recomputes, and the rest on its allocator: JAX's takes [75 % of a
# GPU](https://docs.jax.dev/en/latest/gpu_memory_allocation.html) at once.

# %% [markdown]
# ## One layer more
# The newsletter says that one more layer can cost several GB. **Your guess.** GPT-2 XL with 49 layers instead of 48, 32
# sequences, nothing recomputed, flash attention: how much higher is the peak?

# %%
predict("01.layer", unit="GB")

# %%
from dataclasses import replace

keep_all = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master")
deeper = replace(keep_all.model, layers=L + 1)  # change this
reveal("01.layer", estimate(keep_all.replace(model=deeper)).total - estimate(keep_all).total)
for changes in ({"attention": "eager"}, {"recompute": "full"}):
    run = keep_all.replace(**changes)
    more = estimate(run.replace(model=deeper)).total - estimate(run).total
    print(f"{changes}: {more / 1e9:.2f} GB more, estimated")

# %% [markdown]
# With everything kept, it is gigabytes. With recomputation a layer adds its weights, its states and one checkpoint.
# Which kind of memory grows most? Does the 13th layer add less than the 49th? Use the controls.

# %%
from course_utils.lessons.one_step.widget import layer_slider

layer_slider(keep_all)

# %% [markdown]
# ## Five questions
# A question counts for your score if your first answer is right.

# %%
from course_utils.lessons import quiz

quiz(1)

# %% [markdown]
# ## In your own script
# Call your training step through this function. It prints how much your tensors took at once, and how much PyTorch
# held for them.

# %%
import torch


def weighed(step, *arguments):
    """Return step(*arguments), and print the most that it allocated and reserved."""
    torch.cuda.reset_peak_memory_stats()
    result = step(*arguments)
    allocated = torch.cuda.max_memory_allocated() / 1e9
    reserved = torch.cuda.max_memory_reserved() / 1e9
    print(f"at most {allocated:.2f} GB allocated, {reserved:.2f} GB reserved")
    return result


# %% [markdown]
# Try it here. Tensors left from earlier cells count, too:

# %%
from course_utils import on_gpu

with on_gpu():
    torch.cuda.empty_cache()
    layer = torch.nn.Linear(4096, 4096, device="cuda")
    for rows in (4096, 8192):
        weighed(lambda x: layer(x).sum().backward(), torch.ones(rows, 4096, device="cuda"))

# %% [markdown]
# Without a GPU, `python3 -m course_utils watch train.py` gives this lesson's account of an unchanged script, and says
# which cards it fits ([lesson 19](19_will_it_fit.ipynb)).

# %% [markdown]
# ## Take home
# **Remember** A peak is the largest sum of what is alive at once: states stay, activations and gradients take turns.
#
# **Breaks when** you size a run by its first step: Adam's states appear at its end, and step 2 runs out of memory.
#
# **Cheat-sheet line** states 16·N bytes (Adam: fp32, autocast, or 16-bit with fp32 masters) · loss: s·b·V logits at 6
# bytes each in 16 bits, 10 under autocast, 12 in fp32.
#
# This lesson corrects claims 1, 2, 13 and 26 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/01_where_did_the_memory_go.ipynb).
