# ---
# jupyter:
#   course:
#     minutes: 85
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Mixed precision
#
# **85 minutes.** You should know what Adam keeps for each parameter ([lesson 02](02_adam.ipynb)), and what a training
# step allocates and when ([lesson 01](01_where_did_the_memory_go.ipynb)). You need no GPU: small models train on your
# CPU.
#
# Do half the bits take half the memory? No. Training breaks in 16 bits in three ways. You see each break, run its
# cure, and weigh what each recipe of number formats costs.

# %% [markdown]
# ## What 16 bits can hold
# A floating-point number has a sign, an *exponent* (its size) and a *mantissa* (its precision). With 16 bits,
# [fp16](../docs/glossary.md#fp16-and-bf16) favors precision: 5 bits of exponent, 10 of mantissa. bf16 favors range: 8
# and 7. From 1 to 2, only the mantissa counts up.
#
# **Your guess.** In bf16, by how many thousandths is the next number after 1 larger?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("03.next", unit="thousandths")

# %% [markdown]
# Here is one number in five formats: its sign, its exponent, its mantissa, and what is really stored.

# %%
import torch

value = 0.1  # change this
exponents = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 5}
exponents |= {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
for dtype, e in exponents.items():
    stored = torch.tensor([value]).to(dtype)
    bits = "".join(f"{byte:08b}" for byte in reversed(stored.view(torch.uint8).tolist()))
    print(f"{dtype!s:19} {bits[0]} {bits[1 : 1 + e]:8} {bits[1 + e :]:23} {stored.item():.8g}")

# %% [markdown]
# No format holds 0.1 exactly. (Which ones hold 0.5, or 65,520? Change the number.) With m bits of mantissa, a normal
# number is
#
# $$(-1)^{\text{sign}} \cdot 2^{\text{exponent} - \text{bias}} \cdot \left(1 + \frac{\text{mantissa}}{2^m}\right)$$
#
# So the step from 1 to the next number, [*epsilon*](../docs/glossary.md#epsilon), is $2^{-m}$. Run this, then change
# 1.0 to 300.0: which formats still count in steps of one?

# %%
value = 1.0  # change this
print("format          next number  epsilon  largest  smallest")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    limits, here = torch.finfo(dtype), torch.tensor(value, dtype=dtype)
    after = torch.nextafter(here, torch.tensor(limits.max, dtype=dtype)).item()
    smallest = limits.smallest_normal * limits.eps
    print(f"{dtype!s:14} {after:12.8g} {limits.eps:8.2g} {limits.max:8.3g} {smallest:9.2g}")
reveal("03.next", 1000 * torch.finfo(torch.bfloat16).eps, unit="thousandths")

# %% [markdown]
# [tf32](../docs/glossary.md#tf32) is what the matrix units of Ampere and newer cards read from an fp32 number: bf16's
# range, fp16's precision. Memory still holds fp32, so tf32 saves time and not one byte. Of the two
# [fp8](../docs/glossary.md#fp8) formats, E4M3 favors precision, E5M2 range ([Micikevicius et al.
# 2022](https://arxiv.org/abs/2209.05433)).
#
# PyTorch reads any 16 bits as a number. This is fp16's largest finite one. Write its smallest number above 0, a
# [subnormal number](../docs/glossary.md#subnormal-numbers). Then read the same bits as bf16.

# %%
bits = "0 11110 1111111111"  # change this
pattern = torch.tensor(int(bits.replace(" ", ""), 2), dtype=torch.uint16)
print(f"{bits} is {pattern.view(torch.float16).item():g} in fp16")

# %% [markdown]
# ## First failure: many small updates
# A weight is 1, and each of 1,000 steps adds 0.0001. On paper it moves by 100 thousandths, to 1.1.
#
# **Your guess.** By how many thousandths does the weight move if it is stored in bf16?

# %%
predict("03.moved", unit="thousandths")

# %%
update = 1e-4  # change this
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    weight = torch.tensor(1.0, dtype=dtype)
    for _ in range(1000):
        weight = weight + update
    moved = 1000 * (weight.item() - 1)
    print(f"{dtype}: moved by {moved:.1f} thousandths, {1e6 * update:g} on paper")
reveal("03.moved", moved, unit="thousandths")

# %% [markdown]
# The update is less than half the distance to the next number, so each sum rounds back to the old weight. fp16 loses
# updates of up to $2^{-11}$ of the weight, bf16 eight times as large ones. Change the update to 0.001: which of the two
# moves? With 0.005, where does bf16 stop?
#
# **Your turn.** The first cure is an fp32 copy, called [*master weights*](../docs/glossary.md#master-weights). Add each
# update to the master. The model computes with its rounded copy. Replace the line in the loop by two.


# %%
def with_master(updates):
    """Return the fp32 master and the bf16 weight after these updates."""
    master, weight = torch.tensor(1.0), torch.tensor(1.0).bfloat16()
    for update in updates:
        weight = weight + update  # write two lines here instead
    return master, weight


master, weight = with_master([1e-4] * 1000)
there = f"master {master:.3f} in {master.dtype}, weight {weight:.3f} in {weight.dtype}"
done = there == "master 1.100 in torch.float32, weight 1.102 in torch.bfloat16"
print("Right: 1.102 is the bf16 number nearest to 1.1." if done else f"Not yet: {there}.")

# %% [markdown]
# <details><summary>The two lines</summary>
#
# `master = master + update`, then `weight = master.bfloat16()`. The sum is fp32, and each weight is rounded from it.
#
# </details>
#
# The second cure has no copy: [*stochastic rounding*](../docs/glossary.md#stochastic-rounding) goes up or down at
# random, right on average. bf16 is the upper half of an fp32 number. So add noise to the lower half, then cut it off.

# %%
dice = torch.Generator().manual_seed(0)
stored = torch.ones(10_000).bfloat16()
for _ in range(1000):
    bits = (stored.float() + 1e-4).view(torch.int32)
    noise = torch.randint(2**16, bits.shape, generator=dice, dtype=torch.int32)
    stored = ((bits + noise) & -(2**16)).view(torch.float32).bfloat16()
mean = stored.float().mean()
print(f"10,000 weights: mean {mean:.3f}, from {stored.min()} to {stored.max()}")

# %% [markdown]
# ## Second failure: the gradient that underflows
# fp16's smallest number is $2^{-24}$. Everything up to half of it becomes 0. Train a small model of characters for 50
# steps, and look at the last gradients.

# %%
from torch.nn.functional import cross_entropy

from course_utils.lessons.shared.language_model import HalfProducts, batches, language_model

model = language_model(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for tokens, targets in batches(50, seed=0):
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
gradients = gradients[gradients != 0]

# %% [markdown]
# These gradients would survive in fp16. But a large training divides its loss, and so each gradient, by the number of
# [micro-batches](../docs/glossary.md#micro-batch-and-global-batch). **To provoke what happens there, we divide by
# 4,096**, which is $2^{12}$.
#
# **Your guess.** What percentage of the gradients does fp16 turn into 0?

# %% tags=["nbval-ignore-output"]
middle = gradients.abs().median().log2()
print(f"before the division, half of the gradients are larger than 2^{middle:.0f}")
predict("03.lost", unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.figures import histogram_figure

divided = gradients / 4096
lost = (divided.half() == 0).float().mean().item()
reveal("03.lost", 100 * lost, unit="%")
title = "In fp16 the red gradients become 0, and the pale ones keep only few digits"
histogram_figure(divided, title)

# %% [markdown]
# fp16 has room only at the other end. So multiply the *loss*: by the chain rule, every gradient is multiplied too.
# Divide before the optimizer sees them. This is [*loss scaling*](../docs/glossary.md#loss-scaling) ([Micikevicius et
# al. 2018](https://arxiv.org/abs/1710.03740), section 3.2). A power of two changes only the exponent, so nothing is
# rounded. From which power on do gradients become infinite? Predict, then change the scale.

# %% tags=["nbval-ignore-output"]
scale = 2.0**16  # change this
scaled = (divided * scale).half()
lost, infinite = (scaled == 0).float().mean().item(), scaled.isinf().sum().item()
print(f"scaled by {scale:,.0f}: {lost:.2%} become 0 in fp16, {infinite} become infinite")
histogram_figure(divided, "Scaling moves the same gradients into fp16's range", scale=scale)

# %% [markdown]
# ## Third failure: overflow
# fp16's upper end is near, too. BLOOM's team explains: 250·250 = 62,500 is fine, but 255·255 = 65,025 overflows ([The
# Technology Behind BLOOM Training](https://huggingface.co/blog/bloom-megatron-deepspeed)).
#
# **Your guess.** What is the smallest whole number whose square overflows in fp16?

# %%
predict("03.square", unit="")

# %%
numbers = torch.arange(1.0, 1000.0)
overflows = numbers.half().square().isinf()
reveal("03.square", numbers[overflows].min().item(), unit="")

# %% [markdown]
# BLOOM's example is off by one, but its point holds. Now take 4,096 activations, each 5 or −5. Which results overflow?
# Then change 5 to 300.

# %%
from torch.nn.functional import layer_norm, rms_norm

x = 5 * torch.tensor([1.0, -1.0]).repeat(2048).half()  # change this
results = {
    "x.square().sum()": x.square().sum(),
    "x @ x": x @ x,
    "x.pow(2).mean()": x.pow(2).mean(),
    "x.norm()": x.norm(),
    "rms_norm": rms_norm(x, x.shape).max(),
    "layer_norm": layer_norm(x, x.shape).max(),
}
print(f"the squares add up to {x.double().square().sum():,.0f}")
print("\n".join(f"{name:17s} {value.item():g}" for name, value in results.items()))

# %% [markdown]
# At 5, only the sum of squares overflows, in both spellings. On this CPU, PyTorch adds fp16 numbers in fp32
# ([AccumulateType.h](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/AccumulateType.h)) and rounds once. But
# fp16 cannot *store* 102,400. At 300, `pow(2)` stores each square, and 90,000 is too large. The norms are one kernel
# each, with squares in fp32; a norm of your own must upcast first. The rule: what an operation *stores* in fp16 must
# not exceed 65,504.
#
# Too large a loss scale makes gradients overflow as well. *Dynamic* loss scaling, PyTorch's `GradScaler`, adjusts it.
# After an infinite gradient, it skips the step and halves the scale. After a number of good steps, it doubles the
# scale. Choose one weight's gradients and watch:

# %%
inf = float("inf")
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for gradient in (1.0, 1.0, 1.0, inf, inf, 1.0, 1.0, 1.0):  # change this
    scaler.scale(weight * gradient).backward()
    scaler.step(optimizer)  # divides the gradient by the scale; takes no step if it is not finite
    scaler.update()
    optimizer.zero_grad()
    scale = scaler.get_scale()
    print(f"gradient {gradient}: the weight is {weight.item():.1f}, the next scale {scale:,.0f}")

# %% [markdown]
# ## Five trainings
# Now all cures in one loop. With master weights, the optimizer sees only fp32 copies: gradients go to the masters, and
# the masters go back, rounded. With loss scaling, the scaler is around backward and step. With
# [autocast](../docs/glossary.md#autocast) around forward, PyTorch chooses each operation's format. (`HalfProducts`
# computes 16-bit products as a GPU's matrix units do; without it, a CPU takes up to ten times as long.)


# %%
def train(model, has_masters=False, autocast=False, scales=False, rate=3e-3, steps=60, seed=0):
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights] if has_masters else weights
    adam = torch.optim.AdamW(masters, lr=rate)
    scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=3)
    losses = []
    for tokens, targets in batches(steps, 4, seed=seed):
        with torch.autocast("cpu", torch.float16, enabled=autocast), HalfProducts():
            loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        scaler.scale(loss / 4096).backward()
        for weight, master in zip(weights, masters):
            master.grad = weight.grad.to(master.dtype)
        scaler.step(adam)
        scaler.update()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master)
        model.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# GradScaler waits 2,000 steps before it doubles. We have 60, so ours waits 3. Five trainings share the model, the
# batches, AdamW's rate of 0.003, and the loss divided by 4,096:
#
# - fp32
# - fp16 autocast, without and with a scaler
# - "bf16 alone": nothing in fp32, not even Adam's [moments](../docs/glossary.md#first-moment)
# - bf16 with fp32 master weights
#
# **Your guess.** How many of the five end where fp32 ends, counting fp32 itself? (Within 0.15 nats, the loss's unit:
# other batches change it as much.)

# %%
predict("03.trained", unit="of five")

# %% tags=["nbval-ignore-output"]
plain, alone, mixed = (language_model(seed=0) for _ in range(3))
trained = {
    "fp32": train(plain),
    "fp16, no scaling": train(language_model(seed=0), autocast=True),
    "fp16, scaled": train(language_model(seed=0), autocast=True, scales=True),
    "bf16 alone": train(alone.bfloat16()),
    "bf16, fp32 masters": train(mixed.bfloat16(), has_masters=True),
}
final = {name: sum(losses[-10:]) / 10 for name, losses in trained.items()}
for name, loss in final.items():
    print(f"{name:18s} ends at {loss:.2f} nats, {loss - final['fp32']:+.2f} against fp32")
as_well = [name for name, loss in final.items() if abs(loss - final["fp32"]) < 0.15]
reveal("03.trained", len(as_well), unit="of five")

# %% [markdown]
# Without scaling, fp16 fails worse than the histogram suggested: gradients underflow on their way through the layers,
# too. bf16 needs no scaling, because its exponent is fp32's. Then why master weights? This rate is high, as at a
# training's start.
#
# ### The end of a training
# At the end the rate has decayed. Take the model that learned in fp32, and train 50 more steps at a rate of 0.00001: in
# fp32, in bf16 alone, and in bf16 with master weights.
#
# **Your guess.** What percentage of the weights has not moved after these 50 steps in bf16 alone?

# %%
predict("03.late", unit="%")

# %% tags=["nbval-ignore-output"]
from copy import deepcopy

rate, unmoved = 1e-5, {}  # change this
text, targets = next(batches(1, 256, seed=2))  # to compare losses on
names = {"fp32": torch.float32, "bf16 alone": torch.bfloat16, "bf16, fp32 masters": torch.bfloat16}
for name, dtype in names.items():
    losses, weights = [], []
    model = deepcopy(plain).to(dtype)
    for steps in (0, 50):
        train(model, "masters" in name, rate=rate, steps=steps, seed=1)
        logits = deepcopy(model).float()(text).detach()
        losses.append(cross_entropy(logits.flatten(0, 1), targets.flatten()))
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    unmoved[name] = (weights[0] == weights[1]).float().mean().item()
    gained = 1000 * (losses[0] - losses[1])
    print(f"{name:18s} {unmoved[name]:4.0%} unmoved, {gained:4.1f} thousandths of a nat gained")
reveal("03.late", round(100 * unmoved["bf16 alone"], -1), unit="%")

# %% [markdown]
# In bf16 alone, most of the progress is lost, without an error: the loss curve looks as if training were finished. With
# masters, a bf16 weight may stay the same for a while, but its master moves on. Change the rate to 0.001, and predict
# both columns.
#
# And fp16 alone, states included? Adam divides by $\sqrt{v} + \varepsilon$. What is left of the two in fp16?

# %%
print("losses:", [round(loss, 1) for loss in train(language_model(seed=0).half(), steps=3)])
print("the square of a gradient of 1e-4:", torch.tensor(1e-4).half().square().item())
print("Adam's epsilon of 1e-8:", torch.tensor(1e-8).half().item())

# %% [markdown]
# Both are 0, and 0/0 gives NaN.
#
# ### Why large models diverged in fp16
# With masters and loss scaling, fp16 trained good models until they grew large. BLOOM's team spent *several months* on
# an fp16 model of 104 billion parameters whose loss kept diverging. The teams of Megatron-LM and DeepSpeed, after [530
# billion parameters](https://arxiv.org/abs/2201.11990), advised them against fp16. OPT-175B's team reported a very
# difficult time in it ([the same text](https://huggingface.co/blog/bloom-megatron-deepspeed), section
# "BF16Optimizer").
#
# OPT's paper ([section 2.5](https://arxiv.org/abs/2205.01068)) names three signs: the loss runs away, the dynamic loss
# scale falls to 0, the last layer's activations grow. Loss scaling protects *gradients*. Nothing keeps *activations*
# below 65,504. BLOOM was then trained in bf16, which NVIDIA's cards have since Ampere (2020). A T4 or a V100 does not.

# %% [markdown]
# ## Where each format flows
# "Multiply in bf16, add in fp32": does the addition matter?
#
# **Your guess.** Add 4,096 ones in bf16, one after the other. What comes out?

# %%
predict("03.ones", unit="")

# %%
dtype = torch.bfloat16  # change this
total, ones = torch.zeros((), dtype=dtype), torch.ones(1, 4096, dtype=dtype)
for one in ones.flatten():
    total = total + one
may_round = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
print(f"one by one: {total.item()}; a matrix product of the same ones: {(ones @ ones.T).item()}")
print("on a GPU, a product may round its partial sums to bf16:", may_round)
reveal("03.ones", total.item(), unit="")

# %% [markdown]
# From 256 on, bf16's numbers are 2 apart, and adding 1 changes nothing. Change the format to `torch.float16` and
# predict. A matrix product adds in fp32, and this CPU rounds once. A GPU may split a long sum and round the parts to 16
# bits, too. The last line is the switch, with an fp16 twin ([PyTorch's note on
# accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html#reduced-precision-reduction-for-fp16-and-bf16-gemms)).
#
# Gradients of many micro-batches are a long sum, too. One recipe adds them in fp32: bf16 weights, fp32 gradients, fp32
# masters ([Kalamkar et al. 2019](https://arxiv.org/abs/1905.12322), section 3). For one linear layer:

# %%
master = torch.nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
adam = torch.optim.AdamW([master], lr=1e-3)
W = master.detach().bfloat16()
master.grad = torch.zeros_like(master)
x = torch.randn(16, 32).bfloat16()
y = x @ W.T  # bf16 · bf16, added in fp32, rounded to bf16
dy = torch.randn_like(y)  # in a model, the layer above sends this back
dx = dy @ W  # added in fp32, rounded to bf16: dL/dy of the layer below
dW = dy.T @ x  # added in fp32 over the tokens, rounded to bf16
master.grad += dW  # once per micro-batch: this sum is fp32
adam.step()
W = master.detach().bfloat16()
print("bf16:", {tensor.dtype for tensor in (W, y, dy, dx, dW)})
print("fp32:", {tensor.dtype for tensor in (master, master.grad, adam.state[master]["exp_avg"])})

# %% [markdown]
# In one place this differs from Kalamkar et al., who never round dL/dW: the product's fp32 sums go to the fp32 masters.
# PyTorch rounds dL/dW to the format of W, then adds it in fp32. Autocast rounds it, too. Megatron Core's
# `gradient_accumulation_fusion` does not
# ([layers.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py)).

# %% [markdown]
# ## What autocast keeps in fp32
# Most people write `with torch.autocast("cuda", dtype=torch.bfloat16):` instead. PyTorch then chooses each operation's
# format. Weights, gradients and states stay in fp32.
#
# **Your guess.** GPT-2 with *one* sequence of 1,024 tokens: how much does forward keep for backward under autocast, in
# percent of what it keeps in fp32?

# %%
predict("03.autocast", unit="% of fp32's")

# %% [markdown]
# Matrix products and convolutions run in 16 bits. What adds up many numbers or grows fast runs in fp32: norms, softmax,
# powers, most losses. Everything else takes the format of its inputs ([PyTorch's
# list](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference)). Here is the
# [block](../docs/glossary.md#transformer-block) of lesson 01's script. Which format does each of its layers return?

# %%
from torch import nn
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


# %%
from course_utils import on_gpu


def tell(layer, inputs, output):
    print(f"{type(layer).__name__:10s} reads {inputs[0].dtype}, returns {output.dtype}")


with on_gpu():
    block, x = Block(768, 12).to("cuda"), torch.randn(1, 1024, 768, device="cuda")
    for layer in block.modules():
        layer.register_forward_hook(tell)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        block(x)
    del block, layer, x

# %% [markdown]
# **Norms return fp32**, and forward keeps it. Their kernels add in fp32 anyway; autocast changes what is *stored*. The
# block's output, the [residual stream](../docs/glossary.md#residual-connection), is fp32: each addition takes the wider
# format.
#
# And the **loss**? PyTorch's documentation lists `cross_entropy` among what runs in fp32. Given
# [logits](../docs/glossary.md#logits) in bf16, what does it keep for backward?


# %%
def look(tensor):
    print(f"keeps {tensor.dtype}, {tuple(tensor.shape)}")
    return tensor.detach()  # the tensor itself would keep its own graph alive


with on_gpu():
    logits = torch.randn(1024, 50_257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50_257, (1024,), device="cuda")
    watch = torch.autograd.graph.saved_tensors_hooks(look, lambda kept: kept)
    with torch.autocast("cuda", dtype=torch.bfloat16), watch:
        loss = cross_entropy(logits, targets)
    del loss, logits, targets

# %% [markdown]
# The [log-softmax](../docs/glossary.md#log-softmax) inside the loss runs in the logits' bf16. Then its result is copied
# to fp32. Both stay: 6 bytes per logit.
#
# Now the whole model, and a step that is the five trainings' loop. `weigh` returns the bytes that forward keeps for
# backward, and the peak of step 2.


# %%
V = 50257


class GPT(nn.Module):
    def __init__(self, h=768, L=12, a=12):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks, self.norm = nn.Sequential(*(Block(h, a) for _ in range(L))), nn.LayerNorm(h)

    def forward(self, ids):  # to the loss; the head shares the embedding's weights
        x = self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


# %%
def weigh(sequences, dtype=torch.float32, autocast=False, has_masters=False):
    torch.cuda.empty_cache()  # or old blocks would be reused, with what they have beyond tensors
    model = GPT().to("cuda", dtype)
    weights = list(model.parameters())
    masters = [nn.Parameter(one.detach().float()) for one in weights] if has_masters else weights
    adam = torch.optim.AdamW(masters, fused=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(torch.randint(V, (sequences, 1024), device="cuda"))
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        for weight, master in zip(weights, masters):
            weight.grad, master.grad = None, weight.grad.to(master.dtype)
        adam.step()
        adam.zero_grad()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master)
    return kept, torch.cuda.max_memory_allocated()


# %% [markdown]
# **Estimate.** Autocast also keeps a 16-bit *copy* of every weight matrix that is multiplied: 12·h² in each block, and
# the head.

# %%
sequences = 1  # change this
with on_gpu(needs="14 GB"):
    in_fp32, under = (weigh(sequences, autocast=on)[0] for on in (False, True))
copies = 2 * (12 * 12 * 768**2 + V * 768)
print(f"forward keeps {in_fp32 / 1e6:,.0f} MB in fp32, {under / 1e6:,.0f} MB under autocast")
print(f"the copies of the weights take {copies / 1e6:,.0f} MB of the latter")
reveal("03.autocast", 100 * under / in_fp32, unit="% of fp32's")

# %% [markdown]
# With few tokens, autocast keeps *more* than fp32: the copies cost the same for any batch. Change 1 to 8. Predict, then
# run. (The kernel of attention is flash under autocast. There is no flash kernel for fp32: PyTorch takes the
# *efficient* one, which keeps no scores either.)

# %% [markdown]
# ## Bytes per parameter
# And what persists? Lesson 01 had [ZeRO](../docs/glossary.md#zero)'s 2 + 2 + 12 bytes per parameter. Others say 18 or
# 20 for training with bf16 weights and fp32 masters.
#
# **Your turn.** This cell ends with 20. Write *one* line that makes it 18: the recipe with fp32 gradients and no
# others. Which other line makes it ZeRO's 16?

# %%
with on_gpu():
    before = torch.cuda.memory_allocated()
    weight = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight.grad = torch.ones_like(weight)  # from backward
    master = nn.Parameter(weight.float())
    master.grad = weight.grad.float()
    adam = torch.optim.AdamW([master], fused=True)
    adam.step()
    # write one line here
    each = (torch.cuda.memory_allocated() - before) / weight.numel()
    del weight, master, adam
said = {20: "both gradients are there", 16: "this is ZeRO's, with bf16 gradients"}
why = said.get(round(each), "weight, master and both moments have to stay")
print("Right." if round(each) == 18 else f"Not yet: {each:.0f} bytes per parameter, {why}.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `weight.grad = None` leaves the fp32 gradients: 2 + 4 + 4 + 8. `master.grad = None` leaves the bf16 ones: 2 + 2 + 4 +
# 8.
#
# </details>
#
# Here are the recipes that you will meet, made of real tensors. The order: weights, gradients, master weights if there
# are any, Adam's two moments, a second copy.

# %%
f32, bf16, f16, f8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
recipes = {
    "fp32; Transformer Engine's fp8": (f32, f32, f32, f32),
    "autocast, with its copies": (f32, f32, f32, f32, bf16),
    "ZeRO, section 3.1": (bf16, bf16, f32, f32, f32),
    "fp32 gradients: Megatron Core, EleutherAI": (bf16, f32, f32, f32, f32),
    "… and bf16 ones: Megatron Core, Playbook": (bf16, f32, f32, f32, f32, bf16),
    "bf16 alone": (bf16, bf16, bf16, bf16),
    "DeepSeek-V3, without its fp8 copies": (f32, f32, bf16, bf16),
    "FP8-LM": (f8, f8, f16, f8, f16),
}
with on_gpu():
    for name, formats in recipes.items():
        before = torch.cuda.memory_allocated()
        tensors = [torch.empty(2**24, device="cuda", dtype=dtype) for dtype in formats]
        each = (torch.cuda.memory_allocated() - before) / 2**24
        terms = " + ".join(str(tensor.itemsize) for tensor in tensors)
        print(f"{name:42s} {terms:22s} = {each:.0f}")
        del tensors

# %% [markdown]
# **On the states, mixed precision saves nothing**: fp32, autocast and masters take 16 or more. Only recipes with smaller
# moments take less. Before you compare two tools, ask which terms they include. Megatron Core has both 18 and 20 in its
# [guide](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html). Its 20 has an fp32 copy
# of the gradients for the optimizer, like that of the [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook). ZeRO's count leaves the copy out.
#
# ### fp8
# An fp8 format has so few values that each tensor needs its own *scale*. Store gradients of standard deviation 0.001 in
# E4M3: as they are, and scaled so that the largest becomes 448.

# %%
gradient = 0.001 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
fitting = torch.finfo(torch.float8_e4m3fn).max / gradient.abs().max()
for name, scale in {"as they are": 1.0, "scaled": fitting}.items():
    stored = (gradient * scale).to(torch.float8_e4m3fn).float() / scale
    error = (stored - gradient).norm() / gradient.norm()
    print(f"{name:12s} error {error:.0%} of the gradients' norm")

# %% [markdown]
# One of this course's sources says that fp8 training keeps its optimizer states in 16 bits or more. The table's recipes:
#
# - Transformer Engine: only products are fp8 ([MS-AMP's
#   table](https://azure.github.io/MS-AMP/docs/user-tutorial/optimization-level), row "Nvidia TE").
# - DeepSeek-V3: masters and gradients are fp32, moments bf16 ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437),
#   section 3.3.3).
# - FP8-LM: weights, gradients and the *first* moment are fp8 ([Peng et al. 2023](https://arxiv.org/abs/2310.18313),
#   section 2.2). The second moment holds squares, which span twice as many powers of two: 16 bits.
#
# FP8-LM disagrees with the source, so "trained in fp8" says little about memory.

# %% [markdown]
# ## What it saves
# So where is the saving? **Your guess.** GPT-2 with 8 sequences of 1,024 tokens, in bf16 with fp32 masters: how large
# is the step's peak, in percent of fp32's?

# %%
predict("03.peak", unit="% of fp32's")

# %% [markdown]
# `weigh` takes the steps. A `TrainingRun` says each recipe in one word, and `estimate` is the closed form for it.

# %%
from course_utils import TrainingRun, estimate

choices = {
    "fp32": {},
    "amp-bf16": {"autocast": True},
    "bf16-master": {"dtype": torch.bfloat16, "has_masters": True},
}
run = TrainingRun("gpt2", 8, 1024, optimizer="adamw-fused", dropout=0.0)
runs = {"fp32": run.replace(precision="fp32", attention="efficient")}
runs |= {name: run.replace(precision=name) for name in ("amp-bf16", "bf16-master")}
with on_gpu(needs="14 GB"):
    peaks = {name: weigh(8, **choice)[1] for name, choice in choices.items()}
for name, peak in peaks.items():
    share, formula = peak / peaks["fp32"], estimate(runs[name]).total
    gap = f"estimated {formula / 1e9:.2f} GB, gap {(formula - peak) / 1e6:+.0f} MB"
    print(f"{name:12s} {peak / 1e9:5.2f} GB, {share:4.0%} of fp32's; {gap}")
reveal("03.peak", 100 * peaks["bf16-master"] / peaks["fp32"], unit="% of fp32's")

# %% [markdown]
# **The gap** is cuBLAS's [workspaces](../docs/glossary.md#workspace), and what blocks have beyond their tensors
# ([lesson 12](12_allocator_and_fragmentation.ipynb)). A larger batch makes the saving larger. Look at the kinds:

# %%
print("GB, estimated     weights, states  activations  temporaries")
for sequences in (8, 1):  # change this
    for name, one in runs.items():
        kinds = estimate(one.replace(micro_batch=sequences))
        persist = kinds["parameters"] + kinds["optimizer_states"]
        sizes = [size / 1e9 for size in (persist, kinds["activations"], kinds["temporaries"])]
        print("{:11s} b = {} {:15.2f} {:12.2f} {:12.2f}".format(name, sequences, *sizes))

# %% [markdown]
# The peak is in the loss's backward, before the weights have gradients. Weights and states take 12 bytes per parameter
# in fp32 and under autocast, 14 with masters: no saving. Activations and temporaries, the logits' gradients, become
# smaller. Both grow with the batch: change 1 to 64. The paper on mixed precision says that memory nearly halves: there,
# activations were most of it (Micikevicius et al. 2018, section 3.1). Autocast saves less, as its residual stream,
# norms and loss stay fp32.

# %% [markdown]
# ## Your script, under autocast
# The script changes by one line. Forward and loss go one level deeper. Backward and the optimizer stay outside:

# %%
from course_utils.lessons.shared.growing_script import script

script(3)

# %% [markdown]
# Apply it to `my_train.py`, next to this notebook, save, and run the cell again. Your row must show the simulated bytes
# of the row above it. `weigh` counted the same. Lesson 02's change did not move this peak, which is at the loss. This
# one does: the gradients of the logits and most activations have 16 bits. With masters the script would fall further,
# but that takes `weigh`'s whole loop.
#
# ### And time?
# For many, speed matters more. Matrix units multiply 16-bit numbers several times as fast, and only half the bytes
# move. **No simulation can show speed.** On a GPU, `python my_train.py` prints tokens per second: run it with the line
# and without.

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("precision")

# %% [markdown]
# ## In your own script
# A training step in mixed precision: autocast around forward and loss, bf16 where the card has it, otherwise fp16 with
# a loss scaler. Unscale the gradients before you clip them.

# %%
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
has_bf16 = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
dtype = torch.bfloat16 if has_bf16 else torch.float16
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
for _ in range(3):
    x, target = torch.randn(64, 256, device=device), torch.randint(10, (64,), device=device)
    with torch.autocast(device, dtype=dtype):
        loss = nn.functional.cross_entropy(model(x), target)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # clipping needs gradients of their true size
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"{dtype}, scale {scaler.get_scale():,.0f}, weights {model[0].weight.dtype}")

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(3)

# %% [markdown]
# ## Take home
# **Remember** Products may be 16-bit, long sums of small terms may not: add updates, gradients over micro-batches,
# norms and matrix products in fp32. (A short sum may: with 16-bit weights, the residual stream is 16-bit.)
#
# **Breaks when** you take a short trial in pure bf16 as proof. At the end's low learning rates, most weights stop
# moving.
#
# **Cheat-sheet line** epsilon: bf16 2^−7, fp16 2^−10 · fp16 from 6e−8 to 65,504, so scale the loss · bytes per
# parameter: fp32 and autocast 4+4+8, masters 2+2+12, fp32 gradients 2+4+12, bf16 alone 2+2+4.
#
# This lesson corrects claims 19, 20 and 31 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/03_mixed_precision.ipynb).
