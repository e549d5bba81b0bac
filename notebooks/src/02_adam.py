# ---
# jupyter:
#   course:
#     minutes: 80
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Adam
#
# **80 minutes**, 18 of them for a section on optimization that you can skip. You should know what a gradient is, and
# from [lesson 01](01_where_did_the_memory_go.ipynb) what lives when in a training step. You need no GPU.
#
# In most scripts the optimizer is two lines. In memory it is larger than the model. Here you account for both lines:
# what Adam [keeps](../docs/glossary.md#optimizer-states), what its step needs for a moment, and how an optimizer inside
# backward frees every gradient at once.

# %% [markdown]
# ## Two lines, larger than the model
# First GPT-2 from PyTorch's own layers. Its attention is `scaled_dot_product_attention`: in fp32, that is the
# [memory-efficient kernel](../docs/glossary.md#flashattention).

# %%
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    def __init__(self, vocab=50257, positions=1024, h=768, L=12, a=12):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, h), nn.Embedding(positions, h)
        options = {"dropout": 0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(h, a, 4 * h, **options) for _ in range(L))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(h)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids):
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.words.weight)  # the head shares the embedding's weights


# %% [markdown]
# Now the two lines. Predict: which of them allocates Adam's states?

# %%
from course_utils import on_gpu

with on_gpu():
    model, optimizer = GPT().to("cuda"), None
    N = sum(p.numel() for p in model.parameters())
    allocated = {"the model": torch.cuda.memory_allocated()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # change this
    allocated["AdamW(…)"] = torch.cuda.memory_allocated()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as backward leaves it
    allocated["the gradients"] = torch.cuda.memory_allocated()
    optimizer.step()
    allocated["step()"] = torch.cuda.memory_allocated()
print(f"N = {N:,}. Bytes per parameter that are allocated after")
for line, size in allocated.items():
    print(f"{line:14s} {size / N:5.2f}")

# %% [markdown]
# `AdamW(…)` allocates nothing. The first `step()` makes the states, 8 bytes per parameter: twice the model. Set
# `amsgrad=True` in that line: then Adam divides by the largest v so far. Predict the last number.
#
# **Your turn.** Which tensors are they? `optimizer.state` has one dictionary per parameter. Write the lines that add up
# the bytes of all tensors in it (`nbytes`). They are right if they find what the step has allocated.


# %%
def kept_bytes(optimizer):
    """Return the bytes of all tensors that an optimizer keeps."""
    total = 0
    # write two or three lines here
    return total


found, by_step = kept_bytes(optimizer), allocated["step()"] - allocated["the gradients"]
done = abs(found / by_step - 1) < 0.01
print("Right." if done else f"Not yet: {found:,} bytes found, {by_step:,} allocated by the step.")
for name, tensor in optimizer.state[model.words.weight].items():
    print(f"{name:10s} {tuple(tensor.shape)!s:12s} {tensor.dtype}, on the {tensor.device.type}")

# %% [markdown]
# <details><summary>The lines</summary>
#
# `for state in optimizer.state.values():` and in the loop `total += sum(tensor.nbytes for tensor in state.values())`.
#
# </details>
#
# For each tensor of weights, *exp_avg* is m, *exp_avg_sq* is v. `step` counts t: 4 bytes on the *CPU*. Only a fused or
# capturable Adam keeps it on the GPU.

# %% [markdown]
# ## Adam by hand
# [Gradient descent](../docs/glossary.md#gradient-descent) moves the parameters against the gradient by a learning rate
# η, and keeps nothing: θ ← θ − η·g. [Momentum](../docs/glossary.md#momentum) adds up gradients in *m*.
# [RMSProp](../docs/glossary.md#rmsprop) divides by the root of *v*, a running mean of the gradient's square.
# [Adam](../docs/glossary.md#adam-adamw) does both ([Kingma and Ba 2015](https://arxiv.org/abs/1412.6980)). Its name is
# short for *adaptive moment estimation*:
#
# $$m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$$
#
# $$\hat m_t = \frac{m_t}{1 - \beta_1^t} \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t}$$
#
# $$\theta_t = \theta_{t-1} - \eta \cdot \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon}$$
#
# | part | what | decided by |
# |---|---|---|
# | m | direction | β1: a mean over about 1/(1 − β1) gradients; larger: less noise, slower turns |
# | v | size | β2: a mean over about 1/(1 − β2) squares; larger: a jump counts later |
# | m̂, v̂ | [bias correction](../docs/glossary.md#bias-correction): both began at zero | t: it wears off as βᵗ goes to 0 |
# | θ | update | η: the length of a step; ε: an update is half as long where √v̂ equals ε |
#
# A mean is a *first moment*, and the mean of squares a *second moment*: Adam estimates both
# [moments](../docs/glossary.md#first-moment) of the gradient. The second is *uncentered*. So v̂ is not the variance,
# although many texts call it that: a gradient that never changes has no variance, but v̂ is its square.
#
# In code, methods that end in `_` change m and v in place.


# %%
def adam(g: Tensor, m: Tensor, v: Tensor, t: int, beta1=0.9, beta2=0.999, eps=1e-8) -> Tensor:
    """Return the update in learning rates."""
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    return m_hat / (v_hat.sqrt() + eps)


gradients = torch.tensor([1000, 1, 1e-7, 1e-8, 1e-9, 1e-11])  # change this
print(adam(gradients, torch.zeros(6), torch.zeros(6), t=1))

# %% [markdown]
# Adam divides by the gradients' size, so the size cancels: η is the length of a step, not a factor of the gradient. Far
# below ε it is gradient descent again, and almost no step. (Llama 2 took β2 = 0.95 and ε = 10⁻⁵, [Touvron et al.
# 2023](https://arxiv.org/abs/2307.09288), section 2.2.)
#
# One text says that parameters with larger gradients get *smaller updates*. Do they? Try three sizes, steady and noisy.

# %%
sizes = torch.tensor([0.001, 1.0, 1000.0])
for noise in (0, 1, 10):
    torch.manual_seed(0)
    m, v, walked = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for t, dice in enumerate(torch.randn(2000), 1):
        walked += adam((1 + noise * dice) * sizes, m, v, t).abs()
    lengths = [round(length, 2) for length in (walked / 2000).tolist()]
    print(f"noise {noise:2d} times the mean, mean updates in learning rates: {lengths}")

# %% [markdown]
# The updates are equally long. *Noise* shortens an update: opposite signs cancel in m, but their squares add up in v.
# Larger gradients only make $\eta / \sqrt{\hat v}$ smaller, the learning rate *per unit of gradient*.
#
# ### A whole optimizer
# PyTorch's base class gives each parameter p a dictionary, `self.state[p]`. AdamW also shrinks the weights, in a line
# of its own ([Loshchilov and Hutter 2019](https://arxiv.org/abs/1711.05101)).


# %%
class HandAdamW(torch.optim.Optimizer):
    """AdamW with two states per parameter, made when the first step needs them."""

    def __init__(self, parameters, lr=1e-3, eps=1e-8, decay=0.01):
        super().__init__(parameters, {"lr": lr, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, eps, decay = group["lr"], group["eps"], group["decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                p.mul_(1 - lr * decay)
                p.sub_(adam(p.grad, state["m"], state["v"], state["t"], eps=eps), alpha=lr)


# %% [markdown]
# Does it equal PyTorch's AdamW? Train a tiny GPT with each, from the same seed, on the same tokens.


# %%
def trained(make, steps=20, **settings):
    """Return a small model after some steps, and the losses of all steps."""
    torch.manual_seed(0)
    small = GPT(vocab=65, positions=32, h=64, L=2, a=4)
    optimizer, losses = make(small.parameters(), **settings), []
    ids = torch.randint(65, (4, 33))
    for _ in range(steps):
        loss = F.cross_entropy(small(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return small, torch.tensor(losses)


settings = {"lr": 1e-3, "eps": 1e-8}  # change this
ours, losses = trained(HandAdamW, **settings)
theirs, their_losses = trained(torch.optim.AdamW, **settings)
print(f"largest difference of two losses: {(losses - their_losses).abs().max():.4f}, expected 0")

# %% [markdown]
# Do all *weights* agree as well?

# %% tags=["nbval-ignore-output"]
pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
apart = {name: (one - other).detach().abs() for (name, one), other in pairs}
biases = apart.pop("blocks.0.self_attn.in_proj_bias").chunk(3)
for name, difference in zip(("queries", "keys", "values"), biases, strict=True):
    print(f"first block, biases of the {name}: {difference.max():.6f}")
rest = max(off.max().item() for name, off in apart.items() if "in_proj_bias" not in name)
print(f"all weights except such biases: {rest:.6f}")

# %% [markdown]
# The bias of the *keys* differs most. It adds the same number to all scores of a query, and softmax does not notice.
# Its true gradient is zero, and autograd computes rounding noise. Adam divides this noise by its own size, so only ε
# keeps the steps short. Set `eps` to 1e-16 and run both cells again. Predict the loss and the keys' biases.

# %% [markdown]
# ## What the step itself needs
# The step also needs room: $\sqrt{\hat v} + \varepsilon$ is a new tensor. How many exist at once depends on how PyTorch
# goes through the parameters: [*for-loop, foreach, fused*](../docs/glossary.md#foreach-for-loop-fused).
#
# **Your guess.** How many bytes per parameter does AdamW with foreach need on top, at its fullest moment?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("02.transient", unit="bytes")

# %% [markdown]
# A memory snapshot has a *trace*: each allocation and each free, in order. Add them up, and you have a timeline of any
# piece of your script.

# %%
from itertools import accumulate


def traced(work):
    """Return the bytes on top of those before work(), after each allocation and free in it."""
    torch.cuda.memory._record_memory_history(stacks="python")
    work()
    trace, *_ = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return [*accumulate((signs.get(e["action"], 0) * e["size"] for e in trace), initial=0)]


def step_of_adamw(**way):
    """Return the timeline of a second step, and its peak by PyTorch's counter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **way)
    optimizer.step()  # makes the states
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return traced(optimizer.step), torch.cuda.max_memory_allocated() - before


# %%
import matplotlib.pyplot as plt

from course_utils.figures import show

optimizer = None  # or its states would stay
ways = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
with on_gpu():
    steps = {name: step_of_adamw(**way) for name, way in ways.items()}
fig, axes = plt.subplots(1, 3, figsize=(8, 2.6), sharey=True, layout="constrained")
for ax, (name, (line, peak)) in zip(axes, steps.items(), strict=True):
    ax.plot([size / N for size in [*line, line[-1]]], drawstyle="steps-post")
    ax.set(title=f"{name}: {peak / N:.2f}", xlabel="allocations and frees")
axes[0].set_ylabel("bytes per parameter")
fig.suptitle("foreach holds a number per parameter, the for-loop two of one tensor, fused none")
reveal("02.transient", steps["foreach"][1] / N, unit="bytes")
show(fig, "foreach climbs to 4 bytes per parameter, the for-loop has low spikes, fused stays at 0.")

# %% [markdown]
# **Foreach** computes √v̂ for *all* parameters before it uses any. The **for-loop** has two temporaries for one tensor
# at a time: at most twice the largest, the embedding. **Fused** has none: one kernel reads g, m and v and writes the
# weight.

# %%
largest = model.words.weight.nbytes
for name, estimated in {"for-loop": 2 * largest, "foreach": 4 * N, "fused": 0}.items():
    line, peak = steps[name]
    print(f"{name:8s} estimated {estimated:11,}, gap {estimated - max(line):+}, in blocks {peak:,}")

# %% [markdown]
# **The gap** is zero for the trace, which has the bytes that tensors asked for. The counter has blocks, and a remainder
# below 1 MiB is not split off ([lesson 12](12_allocator_and_fragmentation.ipynb)). Which of the three is PyTorch's
# default on a GPU? Guess, then add `"default": {}` to `ways`.
#
# This matters where the peak is in the optimizer's phase, as with small batches. There, `fused=True` is this course's
# cheapest saving. Which of the three is the fastest?

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("optimizer")

# %% [markdown]
# ## A step inside backward
# All gradients wait for `step()`, 4 bytes per parameter in fp32. They need not. Backward finishes one gradient after
# the other, and PyTorch can call a function of yours each time. So update the parameter there, and free its gradient at
# once:


# %%
def step_in_backward(model):
    """Let backward update each parameter as soon as it has the gradient; return the hooks."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-4, fused=True) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None

    return [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]


# %% [markdown]
# The training loop is then `loss.backward()` and nothing else. Take GPT-2 XL in fp32 and one sequence of 64 tokens,
# with fused AdamW both times.
#
# **Your guess.** How much lower is the peak with the step inside backward?

# %%
predict("02.in_backward", unit="GB")


# %%
def xl_step(inside, s=64):  # change this
    others = torch.cuda.memory_allocated()
    model = GPT(h=1600, L=48, a=25).to("cuda")
    ids = torch.randint(50257, (1, s), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    hooks = step_in_backward(model) if inside else []

    def step():
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()  # finds no gradient if the hooks have freed them
        optimizer.zero_grad()

    step()  # makes the states
    torch.cuda.reset_peak_memory_stats()
    line, peak = traced(step), torch.cuda.max_memory_allocated() - others
    for hook in hooks:
        hook.remove()  # or hooks and parameters keep each other
    return line, peak


# %%
with on_gpu(needs="30 GB"):  # a smaller card than that is simulated
    (after, peak_after), (inside, peak_inside) = xl_step(inside=False), xl_step(inside=True)

# %%
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for name, line in {"step after backward": after, "step inside backward": inside}.items():
    ax.plot([i / len(line) for i in range(len(line))], [size / 1e9 for size in line], label=name)
ax.legend()
ax.set(title="Inside backward, gradients never pile up", xlabel="one training step")
ax.set_ylabel("GB beyond weights, states")
reveal("02.in_backward", peak_after - peak_inside)
show(fig, "Without hooks the line climbs through backward to over 6 GB; with them it stays low.")
print(f"peaks: {peak_after / 1e9:.2f} and {peak_inside / 1e9:.2f} GB")

# %% [markdown]
# **Estimate.** After backward: all gradients, 4·N. Inside: one gradient, at most the largest, the embedding's. But the
# head shares this tensor. Its gradient comes first, waits for the embedding's, which comes last, and the sum is a third.

# %%
with torch.device("meta"):  # shapes without memory
    n = sum(weight.numel() for weight in GPT(h=1600, L=48, a=25).parameters())
table = 4 * 50257 * 1600  # bytes of its embedding
for name, estimated, line in (("after", 4 * n + 2 * table, after), ("inside", 3 * table, inside)):
    gap = estimated - max(line)
    print(f"{name:6s} estimated {estimated / 1e9:.3f} GB, gap {gap / 1e6:+.2f} MB")

# %% [markdown]
# **The gap** is what is left of the activations. Now change `s=64` to `s=1024`. Predict: is the saving as large?
#
# With 1,024 tokens, the peak is early in backward, with all activations and hardly a gradient. So this is for runs whose
# peak is *late* in backward: few tokens, or [recomputation](../docs/glossary.md#activation-recomputation). Three things
# do not go with it, because they need all gradients before the first update: micro-batches that add up ([lesson
# 08](08_gradient_accumulation.ipynb)), clipping by the norm of *all* gradients, and fp16's loss scaling ([lesson
# 03](03_mixed_precision.ipynb)).
#
# PyTorch has a [tutorial](https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html) on
# it, and [Lv et al. 2023](https://arxiv.org/abs/2306.09782) do the same without any state. In exercise 2 you do it with
# 16-bit weights.

# %% [markdown]
# ## Sixteen bytes, plus the step
# Training with [master weights](../docs/glossary.md#master-weights) keeps 2 bytes for the 16-bit weight, 2 for the
# gradient, 4 for the fp32 master, 8 for m and v: 16, as in lesson 01. The [ZeRO](../docs/glossary.md#zero) paper
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.1) calls the last two the optimizer's and
# names them [K](../docs/glossary.md#k): here K = 12, and a run keeps $(2 + 2 + K) \cdot N$ bytes.
#
# Some loops first convert *all* gradients to fp32, then call the optimizer. Megatron-LM's does, in
# `_copy_model_grads_to_main_grads`
# ([optimizer.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/optimizer.py)). It prefers a
# fused Adam of Transformer Engine or Apex. Without these it takes PyTorch's AdamW
# ([\_\_init\_\_.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/__init__.py)), which is
# foreach on a GPU.
#
# **Your guess.** All gradients are converted, the 16-bit ones are freed, and foreach AdamW steps. How many bytes per
# parameter are alive at the fullest moment?

# %%
predict("02.upcast", unit="bytes")


# %%
def fullest_moment(at_once):
    """Bytes per parameter, with gradients copied to fp32 at once, or just before each update."""
    start = torch.cuda.memory_allocated()
    half = GPT().to("cuda", torch.bfloat16)
    pairs = [(p, p.detach().float()) for p in half.parameters()]
    groups = [pairs] if at_once else [[pair] for pair in pairs]
    masters = [[master for _, master in group] for group in groups]
    optimizers = [torch.optim.AdamW(group, foreach=True) for group in masters]  # change this
    for _ in range(2):
        for p in half.parameters():
            p.grad = torch.zeros_like(p)  # as backward leaves it
        torch.cuda.reset_peak_memory_stats()
        for group, optimizer in zip(groups, optimizers, strict=True):
            for p, master in group:
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
    return (torch.cuda.max_memory_allocated() - start) / N


# %%
paper = {"weights": 2, "fp32 gradients": 4, "master weights": 4, "m and v": 8, "foreach": 4}
with on_gpu():
    at_once, one_by_one = fullest_moment(at_once=True), fullest_moment(at_once=False)
print(f"estimated {sum(paper.values())}: {paper}")
print(f"at once {at_once:.2f}, one at a time {one_by_one:.2f} bytes per parameter")
reveal("02.upcast", at_once, unit="bytes")

# %% [markdown]
# All at once, the step needs 6 bytes more than 16: 2 for the wider gradients, 4 for foreach. The rest is what the
# allocator does not split off. If you [upcast](../docs/glossary.md#upcasting) *one at a time*, only one tensor needs
# these 6. One word saves foreach's 4 in your own loop: change `foreach` to `fused`, and predict both numbers.
#
# A `TrainingRun` names the way in its optimizer:
#
# | `optimizer` | with fp32 weights, and under autocast | with 16-bit weights and fp32 masters |
# |---|---|---|
# | `"adamw"` | foreach, PyTorch's default | one tensor at a time: upcast, update |
# | `"adamw-foreach"` | foreach | all at once |
# | `"adamw-fused"` | fused | one tensor at a time, fused |
#
# `moments(run)` is what each moment of a run takes, by closed forms. It agrees with the loop above, but for what the
# allocator does not split off:

# %%
from course_utils import TrainingRun, moments

plain = TrainingRun("gpt2", micro_batch=1, seq_len=128, precision="fp32", attention="efficient")
choices = {"fp32": ("adamw", "momentum"), "bf16-master": ("adamw", "adamw-foreach", "adamw-fused")}
for precision, optimizers in choices.items():  # change this: add "lion"
    for name in optimizers:
        run = plain.replace(precision=precision, optimizer=name)
        step = moments(run)["optimizer step"]
        kept = f"K = {step['optimizer_states'] / N:.0f}"
        print(f"{precision:11s} {name:13s} {kept:6s} {step.total / N:5.2f} bytes in the step")

# %% [markdown]
# fp32 Adam keeps 4 + 4 + 8 and mixed-precision Adam 2 + 2 + 12: the master copy costs what the 16-bit weights and
# gradients save. But compare two recipes only if the optimizer goes the same way in both.

# %% [markdown]
# ## What other optimizers keep
# SGD keeps nothing, momentum one number. [Adafactor](../docs/glossary.md#adafactor) keeps only a row and a column for
# each matrix of *v* ([Shazeer and Stern 2018](https://arxiv.org/abs/1804.04235)). [8-bit
# Adam](../docs/glossary.md#8-bit-adam) keeps both of Adam's numbers in 8 bits, with a scale for each block of numbers
# ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861) take 2,048; here it is 256).
# [Muon](../docs/glossary.md#muon) keeps one number for the blocks' matrices and leaves embeddings and vectors to AdamW
# ([Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)). [Lion](../docs/glossary.md#lion) keeps one number
# and takes its sign ([Chen et al. 2023](https://arxiv.org/abs/2302.06675)).
#
# **Your turn.** Lion's update is the sign of 0.9·m + 0.1·g. Then m becomes 0.99·m + 0.01·g. Write both lines. The
# second gradient here is small and points the other way: what should Lion do?


# %%
def lion(g, m):
    """Return Lion's update, and change m in place."""
    update = torch.zeros_like(g)
    # write two lines here
    return update


g, m = torch.tensor([2.0, -3.0]), torch.zeros(2)
both = [lion(g, m).tolist(), lion(-0.085 * g, m).tolist()]
done = both == [[1, -1], [1, -1]] and torch.allclose(m, 0.00905 * g)
wrong = f"Not yet: updates {both} should both be [1, −1], and m/g 0.00905: {m / g}"
print("Right." if done else wrong)

# %% [markdown]
# <details><summary>The two lines</summary>
#
# `update = torch.sign(0.9 * m + 0.1 * g)`, then `m.mul_(0.99).add_(g, alpha=0.01)`. With m changed first, the second
# update would turn around. `m = 0.99 * m + …` makes a new tensor, and the caller's m stays zero.
#
# </details>
#
# **Your guess.** How many bytes per parameter does Muon keep for GPT-2, in fp32?

# %%
embeddings = model.words.weight.numel() + model.positions.weight.numel()
print(f"{embeddings / N:.0%} of GPT-2's parameters are embeddings of words and positions")
predict("02.muon", unit="bytes")


# %%
def kept_by_a_step(optimizer):
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    optimizer.step()
    return torch.cuda.memory_stats()["requested_bytes.all.current"] - before


with on_gpu():
    weights = list(model.parameters())
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or "blocks" not in name]
    sgd = kept_by_a_step(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    adamw = kept_by_a_step(torch.optim.AdamW(weights))  # change this: amsgrad=True
    muon = kept_by_a_step(torch.optim.Muon(matrices)) + kept_by_a_step(torch.optim.AdamW(rest))
print(f"momentum {sgd / N:.2f}, AdamW {adamw / N:.2f}, Muon {muon / N:.2f} bytes per parameter")
reveal("02.muon", muon / N, unit="bytes")

# %% [markdown]
# Muon is between 4 and 8 bytes, because AdamW handles the embeddings. `measure(run)` takes such a step for any run, with
# the course's short versions of the others. (PyTorch's Adafactor reads a weight's norm, which a simulated
# GPU does not have.)

# %%
from course_utils import measure

kept = {"momentum": sgd, "muon": muon, "adamw": adamw}
for name in ("lion", "adam8bit", "adafactor"):
    stepped = measure(plain.replace(optimizer=name), steps=1)
    kept[name] = stepped.moments["end of step 1"]["optimizer_states"]
for name, size in kept.items():
    estimated = moments(plain.replace(optimizer=name))["optimizer step"]["optimizer_states"]
    print(f"{name:9s} {size / N:5.2f} bytes per parameter, gap {estimated - size:+,}")
fig, ax = plt.subplots(figsize=(7, 2.3), layout="constrained")
ax.barh(
    sorted(kept, key=kept.get), [size / N for size in sorted(kept.values())], color="tab:orange"
)
ax.set(title="Most keep half of Adam's 8 bytes or less", xlabel="bytes per parameter")
show(fig, "Adafactor next to nothing, 8-bit Adam 2, Lion and momentum 4, Muon 5.3, AdamW 8 bytes.")

# %% [markdown]
# ## The script: one word
# Now your copy of the growing script. The lesson's change is one word, `fused=True`. Predict: by how much does it lower
# the script's peak? Then make the change in `my_train.py`, save, and run this cell.

# %%
from course_utils.lessons.shared.growing_script import script

script(2)

# %% [markdown]
# Nothing: the script's peak is in *backward*, with the activations of 8 sequences, and the word changes the optimizer's
# phase alone. It costs nothing either. The gap of both rows is the same: the workspaces, and what blocks have beyond
# their tensors. Later lessons lower this peak.

# %% [markdown]
# ## Optional: why two numbers?
# *From here to the five questions, it is optimization, not memory. Skip it if you like: nothing after it needs it.*
#
# Why does nobody train transformers with gradient descent? A loss is steep in some directions and flat in others. Take
# two parameters, with curvature 1 along a valley and 25 across: $L = \frac{1}{2} (x^2 + 25 y^2)$. One η must serve
# both. Along curvature c, a step multiplies the distance from the minimum by $1 - \eta c$. Above η = 2/25, the steep
# direction diverges. The best η makes both factors equally large: $1 - \eta = -(1 - 25 \eta)$.
#
# **Your guess.** With the best η, how many steps bring the distance down to 1 %?

# %%
predict("02.valley", unit="steps")

# %% [markdown]
# A *rule* gets the gradient g, its memory m and v, and the number t of the step. It returns the direction.


# %%
def gradient_descent(g: Tensor, m: Tensor, v: Tensor, t: int) -> Tensor:
    return g


def momentum(g: Tensor, m: Tensor, v: Tensor, t: int, beta1: float = 0.6) -> Tensor:
    return m.mul_(beta1).add_(g)


def rmsprop(g: Tensor, m: Tensor, v: Tensor, t: int, beta2: float = 0.9) -> Tensor:
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return g / (v.sqrt() + 1e-8)


# %%
def walk(rule, lr: float, steps: int = 300) -> list:
    """Return the places that a rule visits in the valley."""
    flat, steep = 1, 25
    place = torch.tensor([-10.0, 2.0], dtype=torch.float64, requires_grad=True)
    m, v, path = torch.zeros_like(place), torch.zeros_like(place), [place.tolist()]
    for t in range(1, steps + 1):
        loss = (flat * place[0] ** 2 + steep * place[1] ** 2) / 2
        (g,) = torch.autograd.grad(loss, place)
        with torch.no_grad():
            place -= lr * rule(g, m, v, t)
        path.append(place.tolist())
    return path


# %%
from math import ceil, hypot, log

from course_utils.lessons.adam.figures import walks

best = 2 / (1 + 25)
rates = (0.01, 0.04, best, 0.082)  # change this
paths = {f"η = {lr:.4f}": walk(gradient_descent, lr) for lr in rates}
far = hypot(*paths["η = 0.0769"][0])
counted = sum(hypot(*place) > 0.01 * far for place in paths["η = 0.0769"])
print(f"estimated {ceil(log(0.01) / log(1 - best))} steps, counted {counted}")
reveal("02.valley", counted, unit="steps")
walks(paths, "One step size for two directions: too short along the valley, or too long across it")

# %% [markdown]
# Change 0.082 to 0.079, just below the edge. Predict: does that walk arrive sooner than the best one?
#
# The number of steps grows with the *ratio* of the curvatures. In networks that ratio is not 25 but many powers of ten
# ([Sagun et al. 2016](https://arxiv.org/abs/1611.07476)). Momentum helps: opposite gradients cancel, and those that
# always point the same way grow (Polyak 1964). Dividing by √v slows the steep direction down and speeds the flat one up
# (RMSProp, Tieleman and Hinton 2012). Adam does both. Each costs one number per parameter.

# %%
rates = {gradient_descent: best, momentum: 0.06, rmsprop: 0.1, adam: 0.5}  # change this
four = {rule.__name__.replace("_", " "): walk(rule, lr) for rule, lr in rates.items()}
walks(four, "Momentum is the fastest here, and Adam is no faster than tuned gradient descent")

# %% [markdown]
# Adam does not win: we *knew* the curvature and chose the best η for gradient descent. Adam needs no curvature. Double η
# for both: which still arrives? Then use the controls. Turn the valley by 45°: which two optimizers notice? Set Adam's
# β1 to 0: what is missing?
#
# <details><summary>Answers</summary>
#
# RMSProp and Adam notice: each axis has its own *v*, and in a turned valley the axes no longer separate the steep
# direction from the flat one. With β1 = 0, Adam is RMSProp with bias correction.
#
# </details>

# %%
from course_utils.lessons.adam.widget import walker

walker("Adam", rate=0.5)  # change this

# %% [markdown]
# ### Why bias correction?
# Both running means begin at zero. After one step m is a tenth of the gradient, and v a thousandth of its square. After
# t steps, m is a sum of gradients with the weights $(1 - \beta_1) \beta_1^i$. A mean's weights must add up to 1. These
# add up to
#
# $$(1 - \beta_1) (1 + \beta_1 + \dots + \beta_1^{t-1}) = 1 - \beta_1^t$$
#
# Bias correction divides m by exactly that, and v by $1 - \beta_2^t$. With equal gradients, every update is then one
# learning rate long.
#
# **Your guess.** Without the correction, one update is furthest from that length. How long is it?

# %%
predict("02.bias", unit="learning rates")

# %%
beta1, beta2 = 0.9, 0.999  # change this
t = torch.arange(1, 3001, dtype=torch.float64)
raw = (1 - beta1**t) / (1 - beta2**t).sqrt()
fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
ax.semilogx(t, raw)
ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
ax.axhline(1, color="tab:gray")  # with the correction
ax.set(title="Without bias correction the first updates have the wrong length", xlabel="step")
ax.set_ylabel("learning rates")
reveal("02.bias", raw[(raw - 1).abs().argmax()].item(), unit="learning rates")
show(fig, "The update is over 3 learning rates long at first, rises to a peak, and falls to 1.")
print(f"step 1 by hand: {(1 - beta1) / (1 - beta2) ** 0.5:.2f}, in the figure {raw[0]:.2f}")
print(f"the longest is step {raw.argmax() + 1}; still {raw[999]:.2f} at step 1,000")

# %% [markdown]
# Why not *shorter*? The update divides by √v, and at first √v is even further below its true value than m. Change β2 to
# 0.95, as GPT-3 had it ([Brown et al. 2020](https://arxiv.org/abs/2005.14165), appendix B). Predict: is the first
# update too long or too short?

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(2)

# %% [markdown]
# ## In your own script
# List what your optimizer keeps. Use `fused=True`, so that its step needs no extra room, or `foreach=False` where fused
# is missing.

# %%
from collections import Counter

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

model(torch.randn(8, 1024, device=device)).square().mean().backward()
optimizer.step()  # the first one makes the states

sizes, parameters = Counter(), sum(p.numel() for p in model.parameters())
for state in optimizer.state.values():
    for name, tensor in state.items():
        if torch.is_tensor(tensor):
            sizes[f"{name}, {tensor.dtype} on {tensor.device.type}"] += tensor.nbytes
for name, size in sizes.items():
    print(f"{name:32s} {size:12,} bytes, {size / parameters:5.2f} per parameter")

# %% [markdown]
# ## Take home
# **Remember** Adam keeps two numbers per parameter, 8 bytes in fp32, and makes them in the first step. With master
# weights, K = 12. The step itself needs 4 bytes per parameter with foreach, nothing when fused. Inside backward, it
# also frees each gradient at once.
#
# **Breaks when** all gradients are upcast at once and AdamW is foreach: 16 bytes per parameter become 22, and
# `fused=True` saves 4 of them. It saves nothing if the peak is in backward.
#
# **Cheat-sheet line** optimizer bytes per parameter, fp32 states: SGD 0 · Adafactor ≈ 0 · 8-bit Adam ≈ 2 · momentum,
# Lion 4 · Muon 4 to 8 · Adam 8 · with fp32 masters 4 more · foreach: 4 more for a moment · step inside backward: no
# gradients, 2 or 4 less.
#
# This lesson corrects claim 30 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/02_adam.ipynb).
