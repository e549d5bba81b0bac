# ---
# jupyter:
#   course:
#     minutes: 80
#     cpu_seconds: 40
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · torch.compile
#
# **80 minutes.** You should know [lesson 05](05_activations.ipynb), and `checkpoint` from [lesson
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
from course_utils.lessons.torch_compile.recorded import WAYS, WHERE

peak = {way: each["peak"] for way, each in WAYS.items()}
fell = peak["eager"] - peak["the model"]
print(f"eager {peak['eager'] / 1e9:.2f} GB, compiled {peak['the model'] / 1e9:.2f} GB", WHERE)

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
bars({way: peak[way] for way in three}, title, provenance=f"allocated at the peak · {WHERE}")

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


h, tokens = 256, 512
x = torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=True)
up, down = (torch.randn(h, 4 * h, dtype=x.dtype, requires_grad=True), torch.randn(4 * h, h, dtype=x.dtype))

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
#
# **Your turn.** Four functions are compiled. How many bytes does each keep per number in x? (A statistic of one number
# per token counts 0 here, a mask is stored as bool.)


# %%
def swiglu(gate, up):
    return F.silu(gate) * up


def rms_norm(x):  # as many models write it, in fp32
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def dropped(x):
    return F.dropout(gelu(x), 0.1)


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
