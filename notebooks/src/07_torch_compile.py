# ---
# jupyter:
#   course:
#     minutes: 65
#     cpu_seconds: 40
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · torch.compile
#
# **65 minutes.** You should know [lesson 05](05_activations.ipynb), and `checkpoint` from [lesson
# 06](06_recomputation.ipynb). You need no GPU.
#
# Many people compile their model to make it faster. That also changes which tensors a step keeps. Some texts say that a
# compiled model uses more memory, others that it uses less. This lesson opens the compiler, and shows when each is
# true. Symbols: b sequences of s tokens, hidden size h, vocabulary V.

# %% [markdown]
# ## Where did 3.2 GB go?
# An H200 trained a GPT of 205 million parameters: 8 blocks, h = 1,024, V = 50,304, 8 sequences of 1,024 tokens. It ran
# under autocast, with flash attention and a fused AdamW. Then one line was added: `model = torch.compile(model)`.

# %%
from course_utils.interactive.guesses import predict, reveal
from course_utils.lessons.shared.recorded_front import FRONT, PROVENANCE
from course_utils.lessons.torch_compile.recorded import WAYS

peak = {way: each["peak"] for way, each in WAYS.items()}
fell = peak["eager"] - peak["the model"]
print(f"eager {peak['eager'] / 1e9:.2f} GB, compiled {peak['the model'] / 1e9:.2f} GB", PROVENANCE)

# %% [markdown]
# Next, only the blocks were compiled: `for block in model.blocks: block.compile()`. The head and the loss were not.
# **Your guess.** How many of these 3.2 GB do the eight blocks save?

# %%
predict("07.blocks", unit="GB")

# %%
from course_utils.figures import bars

title = "The blocks save next to nothing: it is the loss"
reveal("07.blocks", peak["eager"] - peak["each block"])
three = ("eager", "each block", "the model")
bars({way: peak[way] for way in three}, title, provenance=f"allocated at the peak · {PROVENANCE}")

# %% [markdown]
# So the compiler forgets something in the loss that it does not find in a block. What may a compiler forget?

# %% [markdown]
# ## What must be kept
# Autograd decides at each operation what to keep, and knows nothing of the next one. `torch.compile` first traces
# forward *and* backward into one graph. Then it decides what forward hands over. Everything else backward computes
# again, if that is cheap.
#
# Here is GELU as many models write it, in single operations, in an MLP.

# %%
import torch
from torch import nn
from torch.nn import functional as F


def gelu(x):  # the approximation by tanh
    return 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * x**3)))


def mlp(x, up, down):
    return gelu(x @ up) @ down


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


h, tokens = 256, 512
x, up, down = random(tokens, h), random(h, 4 * h), random(4 * h, h)

# %% [markdown]
# Hooks tell what is kept, for a compiled function, too ([lesson 05](05_activations.ipynb)). The backend below makes
# the compiler's decisions, but no code for a GPU. So it runs anywhere, and fast.


# %%
def kept_by(function, x, *others):
    """Bytes that autograd keeps for backward, weights left out, per number in x."""
    kept = {}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x, *others)
    own = [weight.untyped_storage() for weight in others]
    return sum(size for storage, size in kept.items() if storage not in own) / x.numel()


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager_decomp_partition")


print(f"autograd keeps {kept_by(mlp, x, up, down):.0f} bytes per number in x")

# %% [markdown]
# The MLP is 4h wide. So each of those wide tensors counts 8. **Your guess.** How many bytes does the compiled MLP keep
# per number in x?

# %%
predict("07.mlp", unit="bytes")

# %%
reveal("07.mlp", kept_by(compiled(mlp), x, up, down), unit="bytes")

# %% [markdown]
# What is left are the inputs of the two matrix products, x with 2 bytes and GELU's output with 8, and the output of the
# first product, 8. From this one, backward computes all of GELU again, in the same kernel that computes its gradient.
#
# The rule: a compiled function keeps what matrix products read and make, and what cannot be computed again: statistics
# of norms, and masks of dropout. `F.gelu`, `nn.LayerNorm` and flash attention already keep only that. This is why a
# block made of them gains next to nothing.

# %% [markdown]
# **Your turn.** Three more functions are compiled next to `gelu`.


# %%
def swiglu(gate, up):
    return F.silu(gate) * up


def rms_norm(x):  # as many models write it, in fp32
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def dropped(x):
    return F.dropout(gelu(x), 0.1)


# %% [markdown]
# How many bytes does each keep per number in x? (A statistic of one number per token counts 0 here, a mask is stored as
# bool.)

# %%
y = torch.randn_like(x, requires_grad=True)
found = {
    "gelu": kept_by(compiled(gelu), x),
    "swiglu": kept_by(compiled(lambda gate: swiglu(gate, y)), x),
    "rms_norm": kept_by(compiled(rms_norm), x),
    "dropped": kept_by(compiled(dropped), x),
}
mine = {"gelu": 2, "swiglu": 0, "rms_norm": 0, "dropped": 0}  # write three of these
wrong = [name for name, each in mine.items() if each != round(found[name])]
print(f"Not yet: {', '.join(wrong)}." if wrong else "Right.")

# %% [markdown]
# <details><summary>Why?</summary>
#
# SwiGLU is a function of two tensors, gate and up, and both come out of matrix products: 2 + 2. (Here one hook sees
# both.) The norm keeps its input in 16 bits, 2, and not the fp32 copy. Dropout adds its mask to GELU's input: 2 + 1.
#
# </details>

# %% [markdown]
# ## The cheapest cut
# How does the compiler decide? Take a complete SwiGLU, the MLP of a Llama. Autograd keeps x and four wide tensors of 5.8
# MB. **Your guess.** How many MB does the compiler keep?

# %%
h, ffn, tokens = 1024, 2816, 1024  # change this
print(f"one wide tensor {2 * tokens * ffn / 1e6:.1f} MB, x {2 * tokens * h / 1e6:.1f} MB")
predict("07.swiglu", unit="MB")

# %%
from course_utils.lessons.torch_compile.figures import draw_cuts


def swiglu_mlp(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down  # change this


inputs = random(tokens, h), random(h, ffn), random(h, ffn), random(ffn, h)
reveal("07.swiglu", kept_by(compiled(swiglu_mlp), *inputs) * tokens * h, unit="MB")
draw_cuts(swiglu_mlp, *inputs)

# %% [markdown]
# Forward runs down on the left, backward up on the right. Read a green arrow as a pipe that is as wide as its tensor.
# The compiler's [partitioner](../docs/glossary.md#min-cut-partitioner) looks for the cheapest cut between the two sides.
# With what is kept, backward must be able to compute the rest ([He
# 2022](https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467)).
# But no matrix product and no attention kernel may run twice.
#
# So SiLU runs again. But why is the product kept, 5.8 MB? Both of its factors are there. The last layer's gradient is a
# matrix product, which reads it *from memory*: backward would have to write all of it again, not only compute it. By
# default, the compiler does not do that. Two settings change its mind. One is a single rule, the other a budget: the
# part that it may keep of what it would keep by itself.

# %%
import torch._functorch.config as settings


def with_settings(**changes):
    with settings.patch(**changes):
        return kept_by(compiled(swiglu_mlp), *inputs) * tokens * h / 1e6


print(f"as it is: {with_settings():.1f} MB")
again = with_settings(ban_recompute_materialized_backward=False)
print(f"backward may write tensors again: {again:.1f} MB")
for budget in (0.8, 0.5, 0.3, 0.0):  # change this
    print(f"budget {budget}: {with_settings(activation_memory_budget=budget):.1f} MB")

# %% [markdown]
# Below a budget of 1, even matrix products run again. What this costs in time follows below.

# %% [markdown]
# ## The code that it writes
# Now let the compiler make code for a GPU. Inside `on_gpu()`, "cuda" is your GPU or a [simulated
# one](../docs/glossary.md#simulated-gpu): the genuine compiler writes the genuine code, whose lines allocate and free.
# Only the kernels do nothing there.
#
# **Your guess.** Eager, each of the ten operations of the MLP with GELU makes a tensor in forward. How many does its
# compiled forward allocate?

# %%
predict("07.buffers", unit="tensors")

# %%
from torch._inductor.utils import run_and_get_code

from course_utils import on_gpu

with on_gpu():
    bf16 = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    x, up = torch.randn(512, 256, **bf16), torch.randn(256, 1024, **bf16)
    down = torch.randn(1024, 256, **bf16)
    fused = torch.compile(mlp)
    _, codes = run_and_get_code(lambda: fused(x, up, down).sum().backward())

# %%
TOLD = ("empty_strided", "extern_kernels", ".run(", "del ", "reuse")


def plan(code):
    """The lines of generated code that allocate, compute or free."""
    lines = code.partition("def call(")[2].partition("def benchmark")[0].splitlines()
    return [line.strip() for line in lines if any(each in line for each in TOLD)]


print("\n".join(plan(codes[-2])))  # change this: -1 is backward
reveal("07.buffers", sum("empty_strided" in line for line in plan(codes[-2])), unit="tensors")

# %% [markdown]
# Three: both products write a buffer (`extern_kernels.mm`), and *one* kernel computes all of GELU from the first into
# another. Its name lists what is [fused](../docs/glossary.md#kernel-fusion) in it. The tensors between its operations never exist. In eager forward, each of
# them was written to memory and read again: this is why compiled code is faster, too.
#
# Print backward. A line with `# reuse` gives a buffer a second life: the gradient of GELU's input is written over the
# gradient of its output. In your own script, `TORCH_LOGS="output_code" python train.py` prints all of this.

# %% [markdown]
# ## Back to the loss
# Under autocast the loss takes 10 bytes per logit at its peak ([lesson 05](05_activations.ipynb)): log-softmax in 16
# bits, its fp32 copy, and that copy's gradient. Here is a small GPT with a large vocabulary, so that the loss decides.


# %%
V, h, a = 50_304, 256, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * a, -1).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %%
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(V, h), nn.Linear(h, V, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))  # change this

    def loss(self, x, ids):
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, ids)


# %% [markdown]
# Four ways to prepare the model:


# %%
def eager(model):
    return model


def each_block(model):
    for block in model.blocks:
        block.compile()
    return model


def the_loss(model):
    model.loss = torch.compile(model.loss)
    return model


def the_model(model):
    return torch.compile(model)


# %%
import gc


def weigh(prepare):
    """The peak of the second step, in bytes."""
    torch.compiler.reset()
    gc.collect()  # frees the last model, which may refer to itself
    model = GPT().to("cuda")
    step, optimizer = prepare(model), torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(V, (8, 512), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


# %% [markdown]
# **Your guess.** How many GB does the step take if only the loss is compiled, with the head before it?

# %%
with on_gpu():
    weigh(eager)  # so that cuBLAS has allocated its workspaces
    weighed = {"eager": weigh(eager)}
print(f"eager: {weighed['eager'] / 1e9:.2f} GB")
predict("07.loss", unit="GB")

# %%
with on_gpu():
    weighed |= {one.__name__: weigh(one) for one in (each_block, the_loss, the_model)}
reveal("07.loss", weighed["the_loss"])
title = "Compiling the loss alone saves nearly everything"
bars(weighed, title, provenance=f"max_memory_allocated(), second step · torch {torch.__version__}")

# %%
logits, head = 8 * 512 * V, V * h
closed = {
    "eager, 10 bytes per logit": 10 * logits,
    "compiled, the 16-bit logits": -2 * logits,
    "new at the peak: the head's 16-bit gradient": -2 * head,
}
closed["left over"] = weighed["eager"] - weighed["the_loss"] - sum(closed.values())
for name, size in closed.items():
    print(f"{name:45s} {size / 1e6:+9.1f} MB")

# %% [markdown]
# **The gap** is closed. So the compiler does in the loss what it does everywhere. From the
# 16-bit logits it computes softmax again, and writes the logits' gradient over the logits themselves.
#
# Is this better than the chunks of lesson 05? They need no compiler, and leave an eighth of the logits. But they compute
# the logits a second time. Both together leave an eighth of 2 bytes.
#
# And the blocks? Here is one in the picture of [lesson 05](05_activations.ipynb). A row is a tensor that a compiled
# kernel still writes. Predict which rows come back without the compiler, then change the line.

# %%
from course_utils.lessons.shared.block_picture import draw_block

with on_gpu(), torch.autocast("cuda", torch.bfloat16):
    x = torch.randn(8, 512, h, device="cuda", requires_grad=True)
    picture = draw_block(Block().to("cuda"), x, compile=True)  # change this: False
picture

# %% [markdown]
# What vanished: the norms' fp32 outputs, and the fp32 sum in the middle, which the second norm reads. Instead of that
# sum, the compiler keeps the 16-bit output of `out`, which went into it. So each block saves 2·s·b·h bytes. On the H200:

# %%
saved = WAYS["eager"]["peak"] - WAYS["each block"]["peak"]
print(f"8 blocks · 2·s·b·h: {8 * 2 * 1024 * 8 * 1024:,} bytes; counted: {saved:,} {PROVENANCE}")

# %% [markdown]
# ## The same as a formula
# This is simple enough for a formula. `estimate` lists what a compiled block keeps: what products read and make,
# statistics and masks. With `compile="model"` the loss keeps its 16-bit logits. Here is the GPT of the first section.

# %%
from course_utils import TrainingRun, estimate
from course_utils.models import TransformerConfig

sizes = {"hidden": 1024, "heads": 16, "vocab": 50_304, "max_positions": 2048, "tied": False}
whole = TransformerConfig("the GPT above", "gpt2", layers=8, **sizes)
run = TrainingRun(whole, 8, optimizer="adamw-fused", dropout=0.0, card="H200-141GB")
print("way        formula, bytes  counted, bytes", PROVENANCE)
for way, what in {"eager": "none", "each block": "blocks", "the model": "model"}.items():
    form = estimate(run.replace(compile=what)).total
    print(f"{way:10s} {form:14,}  {peak[way]:14,}  {form - peak[way]:+,}")

# %% [markdown]
# **The gap** is hardly more than the workspace of 1 MiB that cuBLASLt took on each thread in the recorded torch. Next to
# a simulated step there is less. Two blocks are enough to see it:

# %%
from course_utils import measure

small = TransformerConfig("two blocks of it", "gpt2", layers=2, **sizes)
short = run.replace(model=small, compile="model")  # change this: "blocks"
form, measured = estimate(short).total, measure(short)
off = 100 * (form / measured.peak - 1)
print(f"formula {form:,} bytes, {measured.word} {measured.peak:,} bytes, the gap {off:+.3f} %")

# %% [markdown]
# The formula is exact for a block, and within 1 % for a model. In which order the compiler makes a model's gradients, it
# decides by their sizes. For checkpoints, a loss in chunks or several micro-batches there is no formula: `estimate`
# refuses, and `measure` compiles.

# %% [markdown]
# ## The budget, or a checkpoint?
# `activation_memory_budget` makes the compiler run more again. A checkpoint around each block does that, too. **Your
# guess.** How many GB does a compiled GPT-2 with 16 sequences take on the H200 with a budget of 0, where everything is
# computed again?

# %%
print(f"compiled, a budget of 1: {FRONT['compiled']['none'].peak / 1e9:.2f} GB", PROVENANCE)
predict("07.budget", unit="GB")

# %%
from course_utils.figures import lines

steps, budgets = FRONT["compiled"], FRONT["budget"]
reveal("07.budget", budgets["0"].peak)
drawn = {
    "eager": [FRONT["eager"]["none"], FRONT["eager"]["full"]],
    "compiled, budgets": [steps["none"], *budgets.values()],
    "compiled, checkpoints": [steps["selective"], steps["full"]],
}
points = {
    name: ([one.peak / 1e9 for one in each], [one.ms for one in each])
    for name, each in drawn.items()
}
title = "A checkpoint for each block beats every budget"
lines(points, title, "GB at the peak", "ms of a step", provenance=f"GPT-2, b = 16, {PROVENANCE}")

# %%
shown = {
    "eager": FRONT["eager"]["none"],
    "compiled": steps["none"],
    "a budget of 0.1": budgets["0.1"],
    "a budget of 0": budgets["0"],
    "compiled, each block again": steps["full"],
}
for name, one in shown.items():
    kept, peak = one.kept / 1e9, one.peak / 1e9
    print(f"{name:27s} kept {kept:.2f} GB, peak {peak:.2f} GB, {one.ms:.1f} ms")

# %% [markdown]
# With a budget of 0 forward keeps nothing: only weights and states are left. Yet the peak hardly falls, because
# backward then computes *all* blocks again, before it uses the first. A checkpoint says more than "again": it says
# *when*, one block at a time. Kept is not peak.
#
# So compile the model, and put your checkpoints around the blocks as before. (The compiler sees them, and follows.)
# This recorded step takes a quarter of the eager step's memory, and less time than the eager step without checkpoints.

# %% [markdown]
# ## Where it breaks
# Python code that the compiler cannot follow ends the graph, and a new one begins: a [graph
# break](../docs/glossary.md#graph-break). Each graph has a cut of its own. **Your guess.** GELU keeps x, 2 bytes per number. How many with the `print` below in its middle?

# %%
predict("07.break", unit="bytes")

# %%
x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)


def talking_gelu(x):
    inner = torch.tanh(0.797885 * (x + 0.044715 * x**3))
    print(end="")  # change this: remove the line
    return 0.5 * x * (1 + inner)


reveal("07.break", kept_by(compiled(talking_gelu), x), unit="bytes")
found = torch._dynamo.explain(talking_gelu)(x)
print(f"{found.graph_count} graphs, {found.graph_break_count} break")

# %% [markdown]
# The second graph needs `inner`, so the first one hands it over, and it is kept. With
# `torch.compile(model, fullgraph=True)` a break is an error. `TORCH_LOGS="graph_breaks"` lists them.
#
# One more surprise. `mode="reduce-overhead"` records the step's kernels once, as a [CUDA
# graph](../docs/glossary.md#cuda-graph), and plays them again. A recorded kernel reads and writes the same addresses
# each time. So all of the step's tensors get a pool of memory of their own, which stays reserved.

# %%
for way in ("the model", "the model, CUDA graphs"):
    one = WAYS[way]
    allocated, reserved = one["peak"] / 1e9, one["reserved"] / 1e9
    print(f"{way:23s} allocated {allocated:.2f} GB, reserved {reserved:.2f} GB", PROVENANCE)

# %% [markdown]
# `max_memory_allocated()` no longer sees the activations: they are nobody's tensors. The card is as full as before. Ask
# for reserved memory ([lesson 12](12_allocator_and_fragmentation.ipynb)), and do not expect to evaluate a second model
# in what looks free.
#
# So does `torch.compile` use more memory? In training it kept less so far, or the same. Here is an exception: a dropout
# whose rate is 0.


# %%
def attend(scores, v):
    return F.dropout(scores.softmax(-1), 0.0) @ v  # change this


scores, v = random(256, 256), random(256, 64)
by_autograd, by_compiler = kept_by(attend, scores, v), kept_by(compiled(attend), scores, v)
print(f"bytes per score: autograd {by_autograd:.2f}, the compiler {by_compiler:.2f}")

# %% [markdown]
# Autograd's dropout returns its input if the rate is 0, so one tensor serves softmax and the product. The compiler writes
# dropout's result for the product, and keeps it *and* the scores. Remove the dropout. Where people report
# more, [their code frees tensors by hand, which a graph does not see](https://github.com/pytorch/pytorch/issues/122512),
# or they count a CUDA graph's pool.

# %% [markdown]
# ## The script's next lines
# Your script checkpoints its blocks since [lesson 06](06_recomputation.ipynb). Its `forward` ends before the head, and
# `model.loss` is a function of its own. So it takes two lines to compile both. **Predict** the peak. Then make the change
# in `my_train.py`, save, and run the cell again. Then it compiles, which takes half a minute.

# %%
from course_utils.lessons.shared.growing_script import script

script(7)

# %% [markdown]
# Only little goes: checkpoints and chunks had taken nearly all that a compiler could forget. The step gets faster, too,
# which no simulation shows. And the table has no formula here, as `estimate` knows none for checkpoints in a compiled
# model.

# %% [markdown]
# ## In your own script
# Compile the whole model, its loss included. Keep your checkpoints. Find graph breaks before you trust a number.

# %%
import torch


class WithLoss(torch.nn.Module):  # a model and its loss in one graph
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return torch.nn.functional.cross_entropy(self.model(inputs).float(), targets)


device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(32, 100, device=device)  # yours
inputs, targets = torch.randn(8, 32, device=device), torch.randint(100, (8,), device=device)
found = torch._dynamo.explain(WithLoss(model))(inputs, targets)
print(f"{found.graph_break_count} graph breaks")  # 0, or TORCH_LOGS="graph_breaks" says why
backend = "inductor" if device == "cuda" else "aot_eager"  # on a CPU without C++
step = torch.compile(WithLoss(model), fullgraph=True, backend=backend)
step(inputs, targets).backward()

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(7)

# %% [markdown]
# ## Take home
# **Remember** The compiler keeps what matrix products read and make, statistics and masks. All else is computed again
# where it is needed.
#
# **Breaks when** the loss is not in the graph, a graph break cuts it, or you look for a CUDA graph's memory in
# `max_memory_allocated()`.
#
# **Cheat-sheet line** compiled: SwiGLU keeps 6 of 8 bytes · ffn, a norm or GELU in single operations only its input, the
# loss 2·s·b·V and not 6 (10 at the peak) · a block of fused operations as much as eager · budget 0 keeps nothing, and
# peaks high · checkpoint each block, and compile the whole.
#
# This lesson corrects claim 32 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/07_torch_compile.ipynb).
