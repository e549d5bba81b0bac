# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · LoRA and quantization
#
# **75 minutes.** You should know the 16 bytes a parameter ([lesson 02](02_adam.ipynb)), number formats ([lesson
# 03](03_mixed_precision.ipynb)) and what a linear layer keeps for backward ([lesson 05](05_activations.ipynb)). No GPU
# is needed: where a measurement is simulated, it says so.
#
# Somebody gives you a trained model, and you want to teach it a little more. Do all of its weights have to learn? And
# those that don't: do they need 16 bits? [LoRA](../docs/glossary.md#lora) answers the first question,
# [quantization](../docs/glossary.md#quantization) the second, [QLoRA](../docs/glossary.md#qlora) both at once. You will
# build each of them, try them on a small model that has really learned something, and account for what they save and
# what they do not.

# %% [markdown]
# ## Two thin matrices
# A weight matrix W has n_out·n_in numbers. LoRA leaves W as it is and learns a *difference* ΔW = B·A, where B has r
# columns and A has r rows ([Hu et al. 2022](https://arxiv.org/abs/2106.09685), section 4.1). The rank r is small.

# %%
from course_utils.lessons.lora.figures import lora_picture

lora_picture(n_out=4096, n_in=4096, rank=64)

# %% [markdown]
# Each matrix costs r·(n_out + n_in) numbers in place of n_out·n_in. **Your guess.** Llama-3 8B, rank 16, on the four
# matrices of attention in every block (q, k, v, out). How many percent of the model's parameters learn?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("12.percent", unit="%")

# %%
from course_utils import TrainingRun
from course_utils.lessons.lora.by_hand import adapter_parameters
from course_utils.figures import lines

llama = TrainingRun("llama3-8b").model
attention, everywhere = ("q", "k", "v", "out"), ("q", "k", "v", "out", "gate", "up", "down")
ranks = [2, 4, 8, 16, 32, 64]
share = {
    name: (ranks, [100 * adapter_parameters(llama, r, targets) / llama.parameters for r in ranks])
    for name, targets in {"attention": attention, "attention and MLP": everywhere}.items()
}
lines(share, "Llama-3 8B: even rank 64 on every matrix trains about 2 % as many numbers",
      "rank r", "percent of N", log_x=True, log_y=True, provenance="formula")  # fmt: skip

# %%
from course_utils import format_bytes

for r in ranks:
    count = adapter_parameters(llama, r, attention)
    size = format_bytes(16 * count, "MB", 0)
    print(f"r = {r:2d} on attention: {count:11,} numbers, {count / llama.parameters:.3%} of N, at most {size:>7s}")
reveal("12.percent", 100 * adapter_parameters(llama, 16, attention) / llama.parameters, unit="%")

# %% [markdown]
# "At most" is 16 bytes per number: the factor, its gradient and Adam's two moments, all in fp32. These ranks are the
# usual ones. The lecture slides say 2 to 64; Hu et al. try 1, 2, 4, 8 and 64 on GPT-3 (section 7.2, table 6), and on
# their two tasks the accuracy hardly depends on it.

# %% [markdown]
# ## By hand
# Here is all of it: a frozen layer, two factors, and a scale alpha/r. With the scale you can change r without looking
# for a new learning rate each time (Hu et al., section 4.1).

# %%
import torch
from torch import nn


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


# %%
torch.manual_seed(0)
base, x = nn.Linear(64, 48), torch.randn(10, 64)
layer = Lora(base, r=4, alpha=8)
print("before the first step the layer is the old one:", torch.equal(layer(x), base(x)))

nn.init.normal_(layer.B)  # as if it had learned something
merged = base.weight + layer.scale * layer.B @ layer.A
print("merged into one weight it does the same:", torch.allclose(layer(x), x @ merged.T + base.bias, atol=1e-4))
print("rank of the difference:", torch.linalg.matrix_rank((merged - base.weight).detach(), rtol=1e-4).item())

# %% [markdown]
# *Merging* is why LoRA costs nothing when training is over: W + B·A·alpha/r is a matrix like W.
#
# B is zero at first and A is random. **Your guess.** After the first backward: how many of the two factors have a
# gradient that is not zero?

# %%
predict("12.factors", unit="of two")

# %% [markdown]
# Estimate: with G = dL/dΔW, the chain rule gives dL/dB = G·Aᵀ and dL/dA = Bᵀ·G. If B is zero, so is the second.
#
# The lecture slides write ΔW = A·Bᵀ with B zero. Their B stands on the side of the *input*, where the paper's A is. So
# measure four ways to begin.

# %%
starts = {"paper: B·A, B zero": (0, 1), "slides: A·Bᵀ, B zero": (1, 0), "both zero": (0, 0), "both Gaussian": (1, 1)}
G, alive = torch.randn(48, 64), {}
for name, (out_side, in_side) in starts.items():
    left = (out_side * torch.randn(48, 4)).requires_grad_()  # next to the output: paper's B, slides' A
    right = (in_side * torch.randn(4, 64)).requires_grad_()  # next to the input: paper's A, slides' Bᵀ
    difference = left @ right
    (G * difference).sum().backward()
    alive[name] = [bool(factor.grad.any()) for factor in (left, right)]
    same = "same model as before" if not difference.any() else "ANOTHER model"
    print(f"{name:21s} {same:21s} moves at once: output side {alive[name][0]!s:5}, input side {alive[name][1]}")
reveal("12.factors", sum(alive["paper: B·A, B zero"]), unit="of two")

# %% [markdown]
# **The gap**, if you had one: one factor waits for the other by a step. Paper and slides can make the same
# differences, and both begin with none; they differ in which factor moves first. Two zeros would never move at all:
# each waits for the other. Two Gaussians begin with another model than the one you were given.

# %% [markdown]
# ## What LoRA saves
# Gradients and optimizer states exist for parameters that learn. With a percent of them learning, both are nearly gone.
# And activations? **Your guess.** GPT-2, 4 sequences of 512 tokens, [autocast](../docs/glossary.md#autocast), LoRA of
# rank 8 on all matrices of the blocks. By how many percent does that lower the activations that forward keeps?

# %%
predict("12.activations", unit="%")

# %%
from course_utils import measure
from course_utils.figures import stack

full = TrainingRun("gpt2", micro_batch=4, seq_len=512, precision="amp-bf16")
runs = {
    "all weights": full,
    "LoRA on attention": full.replace(lora_rank=8),
    "LoRA on all matrices": full.replace(lora_rank=8, lora_targets=("attention", "mlp")),
}
measured = {name: measure(run) for name, run in runs.items()}
provenance = str(measured["all weights"].provenance)
stack(measured, "LoRA takes away the optimizer states; the activations stay", provenance=provenance)

# %%
from course_utils import estimate

kept = {name: one.moments["after loss"]["activations"] for name, one in measured.items()}
for name, run in runs.items():
    gap = estimate(run).total - measured[name].peak
    states = measured[name].moments["end of step 2"]["optimizer_states"]
    print(f"{name:21s} states {format_bytes(states, 'MB', 0):>6s}, activations {format_bytes(kept[name], 'MB', 0)}, "
          f"peak {format_bytes(measured[name].peak, 'GB', 2)}; "
          f"estimate − {measured[name].word} {gap:+,} bytes")  # fmt: skip
reveal("12.activations", 100 * (1 - kept["LoRA on all matrices"] / kept["all weights"]), unit="%")

# %% [markdown]
# **The gap.** Ask one layer what it keeps, with the hooks of lesson 05.

# %%
from course_utils.networks.lora import LoraLinear
from course_utils.interactive.saved import saved_by

h, tokens = 768, (4, 512, 768)
layers = {"plain": nn.Linear(h, h), "frozen": nn.Linear(h, h).requires_grad_(False),
          "frozen, with LoRA": LoraLinear(nn.Linear(h, h), 8, torch.bfloat16)}  # fmt: skip
for name, layer in layers.items():
    saved = saved_by(layer, tokens, dtype="bf16")
    shapes = ", ".join(f"{item.shape[0]:,} × {item.shape[1]}" for item in saved) or "nothing"
    print(f"{name:18s} keeps {shapes:25s} {format_bytes(sum(item.bytes for item in saved), 'MB', 2):>8s}")

# %% [markdown]
# A frozen layer keeps nothing: its input was there for dL/dW, which nobody asks for any more. A LoRA layer needs the
# same input for dL/dA. So LoRA on *every* matrix saves almost no activations, and it adds x·Aᵀ. It spares only the
# head's input and what lies before the first factor: the embedding's dropout, the first norm. LoRA on attention alone
# also spares the inputs of the MLP's matrices. Everything else (GELU's input, attention's own tensors, the loss) is
# kept, because the gradient has to travel through it. The
# [recomputation](../docs/glossary.md#activation-recomputation) of lesson 06 is the cure, with LoRA as without.
#
# And the rank? It decides what can be learned, and hardly what it costs:

# %%
peaks = {
    name: (ranks, [estimate(run.replace(lora_rank=r)).total / 1e9 for r in ranks])
    for name, run in runs.items() if run.lora_rank
}  # fmt: skip
lines(peaks, "From rank 2 to 64 the peak of GPT-2's step hardly rises", "rank r", "GB at the peak", log_x=True,
      level=("all weights", estimate(full).total / 1e9), provenance="estimated from formulas")  # fmt: skip

# %% [markdown]
# How much of a step LoRA saves is therefore a matter of what fills the step.

# %%
for name, run in {"one sequence of 128 tokens": full.replace(micro_batch=1, seq_len=128), "4 of 512": full,
                  "32 of 1,024": full.replace(micro_batch=32, seq_len=1024)}.items():  # fmt: skip
    whole, thin = (estimate(run.replace(lora_rank=rank)).total for rank in (0, 8))
    print(f"GPT-2, {name:27s} all weights {format_bytes(whole, 'GB', 1):>8s}, LoRA {format_bytes(thin, 'GB', 1):>8s}: "
          f"{whole / thin:.1f} times less")  # fmt: skip

# %% [markdown]
# The paper's abstract says three times less, *of GPT-3 with its 175 billion parameters*. Its section 4.2 gives the
# figures: 1.2 TB against 350 GB. What can those be?

# %%
from course_utils.models import PRESETS

gpt3 = PRESETS["gpt3-175b"].parameters
for recipe, per_parameter in {"16-bit weights alone": 2, "all four in 16 bits": 8, "ZeRO's 2 + 2 + 12": 16}.items():
    size = per_parameter * gpt3
    print(f"{recipe:21s} {per_parameter:2d} bytes: {format_bytes(size, 'GB', 0):>8s} = {format_bytes(size, 'TiB', 2)}")

# %% [markdown]
# 350 GB are the 16-bit weights and nothing else. So no activation is in that figure. 1.2 TB is near weights, gradients
# and both of Adam's states in 16 bits, if TB is read as TiB. The paper does not say how it is made up, so nobody can
# confirm or refute it. A step with fp32 master weights would take more.

# %% [markdown]
# ### And the work?
# Backward of y = x·Wᵀ makes two products as large as forward's: dL/dx, which travels on to the layer before, and dL/dW,
# by which W learns. So a training step is three units of work: one for forward, two for backward.
#
# **Your guess.** GPT-2, LoRA of rank 8 on all matrices of the blocks. By how many percent does that cut a step's
# arithmetic?

# %%
predict("12.flops", unit="%")

# %% [markdown]
# Estimate: a frozen W needs its dL/dx and no dL/dW. That leaves two units of three, and the thin factors add a little.
# Count it: torch counts the [FLOPs](../docs/glossary.md#flops) of every product, even on the meta device, where tensors
# have a shape and no numbers.

# %%
from torch.utils.flop_counter import FlopCounterMode

from course_utils.networks import build_network
from course_utils.networks.lora import add_lora


def counted(rank):
    with torch.device("meta"):
        network, tokens = build_network(full.model, "eager"), torch.zeros(1, 512, dtype=torch.long)
        if rank:
            add_lora(network, rank, ("qkv", "out", "up", "down"), torch.float32)
    with FlopCounterMode(display=False) as forward:
        loss = network(tokens).logsumexp(-1).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


# %%
from course_utils.estimating.step_time import model_flops

flops = {rank: counted(rank) for rank in (0, 8, 64)}
unit = flops[0][0]  # one forward of the plain model
for rank, (forward, backward) in flops.items():
    run = full.replace(micro_batch=1, lora_rank=rank, lora_targets=("attention", "mlp") if rank else ())
    step = forward + backward
    print(f"{f'rank {rank}' if rank else 'all weights':11s} forward {forward / unit:.2f}, "
          f"backward {backward / unit:.2f}, together {step / unit:.2f} units; "
          f"formula − counted {model_flops(run) / step - 1:+.1%}")  # fmt: skip
reveal("12.flops", 100 * (1 - sum(flops[8]) / sum(flops[0])), unit="%")
print(f"Hu et al., GPT-3: 32.5 tokens per second and GPU become 43.1: {1 - 32.5 / 43.1:.0%} less time")

# %% [markdown]
# **The gap.** The formula (lesson 14 plans with it) leaves out the factors. It also counts a dL/dx that nobody needs:
# the first block's, because the embedding below it is frozen. Time is more than arithmetic. Hu et al. measured the last
# line (section 4.2, footnote 5), and it stays below a third. With full recomputation, both steps have one unit more:
# three remain of four.

# %% [markdown]
# ## A real fine-tuning
# The course's small language model has learned a text about a harbor, character by character. Now it shall learn five
# of Shakespeare's sonnets, which it has never seen: all weights, or LoRA on all matrices of the blocks with rank 2, 8
# and 32. All take 100 steps, each at a learning rate that suits it.
#
# **Your guess.** Take what full fine-tuning wins on the sonnets (loss before minus loss after) as 100 %. How much of
# it does rank 8 win, with about 15 % of the numbers?

# %%
predict("12.won", unit="%")

# %%
from course_utils.lessons.shared.language_model import corpus, mean_loss
from course_utils.lessons.lora.by_hand import fine_tune, pretrained, sonnets

model = pretrained()
before = {"new": mean_loss(model, sonnets()), "old": mean_loss(model, corpus())}
tuned = {rank: fine_tune(rank) for rank in (2, 8, 32, 0)}
for rank, done in tuned.items():
    print(f"{f'rank {rank}' if rank else 'all weights':11s} trains {done.trained:7,} numbers "
          f"({done.trained / tuned[0].trained:3.0%}) at a learning rate of {done.rate:g}")  # fmt: skip

# %% tags=["nbval-ignore-output"]
from course_utils.figures import bars

won = {rank: 100 * (before["new"] - done.new) / (before["new"] - tuned[0].new) for rank, done in tuned.items()}
lost = {rank: 100 * (done.old - before["old"]) / (tuned[0].old - before["old"]) for rank, done in tuned.items()}
shown = {f"rank {rank}, {what}": part[rank] for rank in (2, 8, 32)
         for what, part in (("learned of the new text", won), ("forgotten of the old", lost))}  # fmt: skip
rates = f"all weights (100 %) at rate {tuned[0].rate:g}, factors at {tuned[8].rate:g}"
bars(shown, "LoRA learns most of the new text and forgets less of the old", unit="%", digits=0,
     provenance=f"trained on this CPU: {rates}")  # fmt: skip

# %%
print("rank 8 wins more than four fifths:", won[8] > 80)
print("the larger the rank, the more it learns:", won[2] < won[8] < won[32])
print("every rank forgets less of the harbor than full fine-tuning:", max(lost[rank] for rank in (2, 8, 32)) < 100)
reveal("12.won", round(won[8], -1), unit="%")

# %% [markdown]
# **Two learning rates: is that fair?** Adam's first step moves every number by the rate η, whatever its gradient. A
# weight of W then moves by η. But B starts at zero, so B·A moves by η times a sum over r entries of A, each of size
# 1/√n_in. That is about η·√(r/n_in): a third of η for rank 8 on 64 inputs. Factors need a larger rate to get as far. So
# compare each at its own best.

# %% tags=["nbval-ignore-output"]
tried = {
    "all weights": {3e-3: tuned[0].new} | {rate: fine_tune(0, rate=rate).new for rate in (1e-3, 1e-2)},
    "rank 8": {1e-2: tuned[8].new} | {rate: fine_tune(8, rate=rate).new for rate in (3e-3, 3e-2)},
}
best = before["new"] - tuned[0].new
curves = {name: (sorted(losses), [100 * (before["new"] - losses[rate]) / best for rate in sorted(losses)])
          for name, losses in tried.items()}  # fmt: skip
lines(curves, "Factors learn best at a larger rate than weights", "learning rate",
      "percent of what all weights win at 0.003", log_x=True,
      provenance="trained on this CPU, 100 steps each")  # fmt: skip

# %%
weights, factors = tried["all weights"], tried["rank 8"]
print(f"η·√(r/n_in) for rank 8, 64 inputs: {(8 / 64) ** 0.5:.2f} · η")
print("all weights learn better at 0.003 than at 0.01:", weights[3e-3] < weights[1e-2])
print("rank 8 learns better at 0.01 than at 0.003:", factors[1e-2] < factors[3e-3])
print("both at 0.01, rank 8 would seem to learn more than all weights:", factors[1e-2] < weights[1e-2])

# %% [markdown]
# "Learns less and forgets less" is what [Biderman et al. 2024](https://arxiv.org/abs/2405.09673) found in large
# models. And merged, ours is one plain model again:

# %%
from course_utils.lessons.lora.by_hand import merged as merge_all

plain = merge_all(tuned[8].model)
print("parameters as before:", sum(w.numel() for w in plain.parameters()) == sum(w.numel() for w in model.parameters()))
print("same loss on the sonnets:", abs(mean_loss(plain, sonnets()) - tuned[8].new) < 1e-4)

# %% [markdown]
# ## Round to a grid
# Now the weights that stay. *[Absmax](../docs/glossary.md#absmax-quantization)* quantization to 4 bits: divide by a
# scale that maps the largest magnitude to 7, round to whole numbers, store those and the scale.

# %%
w = torch.tensor([0.31, -0.04, 0.12, -0.70, 0.07, 0.45])
scale = w.abs().max() / 7
codes = (w / scale).round() + 0.0  # no negative zero
print(f"scale: {scale:.2f}")
for value, code in zip(w, codes, strict=True):
    print(f"{value:6.2f} → {int(code):3d} → {code * scale:6.2f}, off by {code * scale - value:+.2f}")

# %% [markdown]
# **Your guess.** By what factor does the error shrink for each bit that you add?

# %%
predict("12.bit", unit="times")

# %% [markdown]
# Estimate: the grid has steps of Δ = max/(2^(bits−1) − 1), and errors spread evenly over a step have a root mean square
# of Δ/√12. Measure on a matrix of the small language model: with one scale for the whole matrix, one for each row
# (*per channel*), one for each block of 32 numbers.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.lora.quantization import absmax, block_matrices, relative_error, uniform_error

weight = block_matrices(model)["blocks.0.mlp.up.weight"]
bits = [2, 3, 4, 5, 6, 7, 8]
groups = {"one scale": None, "each row": weight.shape[1], "blocks of 32": 32}
errors = {name: [relative_error(weight, absmax(weight, k, group)) for k in bits] for name, group in groups.items()}
drawn = {name: (bits, [100 * error for error in series]) for name, series in errors.items()}
drawn["Δ/√12, one scale"] = (bits, [100 * uniform_error(weight, k) for k in bits])
lines(drawn, "Each bit halves the error; a scale for each row is worth one bit more", "bits",
      "error in % of the weights' size", log_y=True, provenance="a matrix of a model trained on this CPU")  # fmt: skip

# %%
factor = (errors["one scale"][2] / errors["one scale"][6]) ** (1 / 4)
reveal("12.bit", round(factor, 1), unit="times")
gaps = [uniform_error(weight, k) / error - 1 for k, error in zip(bits, errors["one scale"], strict=True)]
print("from 4 bits on, Δ/√12 is right to 15 %:", max(abs(gap) for gap in gaps[2:]) < 0.15)
print("with 2 bits it is off by more than half:", abs(gaps[0]) > 0.5)

# %% [markdown]
# **The gap.** A step shrinks by 127/63, 63/31, 31/15, 15/7: a little more than two. With two bits nearly all weights
# round to zero, and errors are not spread evenly over anything.
#
# More scales help because the largest number of a *block* is smaller than the largest of all. They cost: an fp32 scale
# for 32 numbers is one bit a number. What they are really for is the outlier. Make one weight 30 times as large:

# %%
spoiled = weight.clone()
spoiled[5, 5] = 30 * weight.abs().max()
others = torch.ones_like(weight, dtype=torch.bool)
others[5, 5] = False
for name, group in groups.items():
    zeros = (absmax(spoiled, 8, group)[others] == 0).float().mean().item()
    print(f"{name:13s} more than half of the other weights become zero in 8 bits: {zeros > 0.5}")

# %% [markdown]
# ### The zero point
# Absmax is made for numbers around zero. A GELU's output is never below −0.17, so half of the grid lies idle. A *[zero
# point](../docs/glossary.md#zero-point)* moves the grid: x ≈ (code − z)·scale ([Jacob et al.
# 2018](https://arxiv.org/abs/1712.05877), eq. 1).

# %%
from course_utils.lessons.lora.quantization import zero_point

torch.manual_seed(0)
activation = nn.functional.gelu(torch.randn(100_000))
for k in (4, 8):
    one, other = (relative_error(activation, rounding(activation, k)) for rounding in (absmax, zero_point))
    print(f"{k} bits: error {one:.1%} with absmax, {other:.1%} with a zero point: {one / other:.1f} times less")

# %% [markdown]
# With 8 bits that is one bit, as the idle half lets you expect.
#
# ## Sixteen values of your choice
# Four bits are 16 values, and nobody says that they must be evenly spaced. Trained weights crowd around zero, so put
# more values there. [NF4](../docs/glossary.md#nf4) takes quantiles of the normal distribution: each value is to be used
# equally often ([Dettmers et al. 2023](https://arxiv.org/abs/2305.14314), section 3). Here it is, computed.

# %%
from statistics import NormalDist

end = (1 / 32 + 1 / 30) / 2  # half a step from the end: the mean of what 16 and what 15 values would have
below = [end + (0.5 - end) * step / 7 for step in range(8)]
above = [0.5 + (0.5 - end) * step / 8 for step in range(1, 9)]
quantiles = [NormalDist().inv_cdf(p) for p in below + above]
nf4 = [quantile / quantiles[-1] for quantile in quantiles]
print(" ".join(f"{value:.4f}" for value in nf4))

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.lora.figures import code_picture
from course_utils.lessons.lora.quantization import grouped

blocks = grouped(weight, 64)
scaled = (blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten().tolist()
code_picture(scaled, {"absmax, 4 bits": [k / 7 for k in range(-7, 8)], "NF4": nf4},
             "NF4 puts its values where the weights are",
             provenance="a matrix of a model trained on this CPU, in blocks of 64")  # fmt: skip

# %% [markdown]
# **Your guess.** Same [blocks of 64](../docs/glossary.md#block-wise-quantization), same bits: by how many percent is
# NF4's error smaller than absmax's?

# %%
predict("12.nf4", unit="%")

# %%
from course_utils.lessons.lora.quantization import bits_per_number, nearest

even, normal = relative_error(weight, absmax(weight, 4, 64)), relative_error(weight, nearest(weight, nf4, 64))
reveal("12.nf4", round(100 * (1 - normal / even), -1), unit="%")
print(f"stored: {bits_per_number(4, 64):.2f} bits a number, the scale's share included")
print(f"with QLoRA's 8-bit scales, and an fp32 one for 256 of those: {4 + 8 / 64 + 32 / (64 * 256):.3f}")

# %% [markdown]
# The paper calls NF4 "information theoretically optimal" for normal weights. That is about using each value equally
# often; it is not the least error. [Yoshida 2023](https://arxiv.org/abs/2306.06965) adds that numbers divided by their
# block's largest are not normal any more. Test it where it should be at its best, on normal numbers: let 16 centroids
# move until the squared error is least (Lloyd's algorithm).

# %%
from course_utils.lessons.lora.quantization import clusters

torch.manual_seed(0)
blocks = torch.randn(4096, 64)
scales = blocks.abs().amax(dim=1, keepdim=True)
by_nf4, by_lloyd = nearest(blocks, nf4, 64), clusters(blocks / scales, 16) * scales
for name, rounded in {"absmax": absmax(blocks, 4, 64), "NF4": by_nf4, "Lloyd's centroids": by_lloyd}.items():
    print(f"{name:18s} error {relative_error(blocks, rounded):.1%} on normal numbers, blocks of 64")

# %% [markdown]
# ## After training
# *[Post-training](../docs/glossary.md#post-training-quantization) quantization* takes a trained model and rounds it,
# without another step. What counts then is the model's loss. **Your guess.** The language model, all matrices of its
# blocks rounded by absmax with one scale a row: what is the smallest number of bits that raises its loss by less
# than 2 %?

# %%
predict("12.enough", unit="bits")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.lora.quantization import with_rounded_blocks


def loss_with(rounding):
    return mean_loss(with_rounded_blocks(model, rounding), corpus())


start = mean_loss(model, corpus())
widths = {"one scale": lambda w: None, "each row": lambda w: w.shape[1], "blocks of 32": lambda w: 32}
loss = {name: [loss_with(lambda w, k=k, group=group: absmax(w, k, group(w))) for k in bits]
        for name, group in widths.items()}  # fmt: skip
lines({name: (bits, series) for name, series in loss.items()}, "Down to 4 bits hardly anything happens; then much does",
      "bits", "loss on the text", level=("as trained", start), provenance="computed on this CPU")  # fmt: skip

# %%
enough = {name: next(k for k, value in zip(bits, loss[name], strict=True) if value < 1.02 * start) for name in loss}
for name in ("each row", "blocks of 32"):
    print(f"{name:13s} {enough[name]} bits are enough for less than 2 % more loss")
eight = max(values[-1] for values in loss.values())
print("8 bits cost less than half a percent, whatever the scales:", eight < 1.005 * start)
reveal("12.enough", enough["each row"], unit="bits")

# %% [markdown]
# Weights are half of the scheme. To *compute* in 8 bits, the inputs of each matrix have to be rounded as well, and
# their scale must be known before. So the model reads some text once, and somebody notes the largest input of each
# layer: *[calibration](../docs/glossary.md#calibration)*.

# %%
from course_utils.lessons.lora.quantization import calibrate, with_rounded_inputs

rounded = with_rounded_blocks(model, lambda w: absmax(w, 8, w.shape[1]))
largest = calibrate(rounded, corpus()[:1000])
for k in (8, 6, 4):
    risen = mean_loss(with_rounded_inputs(rounded, largest, k), corpus()) / start - 1
    print(f"8-bit weights, {k}-bit inputs: loss up by less than 2 %: {risen < 0.02}")

# %% [markdown]
# Inputs are harder than weights: one scale for the whole tensor has to serve all tokens and all channels.

# %% [markdown]
# ## Two factors that cluster
# A stranger idea: write W as a sum U + V·Q with Q orthogonal, such that U and V are easy to quantize. In two bases at
# once (an *[overdetermined](../docs/glossary.md#overdetermined-basis)* basis) a matrix can be written in many ways, and
# [Merkulov et al. 2024](https://arxiv.org/abs/2404.09737) choose one in which no entry of either factor is large. The
# entries then gather around a few peaks, and each is replaced by the nearest peak.
#
# Ours is a simple version. One step adds ±c to every entry of U, or of V, whichever lowers the remainder R more: the
# signs of R are the best signs, and the mean of |R| is the best c. Such a step costs one bit a number.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.lora.factored import split
from course_utils.lessons.lora.figures import histograms

many = split(weight, 24)
histograms({"W": weight.flatten().tolist(), "U": many.U.flatten().tolist(), "V": many.V.flatten().tolist()},
           "W is one hill; the entries of U and V gather around peaks", reach=0.15,
           provenance="a matrix of a model trained on this CPU, split in 24 steps")  # fmt: skip

# %% [markdown]
# They do cluster. **Your guess.** Four steps cost four bits, as absmax with four bits does. How large is the error of
# the two factors, in percent of the error of absmax with one scale a row?

# %%
predict("12.split", unit="%")

# %%
steps = [2, 3, 4, 5, 6]
two = [relative_error(weight, split(weight, k).dense) for k in steps]
one = [relative_error(weight, split(weight, k, one_basis=True).dense) for k in steps]
row = [errors["each row"][bits.index(k)] for k in steps]
for k, *found in zip(steps, two, one, row, strict=True):
    by_loss = loss_with(lambda w, k=k: split(w, k).dense) < loss["each row"][bits.index(k)]
    print(f"{k} bits: two bases beat one: {found[0] < found[1]}; "
          f"they beat absmax: {found[0] < 0.98 * found[2]}, and in the model's loss: {by_loss}")  # fmt: skip

# %% tags=["nbval-ignore-output"]
reveal("12.split", 100 * two[2] / row[2], unit="%")

# %% tags=["nbval-ignore-output"]
drawn = {"two bases": two, "one basis": one, "absmax by row": row,
         "centroids": [relative_error(weight, clusters(weight, 2**k)) for k in steps]}  # fmt: skip
lines({name: (steps, [100 * error for error in series]) for name, series in drawn.items()},
      "Two bases beat one; from four bits on a plain grid beats both", "bits", "error in % of the weights' size",
      log_y=True, provenance="a matrix of a model trained on this CPU")  # fmt: skip

# %% [markdown]
# **The gap.** The second basis does what is promised: with it the same greedy steps leave a smaller remainder than
# without. With two bits the factors are far better than a grid, and the model notices. With three the errors are about
# even, and from four bits on plain rounding by row beats them at equal cost, as our steps only ever use ±c. The
# authors' version, with centroids, is finer, and they call its results competitive or superior. What both pay: two
# products for one, or a matrix that has to be put together before each use.

# %% [markdown]
# ## States in 8 bits
# Adam's two moments are 8 bytes a parameter. [8-bit Adam](../docs/glossary.md#8-bit-adam) stores each in a byte
# ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861)), with a scale for 256 numbers in today's bitsandbytes. But
# moments are not like weights: the second one holds squares, over many powers of ten. **Your guess.** Round v to 256
# evenly spaced values in blocks of 256. How many of 1,000 numbers become zero, so that Adam divides by nearly nothing?

# %%
predict("12.zeros", unit="of 1,000")

# %%
from course_utils.lessons.shared.language_model import train_language_model
from course_utils.lessons.lora.quantization import even_adam, zeros_in_second_moment

adam = train_language_model("adamw")
evenly, dynamic = zeros_in_second_moment(adam.optimizer)
reveal("12.zeros", round(1000 * evenly, -1), unit="of 1,000")
print("with values spaced by powers of ten, less than a tenth of that:", dynamic < evenly / 10)

# %% [markdown]
# One in a hundred: does that matter? Train with each of them.

# %% tags=["nbval-ignore-output"]
trainings = {"Adam": adam, "8-bit, powers of ten": train_language_model("adam8bit"),
             "8-bit, evenly spaced": train_language_model(even_adam)}  # fmt: skip
smooth = {name: [sum(done.losses[k : k + 5]) / 5 for k in range(0, 100, 5)] for name, done in trainings.items()}
lines({name: (list(range(0, 100, 5)), series) for name, series in smooth.items()},
      "8-bit Adam learns like Adam if its values are where the moments are", "step", "loss, mean of 5 steps",
      markers=False, provenance="trained on this CPU")  # fmt: skip

# %%
print("powers of ten learn as well as Adam:", abs(trainings["8-bit, powers of ten"].final - adam.final) < 0.1)
print("evenly spaced values stay far behind:", trainings["8-bit, evenly spaced"].final > adam.final + 0.2)
xl = TrainingRun("gpt2-xl", 1, 512, "bf16-master", recompute="full")
for name in ("adamw", "adam8bit"):
    states = estimate(xl.replace(optimizer=name))["optimizer_states"]
    each = states / xl.model.parameters
    print(f"GPT-2 XL, {name:8s} states {format_bytes(states, 'GB', 1):>7s}, {each:.2f} bytes each with the fp32 master")

# %% [markdown]
# ## QLoRA's account
# Now all of it at once: weights frozen in NF4, LoRA on every matrix, all that learns in 16 bits, recomputation.
#
# **Your guess.** A Llama with 65 billion parameters, rank 64 on all matrices, one sequence of 512 tokens: the peak?

# %%
predict("12.qlora", unit="GB")

# %% [markdown]
# Dettmers et al. 2023 fine-tuned this model on "a single 48GB GPU", and say that regular 16-bit fine-tuning takes more
# than 780 GB (section 1). They do not name the card, and no card has 48·10⁹ bytes. A program gets
# [47.54 GiB](https://github.com/vllm-project/vllm/issues/4417) of an RTX A6000, and
# [44.40 GiB](https://github.com/QwenLM/Qwen3-VL/issues/2097) of an L40, where error correction takes its share.

# %%
from course_utils.models import TransformerConfig

big = TransformerConfig("llama-65b", "llama", layers=80, hidden=8192, heads=64, vocab=32000, max_positions=2048,
                        ffn=22016, tied=False)  # fmt: skip
qlora = TrainingRun(big, 1, 512, "bf16", recompute="full", lora_rank=64, lora_targets=("attention", "mlp"),
                    frozen_bits=4)  # fmt: skip
rows = {"LoRA, 16 bits": qlora.replace(frozen_bits=16), "8 bits": qlora.replace(frozen_bits=8), "QLoRA": qlora,
        "with 8-bit Adam": qlora.replace(optimizer="adam8bit")}  # fmt: skip
cards = {"RTX A6000": round(47.54 * 2**30), "L40": round(44.40 * 2**30)}
smallest = min(cards.values())
stack({name: estimate(run) for name, run in rows.items()}, "65 billion parameters fit a 48 GB card only in 4 bits",
      capacity=smallest, capacity_label=f"L40: {format_bytes(smallest, 'GB', 1)}",
      provenance="estimated from formulas")  # fmt: skip

# %%
N = big.parameters
print(f"N = {N / 1e9:.1f} billion, 12 bytes each (2 + 2, and Adam's 8): {format_bytes(12 * N, 'GB', 0)}: the 780 GB")
for b, s in ((1, 512), (1, 2048), (8, 512), (16, 512)):
    peak = estimate(qlora.replace(micro_batch=b, seq_len=s)).total
    fits = " and ".join(name for name, room in cards.items() if peak <= room) or "neither"
    print(f"QLoRA, {b:2d} × {s:5,} tokens: {format_bytes(peak, 'GB', 1)}, fits {fits}")
reveal("12.qlora", estimate(qlora).total)

# %% [markdown]
# Both of the paper's figures hold. The 780 GB are without [master weights](../docs/glossary.md#master-weights). But
# mind the conditions: with 8 sequences at once it depends on *which* 48 GB card, and with 16 neither is large enough.
#
# An estimate of a model that you cannot run is only as good as one of a model that you can:

# %%
from course_utils.figures import compare_bars

small = TrainingRun("tiny-llama", 4, 256, "bf16", recompute="full", lora_rank=16, lora_targets=("attention", "mlp"),
                    frozen_bits=4, optimizer="adam8bit")  # fmt: skip
compare_bars(estimate(small), measure(small), "A small QLoRA step, estimated and simulated: no gap", unit="MB")

# %% [markdown]
# Does a model learn as well beside rounded weights? **Your guess.** The sonnets once more, rank 8, but the blocks of
# the language model are in NF4. How many percent of what LoRA won beside exact weights does it win now?

# %%
predict("12.beside", unit="%")

# %%
bases = {"NF4": lambda w: nearest(w, nf4, 64), "2 bits by row": lambda w: absmax(w, 2, w.shape[1])}
beside = {name: fine_tune(8, model=with_rounded_blocks(model, rounding)) for name, rounding in bases.items()}
part = {name: (before["new"] - done.new) / (before["new"] - tuned[8].new) for name, done in beside.items()}
for name, won_now in part.items():
    print(f"LoRA beside {name:13s} wins more than nine tenths of it: {won_now > 0.9}")

# %% tags=["nbval-ignore-output"]
reveal("12.beside", 100 * part["NF4"], unit="%")

# %% [markdown]
# The factors learn the text, and repair on the way what rounding has broken, even with two bits. Ours is a small model
# and a small task; Dettmers et al. report the same of 4 bits on large ones (section 4).
#
# Now you. Which is the largest Llama that you can fine-tune on an RTX 4090 in 16 bits? In 4?

# %%
from course_utils.lessons.lora.widget import lora_explorer

lora_explorer("llama3-8b", micro_batch=1, seq_len=1024, precision="bf16", lora_rank=16, frozen_bits=4, recompute="full")

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | three times less memory (Hu et al., of GPT-3) | where states dominate; far less where many tokens do |
# | 350 GB to train GPT-3 with LoRA (Hu et al.) | its 16-bit weights alone: no activation is in it |
# | one 48 GB GPU for 65 billion parameters (Dettmers et al.) | with few tokens at once |
# | NF4 is information theoretically optimal (Dettmers et al.) | each value is used equally often; others err less |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(12)

# %% [markdown]
# ## Take home
# **Remember** LoRA removes the gradients and states of what does not learn; quantization shrinks the weights that stay;
# neither does much for the activations.
#
# **Breaks when** activations fill the step; when one outlier sets the scale for all; below four bits.
#
# **Cheat-sheet line** LoRA: r·(n_in + n_out) numbers a matrix, at most 16 bytes each; two units of work, not three ·
# frozen weights: 2 bytes, or 4.5 bits in NF4 · each bit halves the error · 8-bit Adam: 2 bytes a parameter, not 8.
#
# Now solve the [exercises of this lesson](../exercises/12_lora_and_quantization.ipynb).
