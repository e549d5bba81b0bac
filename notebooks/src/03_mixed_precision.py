# ---
# jupyter:
#   course:
#     minutes: 75
#     cpu_seconds: 30
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Mixed precision
#
# **75 minutes.** You should know what Adam keeps for each parameter ([lesson 02](02_adam.ipynb)), and what a training
# step allocates and when ([lesson 01](01_where_did_the_memory_go.ipynb)). You need no GPU: small models train on your
# CPU.
#
# Do half the bits take half the memory? No. Training breaks in 16 bits in three ways. You see each break, run its
# cure, and count what every recipe of number formats costs.

# %% [markdown]
# ## What 16 bits can hold
# A floating-point number has a sign, an *exponent* (its size) and a *mantissa* (its precision). With 16 bits,
# [fp16](../docs/glossary.md#fp16-and-bf16) favors precision: 5 bits of exponent, 10 of mantissa. bf16 favors range: 8
# and 7. From 1 to 2, only the mantissa counts up.
#
# **Your guess.** In bf16, by how many thousandths is the next number after 1 larger?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("03.next", unit="thousandths")

# %%
from course_utils.lessons.precision.figures import bits_figure

bits_figure(0.1, "No format holds 0.1 exactly: the fewer mantissa bits, the larger the error")

# %% [markdown]
# With m bits of mantissa, a normal number is
#
# $$(-1)^{\text{sign}} \cdot 2^{\text{exponent} - \text{bias}} \cdot \left(1 + \frac{\text{mantissa}}{2^m}\right)$$
#
# So the step from 1 to the next number, [*epsilon*](../docs/glossary.md#epsilon), is $2^{-m}$. Run this, then change
# 1.0 to 300.0: which formats still count in steps of one?

# %%
import torch

value = 1.0  # change this
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    limits, here = torch.finfo(dtype), torch.tensor(value, dtype=dtype)
    after = torch.nextafter(here, torch.tensor(limits.max, dtype=dtype))
    print(
        f"{dtype!s:14} {here.item():.5g} is followed by {after.item():.8g}; "
        f"epsilon {limits.eps:.2g}, largest {limits.max:.5g}, "
        f"smallest {limits.smallest_normal * limits.eps:.2g}"
    )
reveal("03.next", 1000 * torch.finfo(torch.bfloat16).eps, unit="thousandths")

# %% [markdown]
# [tf32](../docs/glossary.md#tf32) is what the matrix units of Ampere and newer cards read from an fp32 number: bf16's
# range, fp16's precision. Memory still holds fp32, so tf32 saves time and not one byte. Of the two
# [fp8](../docs/glossary.md#fp8) formats, E4M3 favors precision, E5M2 range ([Micikevicius et al.
# 2022](https://arxiv.org/abs/2209.05433)).
#
# Flip bits to make fp16's largest finite number, then its smallest above 0, a [subnormal
# number](../docs/glossary.md#subnormal-numbers). Then type 65520, in fp16 and in bf16.

# %%
from course_utils.lessons.precision.widget import bit_flipper

bit_flipper("fp16", 0.1)

# %% [markdown]
# ## First failure: many small updates
# A weight is 1, and each of 1,000 steps adds 0.0001. On paper it moves by 100 thousandths, to 1.1.
#
# **Your guess.** By how many thousandths does the weight move if it is stored in bf16?

# %%
predict("03.moved", unit="thousandths")

# %%
update = 1e-4  # change this
fp32, fp16, bf16 = torch.tensor(1.0), torch.tensor(1.0).half(), torch.tensor(1.0).bfloat16()
for _ in range(1000):
    fp32, fp16, bf16 = fp32 + update, fp16 + update, bf16 + update
for weight in (fp32, fp16, bf16):
    print(
        f"{weight.dtype}: moved by {1000 * (weight.item() - 1):.1f} thousandths, "
        f"{1e6 * update:g} on paper"
    )
reveal("03.moved", 1000 * (bf16.item() - 1), unit="thousandths")

# %% [markdown]
# The update is less than half the distance to the next number, so each sum rounds back to the old weight. fp16 loses
# updates of up to $2^{-11}$ of the weight, bf16 eight times as large ones. Change the update to 0.001: which of the two
# moves? With 0.005, where does bf16 stop?
#
# There are two cures:
#
# - [*Master weights*](../docs/glossary.md#master-weights): add in fp32, and round a copy for each forward pass.
# - [*Stochastic rounding*](../docs/glossary.md#stochastic-rounding): round up or down at random, right on average,
#   without a copy. bf16 is the upper half of an fp32 number: add noise to the lower half, then cut it off.

# %%
dice = torch.Generator().manual_seed(0)


def round_stochastically(values):
    noise = torch.randint(2**16, values.shape, generator=dice, dtype=torch.int32)
    bits = (values.view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).bfloat16()


master, stored = torch.ones(1), torch.ones(10_000).bfloat16()
for _ in range(1000):
    master = master + 1e-4
    stored = round_stochastically(stored.float() + 1e-4)
print(
    "expected 1.1, between bf16's 1.094 and 1.102; "
    f"the master's bf16 copy is {master.bfloat16().item():.3f}"
)
print(
    "10,000 weights rounded at random: "
    f"mean {stored.float().mean():.3f}, from {stored.min()} to {stored.max()}"
)

# %% [markdown]
# How many weights does this affect? Adam's updates are about as large as its learning rate, and smaller where gradients
# are noisy. Add the rate to each weight of a small language model with GPT-2's initial weights (standard deviation
# 0.02). How many stay where they are?

# %%
from course_utils.lessons.shared.language_model import language_model

matrices = [weight for weight in language_model(seed=0).parameters() if weight.dim() == 2]
weights = torch.cat([weight.flatten() for weight in matrices])
for rate in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5):
    unmoved = {}
    for dtype in (torch.float16, torch.bfloat16):
        rounded = weights.to(dtype)
        same = rounded + torch.tensor(rate, dtype=dtype) == rounded
        unmoved[dtype] = same.float().mean().item()
    shares = ", ".join(f"{share:4.0%} unmoved in {dtype}" for dtype, share in unmoved.items())
    print(f"rate {rate:.0e}:", shares)

# %% [markdown]
# Pure bf16 works while the learning rate is high. As it decays, most of the network freezes.

# %% [markdown]
# ## Second failure: the gradient that underflows
# fp16's smallest number is $2^{-24}$. Everything below half of it becomes 0. Train a small model of characters for 50
# steps.

# %%
from torch.nn.functional import cross_entropy

from course_utils.lessons.shared.language_model import batches

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
print(
    "before the division, "
    f"half of the gradients are larger than 2^{gradients.abs().median().log2():.0f}"
)
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
# BLOOM's example is off by one, but its point holds. Now take 4,096 activations, each 5 or −5. Which operations
# overflow in fp16? Then change 5 to 300.

# %%
from torch.nn.functional import layer_norm, rms_norm

x = 5 * torch.tensor([1.0, -1.0]).repeat(2048).half()  # change this
print(
    f"sum of squares {x.double().square().sum():,.0f}; "
    f"largest fp16 number {torch.finfo(torch.float16).max:,.0f}"
)
print("x.square().sum()", x.square().sum().item(), "· x @ x", (x @ x).item())
print("x.pow(2).mean() ", x.pow(2).mean().item(), "· x.norm()", x.norm().item())
rms = rms_norm(x, x.shape).max().item()
layer = layer_norm(x, x.shape).max().item()
print("rms_norm", rms, "· layer_norm", layer)

# %% [markdown]
# At 5, only the sum of squares overflows, in both spellings. PyTorch's sums and norms add fp16 numbers in fp32
# ([AccumulateType.h](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/AccumulateType.h)) and round once, and
# so does a matrix product on this CPU. But fp16 cannot *store* 102,400.
#
# At 300, the mean of squares fails too: `pow(2)` stores each square, and 90,000 is too large. The norm and both
# normalizations survive: each is one kernel that keeps its squares in fp32. A norm written by hand must upcast first.
# The rule: what an operation *stores* in fp16 must not exceed 65,504.
#
# Too large a loss scale makes gradients overflow as well, and the right scale changes during training. *Dynamic* loss
# scaling, PyTorch's `GradScaler`, adjusts it. After an infinite gradient, it skips the step and halves the scale. After
# a number of good steps, it doubles the scale. Choose one weight's gradients and watch the scale:

# %%
inf = float("inf")
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for gradient in (1.0, 1.0, 1.0, 1.0, inf, inf, 1.0, 1.0, 1.0):  # change this
    scaler.scale(weight * gradient).backward()
    scaler.step(optimizer)  # divides the gradient by the scale; takes no step if it is not finite
    scaler.update()
    optimizer.zero_grad()
    print(
        f"gradient {gradient}: "
        f"the weight is {weight.item():.1f}, the next scale {scaler.get_scale():,.0f}"
    )

# %% [markdown]
# Now a real training in fp16: [autocast](../docs/glossary.md#autocast) around forward, the scaler around backward and
# step. GradScaler begins at 65,536 and waits 2,000 steps before it doubles. We have 60, so ours waits 3.
# (`HalfProducts` computes 16-bit products as a GPU's matrix units do; without it, a CPU takes up to ten times as long.)

# %% tags=["nbval-ignore-output"]
from course_utils.figures import lines
from course_utils.lessons.shared.language_model import HalfProducts


def train_in_fp16(scaler, rate=3e-3, steps=60):
    model = language_model(seed=0)
    losses, scales = [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for tokens, targets in batches(steps, 4, seed=0):
        with torch.autocast("cpu", dtype=torch.float16), HalfProducts():
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        scaler.scale(loss / 4096).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


# %% tags=["nbval-ignore-output"]
losses, scales = train_in_fp16(torch.amp.GradScaler("cpu", growth_interval=3))
skipped = (torch.tensor(scales).diff() < 0).sum()
print(
    f"loss {losses[0]:.2f} at the start, {losses[-1]:.2f} at the end; "
    f"{skipped} of {len(losses)} steps skipped"
)
curve = {"loss scale": (range(len(scales)), scales)}
title = "The scale climbs until a gradient overflows"
source = "trained on this CPU"
lines(curve, title, "step", "loss scale", log_y=True, markers=False, provenance=source)

# %% [markdown]
# ## Five trainings
# Five trainings share the model, the batches, AdamW's rate of 0.003, and the loss divided by 4,096:
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

# %% [markdown]
# With master weights, the optimizer sees only fp32 copies. After backward, gradients go to the masters. After the step,
# the masters go back, rounded. If `masters` are the model's own weights, this is a plain loop.


# %%
def train(model, masters, rate=3e-3, steps=60, seed=0):
    optimizer = torch.optim.AdamW(masters, lr=rate)
    losses = []
    for tokens, targets in batches(steps, 4, seed=seed):
        with HalfProducts():
            loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        (loss / 4096).backward()
        for weight, master in zip(model.parameters(), masters, strict=True):
            master.grad = weight.grad.to(master.dtype)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters, strict=True):
                weight.copy_(master)
        model.zero_grad()
        losses.append(loss.item())
    return losses


# %% tags=["nbval-ignore-output"]
from course_utils import plus_minus

waits_for("03.trained")
fp32 = language_model(seed=0)
bf16 = language_model(seed=0).bfloat16()
mixed = language_model(seed=0).bfloat16()
ended = {
    "fp32": train(fp32, list(fp32.parameters())),
    "fp16, no scaling": train_in_fp16(torch.amp.GradScaler("cpu", enabled=False))[0],
    "fp16, scaled": losses,  # from the training above
    "bf16 alone": train(bf16, list(bf16.parameters())),
    "bf16, fp32 master": train(mixed, [weight.detach().float() for weight in mixed.parameters()]),
}
final = {name: sum(losses[-10:]) / 10 for name, losses in ended.items()}
for name, loss in final.items():
    print(f"{name:18s} ends at {loss:.2f} nats, {plus_minus(loss - final['fp32'], 2)} against fp32")

# %%
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

from course_utils.lessons.shared.language_model import mean_loss

waits_for("03.late")
rate, unmoved = 1e-5, {}  # change this
dtypes = {"fp32": torch.float32, "bf16 alone": torch.bfloat16, "bf16, fp32 master": torch.bfloat16}
for name, dtype in dtypes.items():
    model = deepcopy(fp32).to(dtype)
    masters = list(model.parameters())
    if "master" in name:
        masters = [w.detach().float() for w in masters]
    before = mean_loss(deepcopy(model).float())
    old = torch.cat([w.detach().flatten() for w in model.parameters()])
    train(model, masters, rate, steps=50, seed=1)
    same = torch.cat([w.detach().flatten() for w in model.parameters()]) == old
    unmoved[name] = same.float().mean().item()
    gained = 1000 * (before - mean_loss(model.float()))
    print(
        f"{name:18s} {unmoved[name]:4.0%} of the weights unmoved, "
        f"{gained:5.1f} thousandths of a nat gained"
    )

# %%
reveal("03.late", round(100 * unmoved["bf16 alone"], -1), unit="%")

# %% [markdown]
# In bf16 alone, most of the progress is lost, without an error: the loss curve looks as if training were finished. With
# master weights, a bf16 copy may also stay the same for a while, but its master moves on and takes it along. Change the
# rate to 0.001, and predict both columns.
#
# And fp16 alone, states included? One of this course's sources says that smaller models were trained so with success.

# %%
half = language_model(seed=0).half()
print("losses:", [round(loss, 1) for loss in train(half, list(half.parameters()), steps=3)])
print("Adam's epsilon of 1e-8, in fp16:", torch.tensor(1e-8).half().item())

# %% [markdown]
# Adam divides by $\sqrt{v} + \varepsilon$. In fp16, the square of a small gradient is 0, and so is ε: 0/0. SGD does not
# divide. Without the division of the loss by 4,096, nothing underflows in this small model:

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float32, torch.float16):
    model = language_model(seed=0).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for tokens, targets in batches(60, 4, seed=0):
        with HalfProducts():
            loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"SGD with momentum, everything in {dtype}: loss {loss.item():.2f} after 60 steps")

# %% [markdown]
# So the source is right where a model is small and its rate high: fp16 alone can learn. At a low rate, updates vanish
# as in the first failure.
#
# ### Why large models diverged in fp16
# With master weights and loss scaling, fp16 trained good models for years, until models grew large. BLOOM's team spent
# *several months* on an fp16 model of 104 billion parameters whose loss kept diverging. The Megatron-LM and DeepSpeed
# teams had trained [530 billion parameters](https://arxiv.org/abs/2201.11990) and gave them the same advice: not in
# fp16. The team of OPT-175B reported a very difficult time in fp16, too ([the same
# text](https://huggingface.co/blog/bloom-megatron-deepspeed), section "BF16Optimizer").
#
# OPT's paper ([section 2.5](https://arxiv.org/abs/2205.01068)) names three signs: the loss runs away, the dynamic loss
# scale falls to 0, the last layer's activations grow. Loss scaling protects *gradients*. Nothing keeps forward's
# *activations* below 65,504. BLOOM was then trained in bf16. NVIDIA's cards have it since Ampere (2020); a T4 or a V100
# does not.

# %% [markdown]
# ## Where each format flows
# One recipe uses bf16 weights, fp32 gradients and fp32 masters. Kalamkar et al. studied it first, in 2019 ([A Study of
# BFLOAT16](https://arxiv.org/abs/1905.12322), section 3). In plain PyTorch it flows like this:

# %%
from course_utils.lessons.precision.figures import flow_figure

flow_figure("Each product is summed in fp32, and its result rounded to bf16: y, dL/dW, dL/dx")

# %% [markdown]
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
print(f"one by one: {total.item()}; a matrix product of the same ones: {(ones @ ones.T).item()}")
print(
    "partial sums in bf16 allowed on a GPU:",
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
)
reveal("03.ones", total.item(), unit="")

# %% [markdown]
# From 256 on, bf16's numbers are 2 apart, and adding 1 changes nothing. Change the format to `torch.float16` and
# predict. A matrix product adds in fp32. On this CPU it rounds once. On a GPU it may split a long sum into parts and
# round these to 16 bits, too: the last line shows the switch, and `allow_fp16_reduced_precision_reduction` is the same
# for fp16 ([PyTorch's note on
# accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html#reduced-precision-reduction-for-fp16-and-bf16-gemms)).
#
# Gradients of many micro-batches are a long sum, too, so this recipe adds them in fp32. For one linear layer:

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
# In one place this differs from Kalamkar et al. Their weight gradients are never rounded: the product's fp32 sums go to
# the fp32 master weights. PyTorch rounds dL/dW to the format of W, and only then `+=` adds it in fp32. Autocast rounds
# it, too. Megatron Core's `gradient_accumulation_fusion` does not: its kernel adds the product to the fp32 gradients
# itself ([layers.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py)).
#
# ## What autocast keeps in fp32
# Most people write `with torch.autocast("cuda", dtype=torch.bfloat16):` instead. PyTorch then chooses each operation's
# format. Weights, gradients and states stay in fp32.
#
# **Your guess.** In GPT-2, 4 sequences of 256 tokens: how large are the activations at the end of forward, in percent
# of fp32's?

# %%
predict("03.autocast", unit="% of fp32's")

# %% [markdown]
# Matrix products and convolutions run in 16 bits: `linear`, `matmul`, `conv2d` and their relatives. What adds up many
# numbers or grows fast runs in fp32: norms, softmax, powers, most losses. Everything else takes the format of its
# inputs ([PyTorch's list](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference)).
#
# Which format does each layer return? Put a forward hook on half of a [transformer
# block](../docs/glossary.md#transformer-block). `with on_gpu():` runs plain PyTorch with `device="cuda"`: on your card,
# or on a simulated one that counts bytes and holds no values.

# %%
from torch import nn


class Mlp(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.gelu = nn.GELU()

    def forward(self, x):
        return x + self.down(self.gelu(self.up(self.norm(x))))


def tell(layer, inputs, output):
    print(f"{type(layer).__name__:10s} reads {inputs[0].dtype}, returns {output.dtype}")


# %%
from course_utils import on_gpu

with on_gpu():
    block = nn.Sequential(Mlp(1024), nn.Linear(1024, 1024), nn.Softmax(-1)).to("cuda")
    hooks = [layer.register_forward_hook(tell) for layer in block.modules()]
    x = torch.randn(64, 1024, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        block(x)
    for hook in hooks:
        hook.remove()

# %% [markdown]
# **Norms and softmax return fp32**, and forward keeps it. Their kernels add in fp32 anyway; autocast changes what is
# *stored*. The block's output, the [residual stream](../docs/glossary.md#residual-connection), is fp32: each addition
# takes the wider format. Autocast also keeps a 16-bit *copy* of every weight matrix:

# %%
tokens = 256  # change this
with on_gpu():
    x = torch.randn(tokens, 1024, device="cuda")
    for enabled in (False, True):
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            out = block(x)
        kept = torch.cuda.memory_allocated() - before
        print(f"autocast {enabled!s:5}: forward keeps {kept / 1e6:6.1f} MB for {tokens:,} tokens")
        del out
copies = sum(2 * weight.numel() for weight in block.parameters() if weight.dim() == 2)
print(f"2 bytes for each weight of a matrix: {copies / 1e6:.1f} MB")

# %% [markdown]
# With few tokens, autocast keeps *more* than fp32: the copies cost the same for any batch. Change 256 to 4096. Predict,
# then run.
#
# And the **loss**? PyTorch's documentation lists `cross_entropy` among what runs in fp32. Given
# [logits](../docs/glossary.md#logits) in bf16, what does it keep for backward?


# %%
def show(tensor):
    print(f"keeps {tensor.dtype}, {tuple(tensor.shape)}")
    return tensor


with on_gpu():
    logits = torch.randn(1024, 50_257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50_257, (1024,), device="cuda")
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(show, lambda kept: kept),
    ):
        loss = cross_entropy(logits, targets)
    del loss, logits

# %% [markdown]
# The [log-softmax](../docs/glossary.md#log-softmax) inside the loss runs in the logits' bf16. Then its result is copied
# to fp32. Both stay: 6 bytes per logit. Now `measure` runs a whole step of GPT-2 in four recipes.

# %%
from course_utils import TrainingRun, measure

base = TrainingRun("gpt2", micro_batch=4, seq_len=256, attention="eager")
recipes = ("fp32", "amp-bf16", "bf16-master", "bf16")
steps = {name: measure(base.replace(precision=name)) for name in recipes}
kept = {name: step.moments["end of forward"]["activations"] for name, step in steps.items()}
for name in recipes[:3]:
    print(
        f"{name:12s} {kept[name] / 1e6:6.1f} MB of activations, "
        f"{kept[name] / kept['fp32']:.0%} of fp32's"
    )
print(
    "weight copies under autocast: "
    f"{steps['amp-bf16'].moments['end of forward']['weight_copies'] / 1e6:.1f} MB"
)
reveal("03.autocast", 100 * kept["amp-bf16"] / kept["fp32"], unit="% of fp32's")

# %% [markdown]
# ## The sum for each recipe
# Now count the bytes that persist. Lesson 01 had [ZeRO](../docs/glossary.md#zero)'s 2 + 2 + 12 per parameter.
#
# **Your guess.** How many GB do weights, gradients and optimizer states of GPT-2 XL (1.56 billion parameters) take
# under *autocast*?

# %%
predict("03.xl", unit="GB")

# %% [markdown]
# First one matrix, with the masters of your own loop. Change `masters` to `False` ("bf16 alone"), then the format to
# `torch.float32`. Each time, predict the bytes per parameter.

# %%
dtype, masters = torch.bfloat16, True  # change this
with on_gpu():
    before = torch.cuda.memory_allocated()
    weight = torch.zeros(4096, 4096, device="cuda", dtype=dtype)
    weight.grad = torch.zeros_like(weight)
    master = weight.float().clone() if masters else weight
    adam = torch.optim.AdamW([master], lr=1e-4)
    master.grad = weight.grad.to(master.dtype)
    adam.step()
    if masters:
        master.grad = None
    N, held = weight.numel(), torch.cuda.memory_allocated() - before
    print(f"{held / N:.2f} bytes per parameter after the step")
    del weight, master, adam

# %% tags=["hide-input"]
from course_utils.figures import stack
from course_utils.lessons.precision.formats_in_a_step import (
    estimated_states,
    measured_states,
    per_parameter,
)

waits_for("03.xl")
N = base.model.parameters
print(f"{'bytes per parameter':22s} {'estimated':18s} {steps['fp32'].word}")
for name, step in steps.items():
    formula, found = estimated_states(base.replace(precision=name)), measured_states(step)
    gap = plus_minus(sum(formula.values()) - sum(found.values()))
    print(
        f"{name:22s} {per_parameter(formula, N):18s} {per_parameter(found, N):18s} gap {gap} bytes"
    )

# %%
xl = TrainingRun("gpt2-xl", attention="efficient")  # fp32 has no flash kernel
names = ("fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16", "fp8")
states = {name: estimated_states(xl.replace(precision=name)) for name in names}
reveal("03.xl", sum(states["amp-bf16"].values()))
title = "GPT-2 XL's states shrink only in recipes that give up fp32 copies"
stack(states, title, provenance="estimated from formulas")

# %% [markdown]
# fp32 and autocast take the same 16 bytes per parameter as ZeRO's recipe. Only bf16 alone and fp8 take less.
#
# **The gap** is 0 because the formula rounds each of these tensors to blocks, as the allocator does. A real card adds
# CUDA's context, cuBLAS's [workspaces](../docs/glossary.md#workspace), and what the allocator reserves beyond its
# tensors ([lesson 12](12_allocator_and_fragmentation.ipynb)).
#
# ### 16, 18, 20: who says what
# Before you compare two tools, ask which terms they include.

# %% tags=["hide-input"]
conventions = {
    "ZeRO, section 3.1": (2, 2, 4, 4, 4),
    "Megatron Core, fp32 everything": (4, 4, 0, 4, 4),
    "Megatron Core, 16-bit weights, fp32 gradients": (2, 4, 4, 4, 4),
    "Megatron Core, 16-bit weights and gradients": (2, 2 + 4, 4, 4, 4),
    "Ultra-Scale Playbook, with fp32 gradients": (2, 2 + 4, 4, 4, 4),
    "EleutherAI cookbook; llm-analysis": (2, 4, 4, 4, 4),
    "Transformer Engine: only products in fp8": (4, 4, 0, 4, 4),
    "DeepSeek-V3, without the fp8 copies": (0, 4, 4, 2, 2),
    "FP8-LM: fp8, 16-bit masters and second moment": (1, 1, 2, 1, 2),
}
print(f"{'':47s} weights + gradients + master + m + v")
for name, terms in conventions.items():
    print(f"{name:47s} {' + '.join(map(str, terms))} = {sum(terms)}")

# %% [markdown]
# Megatron Core's three conventions are in its guide, [Distributed
# Optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html). Its 20 has 16-bit
# gradients *and* an fp32 copy for the optimizer, like that of the [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook). ZeRO's count leaves that copy out. Lesson 02
# shows its effect: a step peaks at 22.
#
# ### fp8
# An fp8 format has so few values that each tensor needs its own *scale*. Store gradients of standard deviation 0.001 in
# E4M3: as they are, and scaled so that the largest becomes 448.

# %%
gradient = 0.001 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
scale = torch.finfo(torch.float8_e4m3fn).max / gradient.abs().max()
plain = gradient.to(torch.float8_e4m3fn).float()
fitted = (gradient * scale).to(torch.float8_e4m3fn).float() / scale
for name, stored in (("as they are", plain), ("scaled", fitted)):
    error = (stored - gradient).norm() / gradient.norm()
    print(f"{name:12s} error {error:.0%} of the gradients' norm")

# %% [markdown]
# One of this course's sources says that fp8 training keeps its optimizer states in 16 bits or more. Does it?
#
# - NVIDIA's Transformer Engine: only products are fp8 ([table of
#   MS-AMP](https://azure.github.io/MS-AMP/docs/user-tutorial/optimization-level), row "Nvidia TE").
# - DeepSeek-V3: moments are bf16, master weights and gradients fp32 ([DeepSeek-AI
#   2024](https://arxiv.org/abs/2412.19437), section 3.3.3).
# - FP8-LM: the *first* moment is fp8, second moment and master weights have 16 bits ([Peng et al.
#   2023](https://arxiv.org/abs/2310.18313), section 2.2). The second holds squares, which span twice as many powers of
#   two.
#
# FP8-LM disagrees, so "trained in fp8" says little about memory. PyTorch by itself trains nothing in fp8. The course
# estimates FP8-LM's states and does not simulate them.

# %% [markdown]
# ## What it saves
# On the states, mixed precision saves nothing. So where is the saving?
#
# **Your guess.** The same step of GPT-2 with bf16 weights and master weights: how large is its peak, in percent of
# fp32's?

# %%
predict("03.peak", unit="% of fp32's")

# %%
reveal("03.peak", 100 * steps["bf16-master"].peak / steps["fp32"].peak, unit="% of fp32's")
title = "With a small batch the states dominate, and autocast saves little"
stack(steps, title, provenance=str(steps["fp32"].provenance))

# %% [markdown]
# The saving is in the activations, which grow with the batch. The paper on mixed precision says in its abstract that
# memory nearly halves: there, activations were most of it (Micikevicius et al. 2018, section 3.1). The closed form
# shows larger batches. Change 64 to 1. Predict, then run.

# %%
from course_utils import estimate

large = base.replace(micro_batch=64)  # change this
single = estimate(large.replace(precision="fp32")).total
for name in ("amp-bf16", "bf16-master", "bf16"):
    total = estimate(large.replace(precision=name)).total
    print(f"{large.micro_batch} sequences, {name:12s} {total / single:.0%} of fp32's peak")

# %% [markdown]
# ### And time?
# For many, speed matters more. Matrix units multiply 16-bit numbers several times as fast, and only half the bytes
# move. **No simulation can show speed.** Only a GPU can:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("precision")

# %% [markdown]
# If this machine has a GPU, time it. It keeps working while Python goes ahead, so wait for it (`synchronize`) before
# you read the clock.

# %% tags=["nbval-ignore-output", "this-machine"]
import time

dtypes = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else ()
for dtype in dtypes:
    model, x = Mlp(4096).to("cuda"), torch.randn(4096, 4096, device="cuda")
    for step in range(23):
        if step == 3:  # the first three warm up
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
    torch.cuda.synchronize()
    print(f"{dtype}: {1000 * (time.perf_counter() - start) / 20:.1f} ms for forward and backward")
print(f"GPUs here: {torch.cuda.device_count()}")

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
