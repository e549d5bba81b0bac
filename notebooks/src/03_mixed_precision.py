# ---
# jupyter:
#   course:
#     minutes: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Mixed precision
#
# **60 minutes.** You should know what Adam keeps for each parameter ([lesson 02](02_adam.ipynb)) and what a training
# step allocates when ([lesson 01](01_where_did_the_memory_go.ipynb)). No GPU is needed: the trainings of this lesson
# are small and run on your processor, in the genuine 16-bit formats.
#
# Half the bits should be half the memory. You will find that it is not. You will see training break in 16 bits in three
# different ways, cure each, and then account for what every recipe of number formats really costs.

# %% [markdown]
# ## What 16 bits can hold
# A floating-point number has a sign, an *exponent*, which says how large, and a *mantissa*, which says how exactly.
# With 16 bits you have to choose: [fp16](../docs/glossary.md#fp16-and-bf16) spends them on precision, with 5 bits of
# exponent and 10 of mantissa, [bf16](../docs/glossary.md#fp16-and-bf16) on range, with 8 and 7. From 1 to 2 the
# exponent stays the same: only the mantissa counts up.
#
# **Your guess.** What is the next number after 1 in bf16? Say by how many thousandths it is larger.

# %%
from course_utils.interactive.guesses import predict, reveal

predict("03.next", unit="thousandths")

# %%
from course_utils.lessons.precision.number_formats import bits_figure, range_figure

bits_figure(0.1, "A tenth is in none of the formats, and further off the fewer mantissa bits there are")

# %% [markdown]
# A normal number is (−1)^sign · 2^(exponent − bias) · (1 + mantissa/2^m). So the step from 1 to the next number,
# [*epsilon*](../docs/glossary.md#epsilon), is 2^−m. Each line below is worked out from the two numbers of bits, then
# compared with what PyTorch says.

# %%
import torch

from course_utils.lessons.precision.number_formats import FORMATS

known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
         "fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}  # fmt: skip
for name, form in FORMATS.items():
    line = f"{name:9s} 1+{form.exponent}+{form.mantissa:<2d} bits in {form.bytes} bytes: epsilon {form.epsilon:.2g}, "
    line += f"largest {form.largest:.5g}, smallest {form.smallest:.2g}"
    if name in known:
        info = torch.finfo(known[name])
        line += f"; torch agrees: {(info.eps, info.max) == (form.epsilon, form.largest)}"
    print(line)

# %%
reveal("03.next", 1000 * FORMATS["bf16"].epsilon, unit="thousandths")

# %%
range_figure("The range of bf16 is that of fp32; fp16 ends at 65,504, and loses what is below 6e−8")

# %% [markdown]
# [tf32](../docs/glossary.md#tf32) is what an Ampere card's matrix units read of an fp32 number: bf16's range with
# fp16's precision. In memory it is fp32, all 4 bytes of it: it saves time and not one byte. The two
# [fp8](../docs/glossary.md#fp8) formats make the same choice once more: E4M3 for precision, E5M2 for range
# ([Micikevicius et al. 2022](https://arxiv.org/abs/2209.05433)).
#
# Now flip bits yourself. Make the largest finite number of fp16. Then the smallest above 0, which is a
# [subnormal number](../docs/glossary.md#subnormal-numbers). What do all exponent bits together do? Then type 65520 with
# fp16, and with bf16.

# %%
from course_utils.lessons.precision.widget import bit_flipper

bit_flipper("fp16", 0.1)

# %% [markdown]
# ## First failure: many small updates
# Training is many small additions. A weight is 1, and each of 1,000 steps adds 0.0001. On paper it arrives at 1.1, a
# change of 100 thousandths.
#
# **Your guess.** By how many thousandths has the weight changed if it is stored in bf16?

# %%
predict("03.moved", unit="thousandths")

# %%
from course_utils.lessons.precision.experiments import repeated_update, update_figure

weights = repeated_update(start=1.0, update=1e-4, steps=1000)
update_figure(weights, "In 16 bits alone the weight never moves; a master copy or random rounding lets it")

# %%
from course_utils.lessons.precision.number_formats import spacing

reveal("03.moved", 1000 * (weights["bf16"][-1] - 1), unit="thousandths")
for name in ("fp16", "bf16"):
    print(
        f"half the distance from 1 to the next number in {name}: {spacing(name, 1.0) / 2:.2g}; the update: {1e-4:.2g}"
    )
for name, values in weights.items():
    print(f"{name:18s} moved by {1000 * (values[-1] - 1):6.1f} thousandths")

# %% [markdown]
# It has not moved at all. The update is less than half the distance to the next number, so each sum is rounded back to
# where it was. Both 16-bit formats do this: fp16 for updates up to 2^−11 of the weight, bf16 for eight times as large
# ones.
#
# There are two cures. [*Master weights*](../docs/glossary.md#master-weights): add up in fp32, and round a copy for each
# forward pass. Or [*stochastic rounding*](../docs/glossary.md#stochastic-rounding): round up or down at random, so that
# it is right on average. It needs no copy, and it is three lines of bits: bf16 is the upper half of an fp32, so add
# noise to the lower half and cut it off.

# %%
from course_utils.lessons.precision.experiments import round_stochastically

dice = torch.Generator().manual_seed(0)
between = torch.full((100_000,), 1.001)  # bf16 has 1 and 1.0078125, nothing between
landed = round_stochastically(between, dice).float()
print("numbers that it lands on:", sorted(set(landed.tolist())))
print(f"mean {landed.mean():.3f}, while rounding to nearest always gives {between.bfloat16()[0].item():.3f}")

# %% [markdown]
# ### How many weights is that?
# Adam's updates are about as large as its learning rate, and smaller where gradients are noisy ([lesson
# 02](02_adam.ipynb)). Here is a small language model with GPT-2's initial weights, of standard deviation 0.02. How many
# of them stay where they are when something as large as the learning rate is added?

# %%
from course_utils.lessons.precision.experiments import unmoved_share

for rate in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5):
    in_fp16, in_bf16 = (unmoved_share(rate, dtype) for dtype in (torch.float16, torch.bfloat16))
    print(f"learning rate {rate:.0e}: {in_fp16:4.0%} of the weights do not move in fp16, {in_bf16:4.0%} in bf16")

# %% [markdown]
# So pure bf16 is no problem while the learning rate is high, and freezes most of the network as it decays. A short
# trial will not show you that; further down you train to the end.

# %% [markdown]
# ## Second failure: the gradient that underflows
# Gradients are small, and fp16 ends at 2^−24. Below half of that, everything becomes 0. We take a small model of
# characters in mid-training. Its gradients would survive in fp16. But a large training divides its loss by the number
# of [micro-batches](../docs/glossary.md#micro-batch-and-global-batch), and so each gradient, too. **To provoke what
# happens there, we divide the loss by 4,096**, as one of so many micro-batches would.
#
# **Your guess.** How many percent of the gradients does fp16 turn into 0? The cell tells you how large they are before
# the division by 4,096, which is 2^12.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.experiments import PARTS, gradients_of

undivided = gradients_of(steps=50)
print(f"undivided, half of the gradients are larger than 2^{undivided.abs().median().log2():.0f}")
predict("03.lost", unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.figures import histogram_figure, lost_share

gradients = undivided / PARTS
histogram_figure(gradients, "Red is lost: fp16 turns these gradients into 0, and keeps few digits of the pale ones")

# %% tags=["nbval-ignore-output"]
reveal("03.lost", 100 * lost_share(gradients), unit="%")

# %% [markdown]
# fp16 has room, but at the other end, where no gradient is. So move the histogram. Multiply the *loss* by a number, and
# by the chain rule each gradient is multiplied by it; divide before the optimizer sees them. This is [*loss
# scaling*](../docs/glossary.md#loss-scaling) ([Micikevicius et al. 2018](https://arxiv.org/abs/1710.03740), section
# 3.2), and *static* as long as the number never changes. A power of two changes the exponent alone, so nothing is
# rounded.

# %% tags=["nbval-ignore-output"]
histogram_figure(gradients, "The same gradients times 2^16: moved into fp16's range", scale=2**16)

# %%
print(f"more than a tenth is lost without scaling:   {lost_share(gradients) > 0.1}")
print(f"less than a hundredth is lost with scale 2^16: {lost_share(gradients, 2**16) < 0.01}")

# %% [markdown]
# ## Third failure: overflow
# fp16's other end is near. The team of BLOOM explains it like this: 250·250 = 62,500 is fine, but 255·255 = 65,025 is
# an overflow ([The Technology Behind BLOOM Training](https://huggingface.co/blog/bloom-megatron-deepspeed)).
#
# **Your guess.** What is the smallest whole number whose square overflows in fp16?

# %%
predict("03.square", unit="")

# %%
for number in (250, 255, 256, 300):
    half, brain = torch.tensor(number).half(), torch.tensor(number).bfloat16()
    print(f"{number}² = {number**2:,}: {(half * half).item():,} in fp16, {(brain * brain).item():,} in bf16")
first = next(n for n in range(1, 1000) if torch.tensor(float(n)).half().square().isinf())
reveal("03.square", first, unit="")

# %% [markdown]
# The example is off by one, the point is not. Now a row of 4,096 activations, each 5 or −5. Which operations on that
# row overflow in fp16? And which on a row of ±300?

# %%
from torch.nn.functional import layer_norm, rms_norm

ways = {
    "x.square().sum()": lambda x: x.square().sum(),
    "x @ x": lambda x: x @ x,
    "x.pow(2).mean()": lambda x: x.pow(2).mean(),
    "x.norm()": lambda x: x.norm(),
    "rms_norm(x)": lambda x: rms_norm(x, x.shape),
    "layer_norm(x)": lambda x: layer_norm(x, x.shape),
}
signs = torch.tensor([1.0, -1.0]).repeat(2048).half()
print(f"the squares of ±5 add up to {4096 * 5**2:,}; one square of ±300 is {300**2:,}")
for name, way in ways.items():
    at_5, at_300 = (way(size * signs).abs().max().item() for size in (5, 300))
    print(f"{name:17s} of ±5: {at_5:7,.0f}, of ±300: {at_300:7,.0f}")

# %% [markdown]
# At 5 only the sum itself fails, written in two ways. The reason is not how PyTorch adds. Its kernels add up fp16
# numbers in fp32, on CPU and GPU
# ([AccumulateType.h](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/AccumulateType.h)), and round once, at
# the end. But 102,400 cannot be *stored* in fp16. The mean of the squares and the norm can.
#
# At 300 the mean of squares fails too: `pow(2)` stores each square on the way, and 90,000 is too large. The norm and
# both normalizations survive. Each is one kernel, which keeps the squares to itself, in fp32. So a norm written by hand
# has to upcast first, as Llama's does in [Transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py).
#
# The rule: whatever an operation *stores* in fp16 must stay below 65,504.
#
# A scale that is too large makes gradients overflow as well. What is the right one? It changes as training goes on, so
# let it look for itself: when a gradient is infinite, skip the step and halve the scale; after a number of steps
# without, double it. That is all of *dynamic* loss scaling, and it is what PyTorch's `GradScaler` does. The same rule,
# written out in `DynamicLossScale.update`, beside PyTorch's:

# %%
from inspect import getsource

from course_utils.lessons.precision.experiments import DynamicLossScale, gradscaler_scales

print(getsource(DynamicLossScale.update))
overflows = [step in (1, 5, 6, 40) for step in range(100)]
scale, ours = DynamicLossScale(scale=2.0**16, interval=10), []
for overflowed in overflows:
    scale.update(overflowed)
    ours.append(scale.scale)
print("the same scale as GradScaler after each of 100 steps:", ours == gradscaler_scales(overflows, 2.0**16, 10))

# %% [markdown]
# Now a real training in fp16. GradScaler waits 2,000 steps before it doubles; we have 100, so ours waits 10.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.shared.language_model import train_language_model
from course_utils.lessons.precision.experiments import scale_figure

scale = DynamicLossScale(interval=10)
scaled = train_language_model("adamw", "fp16-master", steps=100, loss_scale=scale)
scale_figure(scale.history, f"The scale climbs until a gradient overflows: {scaled.skipped} of 100 steps were skipped")

# %%
print("some steps were skipped:", scaled.skipped > 0)
print("and it learned:", scaled.final < scaled.losses[0] - 1)

# %% [markdown]
# ## Five trainings
# Now all together: the same model, the same batches, five recipes, each with its loss over 4,096 as before. "fp16" and
# the last "bf16" have 16-bit weights and gradients, fp32 master weights and fp32 moments; "bf16 alone" has nothing in
# fp32, not even Adam's moments. Nothing is emulated: the CPU has fp16 and bf16 kernels, only slow ones.
#
# **Your guess.** How many of the five end where fp32 ends, fp32 itself among them?

# %%
predict("03.trained", unit="of five")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.experiments import five_trainings, loss_figure

trainings = five_trainings(steps=100)
loss_figure(trainings, "Without scaling fp16 stays behind; scaled, or in bf16, 16 bits learn like 32")

# %%
from course_utils.lessons.precision.experiments import learns_as_well

as_well = {name: learns_as_well(training, trainings["fp32"]) for name, training in trainings.items()}
for name, answer in as_well.items():
    print(f"{name:18s} ends where fp32 ends: {answer}")
reveal("03.trained", sum(as_well.values()), unit="of five")

# %% [markdown]
# fp16 without scaling fails worse than the histogram promised: the gradients on their way through the layers underflow
# as well, and what is lost there is missing in everything below. (A training counts as equal within 0.15 nats: other
# batches change it as much.) bf16 needs no scaling: its exponent is fp32's. Why keep the master weights, if bf16 alone
# learns as well? Look again at the unmoved weights: this training has a high learning rate, as at a beginning.
#
# ### The end of a training
# At the end the rate has decayed. Take the model after 200 steps in fp32, and go on for 100 steps at a rate of 0.00001:
# in fp32, in bf16 alone, and in bf16 with master weights. **Your guess.** How many percent of the weights have not
# moved at all after 100 steps in bf16 alone?

# %%
predict("03.late", unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.experiments import late_training

late = {name: late_training(name, rate=1e-5) for name in ("fp32", "bf16", "bf16-master")}
for name, end in late.items():
    print(f"{name:12s} {end.unmoved:4.0%} of the weights unmoved, {1000 * end.gain:5.1f} thousandths of a nat gained")
reveal("03.late", round(100 * late["bf16"].unmoved), unit="%")

# %%
print("bf16 alone gains less than a third of what fp32 gains:", late["bf16"].gain < late["fp32"].gain / 3)
print("with master weights more than nine tenths:", late["bf16-master"].gain > 0.9 * late["fp32"].gain)

# %% [markdown]
# **The gap.** Nine in ten weights never move, and most of the progress of these steps is lost: without an error, and
# with a loss curve that looks as if the training were finished. With master weights the bf16 copies may stand still for
# a while as well, but the masters move on and take them along.
#
# And fp16 alone?

# %%
everything_in_fp16 = train_language_model("adamw", "fp16", steps=20)
print("the loss is still a number:", everything_in_fp16.losses[-1] == everything_in_fp16.losses[-1])
print("Adam's epsilon of 1e-8, in fp16:", torch.tensor(1e-8).half().item())

# %% [markdown]
# Adam divides by √v + ε. In fp16, the square of a small gradient is 0, and so is ε: 0/0.
#
# ### Why large models diverged in fp16
# With master weights and loss scaling, fp16 trained good models for years. Then came large ones. The BLOOM team spent
# *several months* on a model of 104 billion parameters in fp16 whose loss kept diverging, and calls it a complete
# failure; the teams who had trained the 530 billion of [MT-NLG](https://arxiv.org/abs/2201.11990) gave them the same
# advice, to use bf16, and [OPT-175B](https://arxiv.org/abs/2205.01068) reported the same trouble ([The Technology
# Behind BLOOM Training](https://huggingface.co/blog/bloom-megatron-deepspeed)). OPT's paper (section 2.5) names three
# signs that came together: the loss runs away, the dynamic loss scale falls to 0, the last layer's activations grow.
# Loss scaling protects *gradients*. Nothing protects the *activations* of forward from 65,504, and in larger models
# they grow.
#
# BLOOM's 176 billion parameters were then trained in bf16. It takes a card that has it, and of NVIDIA's those are
# Ampere (2020) and newer:

# %%
from course_utils import GPUS

for card in GPUS.values():
    print(f"{card.name:14s} {'has bf16' if card.has_bf16 else 'has no bf16: its 16 bits are fp16, with loss scaling'}")

# %% [markdown]
# ## Where each format flows
# The recipe that has won, with bf16 weights, fp32 gradients and fp32 masters:

# %%
from course_utils.lessons.precision.figures import flow_figure

flow_figure("Each product is added up in fp32, then rounded to bf16 once: y, dL/dW, dL/dx")

# %% [markdown]
# "Multiply in bf16, add in fp32": does the addition matter? **Your guess.** Add up 4,096 ones, one after the other, in
# bf16. What comes out?

# %%
predict("03.ones", unit="")

# %%
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(4096):
    total += 1
ones = torch.ones(1, 4096, dtype=torch.bfloat16)
reveal("03.ones", total.item(), unit="")
print("a matrix product of the same bf16 ones:", (ones @ ones.T).item())

# %% [markdown]
# From 256 on, bf16's numbers are 2 apart, and adding 1 changes nothing. A matrix product adds in fp32 and rounds once.
# Gradients of many micro-batches are such a sum too, which is why this recipe adds them up in fp32. Each dL/dW is still
# rounded to bf16 once, before it is added. Megatron Core's `gradient_accumulation_fusion` skips that rounding: its
# kernel adds the product to the fp32 gradients itself
# ([layers.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py)).
#
# The picture as code, for one linear layer:

# %%
master = torch.nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
adam = torch.optim.AdamW([master])
W = master.detach().bfloat16()
master.grad = torch.zeros_like(master)
x = torch.randn(16, 32).bfloat16()
y = x @ W.T  # bf16 · bf16, added in fp32, rounded to bf16
dy = torch.randn_like(y)  # what the layer above would send back
dx = dy @ W  # added in fp32, rounded to bf16: dL/dy of the layer below
dW = dy.T @ x  # added in fp32 over the tokens, rounded to bf16
master.grad += dW  # once per micro-batch: this sum is fp32
adam.step()
W = master.detach().bfloat16()
tensors = {"W": W, "y": y, "dL/dy": dy, "dL/dx": dx, "dL/dW": dW, "gradients": master.grad,
           "m": adam.state[master]["exp_avg"], "master": master}  # fmt: skip
print({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})

# %% [markdown]
# That is a toy. Does a whole step of GPT-2 do it? Measure one in each recipe, and ask the tensors that are there.

# %%
from course_utils import TrainingRun, measure
from course_utils.lessons.precision.formats_in_a_step import state_formats

base = TrainingRun("gpt2", micro_batch=4, seq_len=256, attention="eager")
recipes = ("fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16")
steps = {name: measure(base.replace(precision=name)) for name in recipes}
for name, step in steps.items():
    print(f"{name:21s}", ", ".join(f"{kind.replace('_', ' ')} {form}" for kind, form in state_formats(step).items()))
print(steps["fp32"].provenance)

# %% [markdown]
# ## What autocast keeps in fp32
# Most people write none of this. They write `with torch.autocast("cuda", dtype=torch.bfloat16):` and PyTorch chooses a
# format for each operation. [Autocast](../docs/glossary.md#autocast) leaves weights, gradients and states in fp32.
#
# **Your guess.** What is left of fp32's activation memory, in percent, when forward is over?

# %%
predict("03.autocast", unit="% of fp32's")

# %%
after_forward = {name: step.moments["end of forward"]["activations"] for name, step in steps.items()}
reveal("03.autocast", 100 * after_forward["amp-bf16"] / after_forward["fp32"], unit="% of fp32's")
for name in ("fp32", "amp-bf16", "bf16-master"):
    share = after_forward[name] / after_forward["fp32"]
    print(f"{name:12s} {after_forward[name] / 1e6:6.1f} MB of activations, {share:.0%}")

# %%
from course_utils.lessons.precision.formats_in_a_step import activation_formats
from course_utils.figures import bars

bars(
    activation_formats(steps["amp-bf16"]),
    "Much of what forward keeps under autocast is not 16-bit",
    unit="MB",
    kind="activations",
    provenance=str(steps["amp-bf16"].provenance),
)

# %% [markdown]
# Which operations are they? The list, from the step that ran, beside the same step in pure 16-bit:

# %%
from course_utils.lessons.precision.formats_in_a_step import operation_formats

pure = operation_formats(steps["bf16-master"])
for operation, formats in operation_formats(steps["amp-bf16"]).items():
    print(f"{operation:28s} {formats:11s} {'(bf16 without autocast)' if pure.get(operation) == 'bf16' else ''}")

# %% [markdown]
# Three things to see. **Norms and softmax run in fp32**, and what they keep is fp32. Their kernels add in fp32 anyway;
# autocast changes what is *stored*. **The [residual stream](../docs/glossary.md#residual-connection) is fp32 as well**,
# because it starts from the fp32 embedding and each `add` takes the wider format; with 16-bit weights it is bf16. And
# the **loss**: PyTorch's documentation lists `cross_entropy` among what runs in fp32, but the
# [log-softmax](../docs/glossary.md#log-softmax) inside it runs in the [logits](../docs/glossary.md#logits)' bf16, and
# only then is copied to fp32. Both stay.
#
# There is one more cost: the 16-bit *copies* of every weight matrix, kept from forward to backward.

# %%
copies = steps["amp-bf16"].moments["end of forward"]["weight_copies"]
kept = {name: steps[name].moments["after loss"]["activations"] for name in ("fp32", "amp-bf16")}
print(f"kept when the loss is there, fp32:                {kept['fp32'] / 1e6:7.1f} MB")
print(f"kept when the loss is there, autocast and copies: {(kept['amp-bf16'] + copies) / 1e6:7.1f} MB")
print(f"of these, copies of the weights:                  {copies / 1e6:7.1f} MB")

# %% [markdown]
# With this small batch, autocast keeps *more* than fp32. The copies cost 2 bytes a matrix weight, whatever the batch
# is; what it saves grows with the batch. From lesson 01 you know where it ends up for GPT-2 XL.

# %% [markdown]
# ## The sum for each recipe
# Now the bytes that stay. Lesson 01 had [ZeRO](../docs/glossary.md#zero)'s 2 + 2 + 12.
#
# **Your guess.** How many GB are weights, gradients and optimizer states of GPT-2 XL (1.56 billion parameters) under
# *autocast*?

# %%
predict("03.xl", unit="GB")

# %%
from course_utils.lessons.precision.formats_in_a_step import estimated_states, measured_states, per_parameter

N = base.model.parameters
print(f"{'bytes per parameter':22s} {'estimated':18s} {steps['fp32'].word}")
for name, step in steps.items():
    formula, found = estimated_states(base.replace(precision=name)), measured_states(step)
    difference = sum(formula.values()) - sum(found.values())
    print(f"{name:22s} {per_parameter(formula, N):18s} {per_parameter(found, N):18s} gap {difference:+,} bytes")

# %%
from course_utils.figures import stack

xl = TrainingRun("gpt2-xl", attention="efficient")  # fp32 has no flash kernel
states = {name: estimated_states(xl.replace(precision=name)) for name in [*recipes, "fp8"]}
reveal("03.xl", sum(states["amp-bf16"].values()))
title = "GPT-2 XL: mixed precision saves nothing on the states until something is left out"
stack(states, title, provenance="estimated from formulas")

# %% [markdown]
# fp32 is 4 + 4 + 8. Autocast is the same 4 + 4 + 8. ZeRO's 2 + 2 + 12 is another recipe with the same sum. (And the 1.5
# billion parameters of the literature make 24 GB; the exact number makes what you see.) fp32 gradients beside bf16
# weights make 18. Only recipes that give up a copy come out lower: bf16 alone at 8, and fp8.
#
# ### 16, 18, 20: who says what
# Every convention is a sum of the same few terms. Before you compare two tools, ask which terms they have.

# %%
from course_utils import format_bytes

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
    size = format_bytes(sum(terms) * xl.model.parameters, "GB", 1)
    print(f"{name:47s} {' + '.join(map(str, terms))} = {sum(terms)}: {size} for GPT-2 XL")

# %% [markdown]
# Megatron Core's three are in its guide, [Distributed
# Optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html). Its 20 has 16-bit
# gradients *and* an fp32 copy of them for the optimizer; the [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) arrives at 20 the same way. The BLOOM team
# planned with 18 ([its
# notes](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md)), and
# then added up gradients in fp32. Is the fp32 copy of the gradients kept all through the step, or only made in the
# optimizer phase? In ZeRO's count it is nowhere, and lesson 02 shows what a step makes of that: 22 at its peak.
#
# ### fp8
# An fp8 number has so few values that a tensor needs a *scale* of its own to use them. Watch what E4M3 makes of
# gradients of deviation 0.001, as they are and scaled so that the largest becomes 448:

# %%
gradient = 0.001 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
scale = FORMATS["fp8-e4m3"].largest / gradient.abs().max()
plain = gradient.to(torch.float8_e4m3fn).float()
fitted = (gradient * scale).to(torch.float8_e4m3fn).float() / scale
for name, stored in (("as they are", plain), ("scaled", fitted)):
    print(f"{name:12s} error {(stored - gradient).norm() / gradient.norm():.0%} of the gradients' norm")

# %% [markdown]
# One of the texts that this course grew from says that fp8 training keeps its optimizer states in 16 bits or more. Does
# it? Three recipes answer. With NVIDIA's Transformer Engine only products are fp8: weights, gradients and both moments
# are fp32 (the [table of MS-AMP](https://azure.github.io/MS-AMP/docs/user-tutorial/optimization-level), its row "Nvidia
# TE"). DeepSeek-V3 keeps both moments in bf16, master weights and gradients in fp32 ([DeepSeek-AI
# 2024](https://arxiv.org/abs/2412.19437), section 3.3.3). These two agree with the text. FP8-LM does not: its *first*
# moment is fp8 ([Peng et al. 2023](https://arxiv.org/abs/2310.18313), section 2.2). The second moment and the master
# weights have 16 bits. That is 7 bytes per parameter, of which the paper counts 6, leaving out the fp8 weights.
#
# Why the first moment and not the second? The second is made of squares, and squares span twice as many powers of two.
# Take the small model's gradients from above, with one scale for all of them:

# %% tags=["nbval-ignore-output"]
for name, values in (("gradients", undivided), ("their squares", undivided**2)):
    scaled = values * (FORMATS["fp8-e4m3"].largest / values.abs().max())
    lost = (scaled.to(torch.float8_e4m3fn).float() == 0).float().mean()
    print(f"{name:14s} {lost:.1%} become 0 in E4M3")

# %% [markdown]
# A second moment of 0 is a division by ε alone. So "trained in fp8" tells you little about memory. PyTorch by itself
# trains nothing in fp8; the course accounts for FP8-LM's states and does not simulate them.

# %% [markdown]
# ## What it saves
# The states: nothing. So where is the saving? **Your guess.** The whole step of GPT-2, 4 sequences of 256 tokens: its
# peak with bf16 weights and master weights, in percent of fp32's?

# %%
predict("03.peak", unit="% of fp32's")

# %%
shown = {name: steps[name] for name in ("fp32", "amp-bf16", "bf16-master", "bf16")}
title = "With a small batch the states decide, and autocast saves little"
stack(shown, title, provenance=str(steps["fp32"].provenance))

# %%
reveal("03.peak", 100 * steps["bf16-master"].peak / steps["fp32"].peak, unit="% of fp32's")

# %% [markdown]
# The saving is in the activations, and they grow with the batch. The closed form says how the ratio of peaks goes:

# %%
from course_utils import estimate
from course_utils.figures import lines

sizes = (1, 2, 4, 8, 16, 32, 64)
curves = {}
for name in ("amp-bf16", "bf16-master", "bf16"):
    pairs = [base.replace(precision=which, micro_batch=b) for b in sizes for which in (name, "fp32")]
    totals = [estimate(run).total for run in pairs]
    curves[name] = (sizes, [100 * ours / theirs for ours, theirs in zip(totals[::2], totals[1::2], strict=True)])
title = "The larger the batch, the more mixed precision saves; bf16 alone always takes about half"
lines(curves, title, "micro-batch (sequences of 256 tokens)", "peak, % of fp32's", log_x=True,
      provenance="estimated from formulas")  # fmt: skip

# %% [markdown]
# ### And time?
# Speed is the other half of the reason, and for many the larger one: matrix units multiply 16-bit numbers several times
# as fast, and half the bytes have to be moved. That is a matter of hardware alone, and **no simulation can tell it**.
# What is recorded of real GPUs comes first. If this machine has one, the cell after it measures yours.

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("precision")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.precision.formats_in_a_step import step_times, tell_times

timed = TrainingRun("gpt2", micro_batch=4, seq_len=1024, attention="efficient")
ways = ("fp32", "tf32", "amp-bf16", "bf16-master")
print(tell_times(step_times({name: timed.replace(precision=name) for name in ways})))

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | mixed precision nearly halves memory (its paper) | where activations dominate; the states stay at 16 bytes |
# | 255·255 overflows in fp16 (BLOOM's text) | 65,025 is below 65,504; 256·256 is the first |
# | fp8 training keeps its optimizer states in 16 bits or more | two recipes do; FP8-LM's first moment has 8 |
# | autocast runs cross-entropy in fp32 (PyTorch's list) | its log-softmax is bf16, its fp32 copy is kept besides |
#
# The first claim is in the abstract of [Micikevicius et al. 2018](https://arxiv.org/abs/1710.03740). Section 3.1 of the
# paper gives its condition: in the models of its time, activations were most of the memory.
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(3)

# %% [markdown]
# ## Take home
# **Remember** Products may be 16-bit, sums may not: updates, gradients over micro-batches, norms and matrix products
# are added up in fp32.
#
# **Breaks when** you take a short trial in pure bf16 for proof: at the learning rates of the end, most weights stop
# moving.
#
# **Cheat-sheet line** epsilon: bf16 2^−7, fp16 2^−10 · fp16 from 6e−8 to 65,504, so scale the loss · bytes a parameter:
# fp32 and autocast 4+4+8, masters 2+2+12, fp32 gradients 2+4+12, bf16 alone 2+2+4.
#
# Now solve the [exercises of this lesson](../exercises/03_mixed_precision.ipynb).
