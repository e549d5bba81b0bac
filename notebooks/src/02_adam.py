# ---
# jupyter:
#   course:
#     minutes: 55
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Adam
#
# **55 minutes.** You should know what a gradient is, and [lesson 01](01_where_did_the_memory_go.ipynb): what lives when
# in a training step. No GPU is needed: where a measurement is simulated, it says so.
#
# The optimizer is two lines in most training scripts, and more memory than the model. You will find out what Adam
# remembers and why, write it by hand until it equals PyTorch's, see when its
# [states](../docs/glossary.md#optimizer-states) appear, and account for every byte of it: those that stay and those
# that come and go.

# %% [markdown]
# ## A narrow valley
# [Gradient descent](../docs/glossary.md#gradient-descent) is one line: θ ← θ − η·∇L, the parameters θ go against the
# gradient by a learning rate η. It keeps nothing. So why does nobody train transformers with it?
#
# Because a loss has directions of very different steepness. Here is the smallest example: two parameters, curvature 1
# along the valley and 25 across, L = ½·(x² + 25·y²). One η has to serve both.
#
# **Your guess.** You may choose the best η there is. How many steps until the distance from the minimum has shrunk to 1
# %?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("02.valley", unit="steps")

# %% [markdown]
# ### Estimate
# Along a direction of curvature c, a step multiplies the distance by 1 − η·c. For η above 2/25 the steep direction
# grows instead of shrinking. The best η makes both factors equally large: 1 − η = −(1 − 25·η).

# %%
from math import ceil, log

flat, steep = 1, 25
limit, best = 2 / steep, 2 / (flat + steep)
factor = 1 - best * flat
print(
    f"largest η that does not diverge: {limit:.4f}, best η: {best:.4f}, each step leaves {factor:.1%} of the distance"
)
estimated = ceil(log(0.01) / log(factor))
print(f"steps to 1 %: {estimated}")

# %% [markdown]
# ### Measure
# Now walk, with four step sizes.

# %%
from course_utils.lessons.adam.by_hand import steps_needed, trajectory
from course_utils.lessons.adam.figures import walks

paths = {f"η = {rate:.4f}": trajectory("gradient descent", rate, 500) for rate in (0.01, 0.04, best, 0.082)}
walks(paths, "One step size for two directions: too short along the valley, or too long across it")

# %%
measured = steps_needed(paths[f"η = {best:.4f}"])
reveal("02.valley", measured, unit="steps")
print(f"estimated minus counted: {estimated - measured} steps")

# %% [markdown]
# **The gap** is nothing. The number of steps grows with the *ratio* of the curvatures, and in a network that ratio is
# not 25 but many powers of ten ([Sagun et al. 2016](https://arxiv.org/abs/1611.07476)). Three ideas help, and each
# costs memory.

# %% [markdown]
# ## Momentum, RMSProp, Adam
# [**Momentum**](../docs/glossary.md#momentum) adds up gradients: what points now left, now right cancels; what always
# points the same way grows (Polyak 1964). It remembers one number a parameter, *m*.
#
# [**RMSProp**](../docs/glossary.md#rmsprop) divides each parameter's gradient by the root of the running mean of its
# square, *v*: the steep direction is slowed down, the flat one speeded up (Tieleman and Hinton 2012). One number, too.
#
# [**Adam**](../docs/glossary.md#adam-adamw) does both ([Kingma and Ba 2015](https://arxiv.org/abs/1412.6980)): two
# numbers. Here are all four, as the course runs them for one parameter.

# %%
from inspect import getsource

from course_utils.lessons.adam.by_hand import RULES

for rule in RULES.values():
    print(getsource(rule))

# %% [markdown]
# **Your guess.** Gradient descent at its best needed the steps above. How many does Adam need, at η = 0.5?

# %%
predict("02.adam_steps", unit="steps")

# %%
four = {
    "gradient descent": trajectory("gradient descent", best, 300),
    "momentum": trajectory("momentum", 0.06, 300, beta1=0.6),
    "RMSProp": trajectory("RMSProp", 0.1, 300, beta2=0.9),
    "Adam": trajectory("Adam", 0.5, 300),
}
walks(four, "Momentum is the quickest here, and Adam no quicker than tuned gradient descent")

# %%
reveal("02.adam_steps", steps_needed(four["Adam"]), unit="steps")

# %% [markdown]
# So Adam does not win? Not here: this valley has two directions, and we chose the best η for gradient descent *knowing*
# its curvature. What Adam buys is that you need not know it. Make the whole loss a thousand times larger, and change
# nothing else. Gradients grow a thousandfold. What happens to each walk?

# %%
from course_utils.lessons.adam.by_hand import Knobs, Memory

for name, rate in {"gradient descent": best, "momentum": 0.06, "RMSProp": 0.1, "Adam": 0.5}.items():
    knobs = Knobs(rate)
    once = RULES[name](1.0, Memory(), 1, knobs)
    louder = RULES[name](1000.0, Memory(), 1, knobs)
    print(f"{name:17s} the first update is {louder / once:7,.1f} times as long")

# %% [markdown]
# Adam divides by the size of the gradients, so the size cancels: η is the length of a step, not a factor of the
# gradient. In a network whose layers have gradients of very different sizes, each gets steps of the same length. That
# is what *v* is for.
#
# One of the texts that this course grew from says that parameters with larger gradients get *smaller updates*. Do they?
# Take gradients around 1, steady or noisy, then the same ones a thousand times smaller and larger.

# %%
from random import Random

from course_utils.lessons.adam.by_hand import mean_update

for noise in (0, 1, 10):
    dice = Random(0)
    gradients = [1 + noise * dice.gauss(0, 1) for _ in range(2000)]
    lengths = [mean_update("Adam", [scale * g for g in gradients]) for scale in (0.001, 1, 1000)]
    shown = ", ".join(f"{length:.2f}" for length in lengths)
    print(f"noise {noise:2d} times the mean: mean update at gradients of 0.001, 1 and 1,000: {shown} learning rates")

# %% [markdown]
# They do not. The update is as long for gradients of 0.001 as for gradients of 1,000. What shortens it is *noise*:
# opposite signs cancel in m, and their squares add up in v. Something else does fall as gradients grow: η/√v̂, the
# learning rate *per unit of gradient*. Multiply it by the gradient, and the size is gone again.
#
# *v* has one number for each parameter, so it sees steepness along the axes only. Further down, under *Turn the knobs*,
# you can turn the valley and see what comes of that.

# %% [markdown]
# ## Why bias correction?
# Both running means begin at zero, and [bias correction](../docs/glossary.md#bias-correction) makes up for it. After
# one step m = (1 − β1)·g, a tenth of the gradient, and v = (1 − β2)·g², a thousandth of its square. After t steps m is
# a sum of gradients with the weights (1 − β1)·β1ⁱ, the youngest with i = 0. A mean wants weights that add up to 1;
# these add up to (1 − β1)·(1 + β1 + … + β1ᵗ⁻¹) = 1 − β1ᵗ. So Adam divides m by just that, and v by 1 − β2ᵗ.
#
# With the correction, equal gradients make every update one learning rate long.
#
# **Your guess.** Leave the correction out. One of the updates is further from that length than all others. How long is
# it?

# %%
predict("02.bias", unit="learning rates")

# %%
from course_utils.lessons.adam.by_hand import first_updates
from course_utils.figures import lines

ages = range(1, 3001)
raw, corrected = first_updates(3000, corrected=False), first_updates(3000)
lines(
    {"without": (ages, raw), "with": (ages, corrected)},
    "Without bias correction the first updates are several times too long",
    "step", "length of the update, in learning rates", log_x=True, markers=False,
)  # fmt: skip

# %%
reveal("02.bias", max(raw, key=lambda length: abs(length - 1)), unit="learning rates")
print(f"step 1 by hand: (1 − β1) / √(1 − β2) = {0.1 / 0.001**0.5:.2f}; in the figure: {raw[0]:.2f}")
print(f"the longest is step {raw.index(max(raw)) + 1}; still {raw[999]:.2f} at step 1,000")

# %% [markdown]
# One might expect *shorter* steps from a mean that begins at zero. But *v* begins even nearer to zero than *m*, and
# stands in the denominator. It takes thousands of steps to wear off.
#
# ### All of it as equations
# For each parameter θ, with g its gradient in step t, and m and v zero before the first:
#
# | what | equation | what decides it |
# |---|---|---|
# | direction | mₜ = β1·mₜ₋₁ + (1 − β1)·gₜ | β1: m is a mean over about 1/(1 − β1) gradients |
# | size | vₜ = β2·vₜ₋₁ + (1 − β2)·gₜ² | β2: v is a mean over about 1/(1 − β2) squares |
# | bias correction | m̂ₜ = mₜ/(1 − β1ᵗ) and v̂ₜ = vₜ/(1 − β2ᵗ) | the step t; it wears off as βᵗ goes to 0 |
# | update | θₜ = θₜ₋₁ − η·m̂ₜ/(√v̂ₜ + ε) | η: the length of a step; ε: the size below which a gradient counts as none |
#
# The defaults are β1 = 0.9, β2 = 0.999 and ε = 10⁻⁸. A larger β1 averages away more noise, and turns more slowly. A
# larger β2 makes the size steadier, and slower to notice a jump. So GPT-3 took β2 = 0.95 ([Brown et al.
# 2020](https://arxiv.org/abs/2005.14165), appendix B), as did Llama 2, with ε = 10⁻⁵ ([Touvron et al.
# 2023](https://arxiv.org/abs/2307.09288), section 2.2). And ε? Watch it take over:

# %%
for g in (1e-4, 1e-7, 1e-8, 1e-9, 1e-11):
    length = RULES["Adam"](g, Memory(), 1, Knobs(rate=1))
    print(f"gradient {g:.0e}: an update of {length:.3f} learning rates")

# %% [markdown]
# Far above ε, the gradient's size cancels. Far below, the update is η·m̂/ε: gradient descent again, and almost no step.

# %% [markdown]
# ## Adam by hand
# On tensors it is six lines. (AdamW shrinks the weights in a line of its own: [Loshchilov and Hutter
# 2019](https://arxiv.org/abs/1711.05101).)

# %%
from course_utils.lessons.adam.by_hand import HandAdamW, adamw_step

print(getsource(adamw_step))

# %% [markdown]
# Does it equal PyTorch's? Train a small language model twice, over the characters of a short text, 100 steps each: once
# with these lines, once with `torch.optim.AdamW`.
#
# **Your guess.** The model has about a hundred thousand parameters in fp32. How many KB does Adam keep for it?

# %%
from course_utils.lessons.shared.language_model import language_model, train_language_model

n = sum(weight.numel() for weight in language_model().parameters())
print(f"{n:,} parameters")
predict("02.small", unit="KB")

# %%
import torch

ours = train_language_model(lambda weights: HandAdamW(weights, rate=1e-3), steps=100)
theirs = train_language_model(lambda weights: torch.optim.AdamW(weights, lr=1e-3), steps=100)
furthest = max(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True))
print(f"it learns: {ours.final < 0.8 * ours.losses[0]}")
print(f"all 100 losses agree to 0.0001: {furthest < 1e-4}")

# %% [markdown]
# The losses agree. Do the *weights*, all of them?

# %%
both = zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True)
distance = {name: (one - other).abs().max().item() for (name, one), other in both}
biases = sorted(name for name in distance if name.endswith("qkv.bias"))
print(f"the furthest apart is a bias of queries, keys and values: {max(distance, key=distance.get) in biases}")
others = max(gap for name, gap in distance.items() if name not in biases)
print(f"everything else agrees to 0.00001: {others < 1e-5}")
query, key, value = (ours.model.blocks[0].attention.qkv.bias - theirs.model.blocks[0].attention.qkv.bias).chunk(3)
rest = max(query.abs().max(), value.abs().max()).item()
print(f"of that bias, the queries' and the values' thirds do, too: {rest < 1e-5}")

# %% [markdown]
# **The gap.** One thing differs by more than rounding usually does: the bias of the *keys*. It adds the same number to
# all of a query's scores, and softmax does not notice. So its true gradient is zero, and what autograd computes is
# rounding noise. Adam divides noise by the size of noise. That is the other side of "the size cancels". Only ε holds
# the steps back. Train once more with an ε far below the noise:

# %% tags=["nbval-ignore-output"]
tiny = train_language_model(lambda weights: torch.optim.AdamW(weights, lr=1e-3, eps=1e-16), steps=100)
begin = language_model().blocks[0].attention.qkv.bias
for epsilon, trained in (("1e-08", theirs), ("1e-16", tiny)):
    moved = (trained.model.blocks[0].attention.qkv.bias - begin).abs().chunk(3)
    query, key, value = (part.mean().item() / 1e-3 for part in moved)
    print(f"ε = {epsilon}: in 100 steps queries' biases move by {query:.1f} learning rates, keys' by {key:.2f}")

# %% [markdown]
# With the usual ε, the keys' bias hardly moves: its gradients are far below 10⁻⁸. With the tiny one it walks many
# learning rates, in directions that mean nothing. The losses cannot tell.
#
# Now the bytes.

# %%
from course_utils.lessons.adam.by_hand import kept_by_name, kept_bytes
from course_utils.interactive.ledgers import show_ledger

show_ledger({"exp_avg": 4 * n, "exp_avg_sq": 4 * n}, kept_by_name(theirs.optimizer))
reveal("02.small", kept_bytes(ours.optimizer), unit="KB")

# %% [markdown]
# *exp_avg* is m, *exp_avg_sq* is v: 4 bytes each, 8 a parameter. The row of `step` is PyTorch's alone: a counter for
# each tensor, 4 bytes on the *CPU*. Only a fused or capturable Adam keeps them on the GPU.

# %% [markdown]
# ## When do they appear?
# `torch.optim.AdamW(...)` allocates nothing. The states are made in the first `step()`. Take GPT-2, four sequences of
# 512 tokens under [autocast](../docs/glossary.md#autocast).
#
# **Your guess.** How much higher than step 1 does step 2 reach?

# %%
from course_utils import TrainingRun, format_bytes, measure

run = TrainingRun("gpt2", micro_batch=4, seq_len=512)
N = run.model.parameters
print(f"N = {N:,}")
predict("02.second_step", unit="MB")

# %%
from course_utils.figures import timeline

three_steps = measure(run, steps=3)
timeline(three_steps, "The two states appear at the end of step 1, and the peak rises by just their size")

# %%
peaks = three_steps.timeline.step_peaks()
for number, peak in peaks.items():
    print(f"step {number}: peak {peak:,} bytes")
print(f"8 · N minus the difference of steps 2 and 1: {8 * N - (peaks[2] - peaks[1]):,} bytes")
reveal("02.second_step", peaks[2] - peaks[1], unit="MB")

# %% [markdown]
# The first step peaks *before* the states exist. From step 2 on the same moment stands on top of them. If you try a
# configuration for one step, you have not tried what will run.

# %% [markdown]
# ## What other optimizers keep
# SGD keeps nothing, momentum one number. [Lion](../docs/glossary.md#lion) keeps one and takes its sign ([Chen et al.
# 2023](https://arxiv.org/abs/2302.06675)). [Adafactor](../docs/glossary.md#adafactor) keeps of each matrix of *v* only
# a row and a column ([Shazeer and Stern 2018](https://arxiv.org/abs/1804.04235)). [8-bit
# Adam](../docs/glossary.md#8-bit-adam) keeps both in 8 bits with a scale for each block of numbers ([Dettmers et al.
# 2022](https://arxiv.org/abs/2110.02861) take blocks of 2,048; here they have 256). [Muon](../docs/glossary.md#muon)
# keeps one for the blocks' matrices and leaves embeddings and vectors to AdamW ([Jordan et al.
# 2024](https://kellerjordan.github.io/posts/muon/)).
#
# **Your guess.** How many bytes per parameter does Muon keep for GPT-2, in fp32?

# %%
embeddings = (run.model.vocab + run.model.max_positions) * run.model.hidden
print(f"{embeddings / N:.0%} of GPT-2's parameters are embeddings of words and positions")
predict("02.muon", unit="bytes")

# %%
from course_utils.figures import bars

plain = TrainingRun("gpt2", micro_batch=1, seq_len=128, precision="fp32", attention="efficient")
runs = {name: plain.replace(optimizer=name)
        for name in ("sgd", "adafactor", "adam8bit", "momentum", "lion", "muon", "adamw")}  # fmt: skip
measured = {name: measure(run) for name, run in runs.items()}
states = {name: step.moments["end of step 2"]["optimizer_states"] for name, step in measured.items()}
where = str(measured["adamw"].provenance)
title = "Adam keeps 8 bytes a parameter; most others keep half of that or less"
a_parameter = {name: size / N for name, size in states.items()}
bars(a_parameter, title, unit="bytes a parameter", kind="optimizer_states", provenance=where)

# %%
from course_utils import estimate

word = measured["adamw"].word
for name, found in states.items():
    estimated = estimate(runs[name])["optimizer_states"]
    print(f"{name:9s} estimated {estimated:11,} bytes, {word} {found:11,}: gap {estimated - found:+,}")
reveal("02.muon", a_parameter["muon"], unit="bytes")

# %% [markdown]
# To the byte. Muon's figure is between 4 and 8, because
# GPT-2's embeddings are a good part of its parameters, and they go to AdamW. SGD, momentum, Adam, Adafactor and Muon
# are PyTorch's own; Lion and the 8-bit Adam are the course's short versions.

# %% [markdown]
# ## What comes and goes in the step
# States are what stays. But the step itself needs room: √v̂ + ε is a new tensor. How many of those exist at once
# depends on how PyTorch walks over the parameters: [*for-loop, foreach,
# fused*](../docs/glossary.md#foreach-for-loop-fused).
# On a GPU it takes **foreach** unless told otherwise: the few kernels that handle all tensors at once are quicker than
# many small ones.
#
# **Your guess.** How many bytes a parameter does AdamW with foreach need on top, at its fullest moment?

# %%
predict("02.transient", unit="bytes")

# %%
from course_utils.lessons.adam.by_hand import step_temporaries

ways = {way: plain.replace(optimizer=f"adamw-{way}") for way in ("loop", "foreach", "fused")}
came = {way: step_temporaries(measure(choice)) for way, choice in ways.items()}
title = "One tensor for each parameter at once: foreach costs 4 bytes a parameter"
transient = {way: size / N for way, size in came.items()}
bars(transient, title, unit="bytes a parameter", kind="temporaries", provenance=where)

# %%
from course_utils.estimating.exact.update import optimizer_step

for way, found in came.items():
    estimated = optimizer_step(ways[way]).get("temporaries", 0)
    print(f"{way:9s} estimated {estimated:11,} bytes, {word} {found:11,}: gap {estimated - found:+,}")
reveal("02.transient", transient["foreach"], unit="bytes")
largest = 4 * run.model.vocab * run.model.hidden
print(f"for-loop: {came['loop']:,} bytes, twice the largest parameter's {largest:,}, and that is the embedding")

# %% [markdown]
# **Foreach** computes √v for *all* parameters before it uses any: a whole copy of the weights' size, in fp32 4 bytes a
# parameter. The **for-loop** has two temporaries of one parameter at a time, and what the one before it has left.
# **Fused** has none: one kernel reads g, m and v and writes the weight.
#
# Does it matter? Only where the optimizer phase owns the peak, with small batches or
# [recomputation](../docs/glossary.md#activation-recomputation). There, `fused=True` is the cheapest saving in this
# course. And which is the quickest? Only a GPU can say:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("optimizer")

# %% [markdown]
# ## Sixteen bytes, and the step on top
# Now 16-bit weights with [master weights](../docs/glossary.md#master-weights): 2 for the weights, 2 for gradients, 4
# for the fp32 master, 8 for m and v. That is 16. Many training loops convert *all* gradients to fp32, drop the 16-bit
# ones, and then call foreach AdamW.
#
# **Your guess.** How many bytes per parameter are alive at the fullest moment of that optimizer step?

# %%
predict("02.upcast", unit="bytes")

# %%
paper = {"weights": 2, "gradients in fp32": 4, "master weights": 4, "m and v": 8, "foreach's tensors": 4}
print(" + ".join(f"{size} ({name})" for name, size in paper.items()), "=", sum(paper.values()))

# %%
from course_utils.figures import stack

masters = TrainingRun("gpt2", micro_batch=1, seq_len=128, precision="bf16-master")
one_by_one, at_once = measure(masters), measure(masters.replace(optimizer="adamw-foreach"))
rows = {
    "end of backward": at_once.moments["end of backward"],
    "step, one at a time": one_by_one.phase_peaks["optimizer"],
    "step, all at once": at_once.phase_peaks["optimizer"],
}
per = {name: round(row.total / N) for name, row in rows.items()}
title = f"{per['end of backward']} bytes a parameter on paper, {per['step, all at once']} when all are upcast at once"
stack(rows, title, provenance=str(at_once.provenance))

# %%
for name, row in rows.items():
    print(f"{name:20s} {row.total / N:6.2f} bytes a parameter")
reveal("02.upcast", rows["step, all at once"].total / N, unit="bytes")

# %% [markdown]
# **The gap** of six: 2 more for gradients twice as wide, 4 for foreach. [Upcasting](../docs/glossary.md#upcasting) *one
# at a time* needs only the largest parameter's share of that, and the 16-bit gradients go as it proceeds. Neither is in
# the 16.

# %% [markdown]
# ## K, as ZeRO writes it
# The [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.1)
# puts all of the optimizer's bytes a parameter, master weights included, into one letter, [K](../docs/glossary.md#k): a
# run keeps (2 + 2 + K)·N. For other choices weights and gradients are not 2 bytes each.
#
# What is K for mixed-precision Adam? **Your guess.** And how many GB are (2 + 2 + K)·N for GPT-2 XL?

# %%
X = TrainingRun("gpt2-xl").model.parameters
print(f"GPT-2 XL: N = {X:,}")
predict("02.xl", unit="GB")

# %%
from course_utils.estimating.published import zero_state_bytes
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes

xl = TrainingRun("gpt2-xl", attention="efficient")
for precision, optimizer in (("bf16-master", "adamw"), ("bf16-master", "momentum"), ("bf16-master", "adafactor"),
                             ("fp32", "adamw"), ("bf16", "adamw")):  # fmt: skip
    choice = xl.replace(precision=precision, optimizer=optimizer)
    weights, gradients, K = (size(choice) / X for size in (parameter_bytes, gradient_bytes, optimizer_state_bytes))
    print(f"{precision:11s} {optimizer:9s} weights {weights:.0f}, gradients {gradients:.0f}, K = {K:5.2f}")
reveal("02.xl", sum(zero_state_bytes(X).values()))
print(f"with 1.5 billion parameters, as ZeRO rounds: {format_bytes(sum(zero_state_bytes(1_500_000_000).values()))}")

# %% [markdown]
# fp32 Adam keeps 4 + 4 + 8 and mixed-precision Adam 2 + 2 + 12: both are 16. The master copy eats what the 16-bit
# weights and gradients save. What mixed precision is good for, then, is lesson 03.

# %% [markdown]
# ## Turn the knobs
# Three questions for the sliders. At which η does gradient descent leave the valley, and what does the steepness do to
# that? Turn the valley by 45°: which two optimizers notice? Set Adam's β1 to 0: what is missing?
#
# <details><summary>Answers</summary>
#
# Beyond η = 2/steepness. RMSProp and Adam notice: each axis has its own *v*, and in a turned valley the axes no longer
# tell the steep direction from the flat one; gradient descent and momentum walk the same way, turned. With β1 = 0 the
# mean of past gradients is gone: Adam becomes RMSProp with bias correction.
#
# </details>

# %%
from course_utils.lessons.adam.widget import walker

walker("Adam", rate=0.5)

# %% [markdown]
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(2)

# %% [markdown]
# ## Take home
# **Remember** Adam keeps two numbers for each parameter, 8 bytes in fp32, made in the first step; with master weights
# K = 12. The step itself needs room besides: 4 bytes a parameter with foreach, nothing when fused.
#
# **Breaks when** all gradients are upcast at once: 16 bytes a parameter become 22. And when you try one step only: the
# states are not there yet.
#
# **Cheat-sheet line** optimizer bytes a parameter, fp32 states: SGD 0 · Adafactor ≈ 0 · 8-bit Adam ≈ 2 · momentum, Lion
# 4 · Muon 4 to 8 · Adam 8 · with fp32 masters 4 more · foreach: 4 more for a moment.
#
# Now solve the [exercises of this lesson](../exercises/02_adam.ipynb).
