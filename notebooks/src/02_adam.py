# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 30
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Adam
#
# **60 minutes.** You should know what a gradient is, and from [lesson 01](01_where_did_the_memory_go.ipynb) what lives
# when in a training step. You need no GPU.
#
# In most scripts the optimizer is two lines. In memory it is larger than the model. Here is Adam in a few lines of
# PyTorch. Run it, change it, and account for every byte: its [states](../docs/glossary.md#optimizer-states), and what
# the step itself needs.

# %% [markdown]
# ## A narrow valley
# [Gradient descent](../docs/glossary.md#gradient-descent) moves the parameters θ against the gradient by a learning
# rate η:
#
# $$\theta \leftarrow \theta - \eta \nabla L$$
#
# It keeps nothing. So why does nobody train transformers with it?
#
# A loss is steep in some directions and flat in others. Take two parameters, with curvature 1 along the valley and 25
# across: $L = \frac{1}{2} (x^2 + 25 y^2)$. One η must serve both.
#
# **Your guess.** With the best η, how many steps bring the distance from the minimum down to 1 %?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("02.valley", unit="steps")

# %% [markdown]
# ### Estimate
# Along a direction of curvature c, a step multiplies the distance by $1 - \eta c$. Above η = 2/25, the steep direction
# diverges. The best η makes both factors equally large: $1 - \eta = -(1 - 25 \eta)$.

# %%
from math import ceil, log

waits_for("02.valley")
flat, steep = 1, 25
best = 2 / (flat + steep)
estimated = ceil(log(0.01) / log(1 - best * flat))
print(f"largest η that does not diverge: {2 / steep:.4f}, best η: {best:.4f}")
print(f"each step leaves {1 - best * flat:.1%} of the distance: 1 % after {estimated} steps")

# %% [markdown]
# ### Measure
# A *rule* gets the gradient g, its memory m and v, and the number t of the step. It returns the direction: for gradient
# descent, g itself.

# %%
import torch
from torch import Tensor


def gradient_descent(g: Tensor, m: Tensor, v: Tensor, t: int) -> Tensor:
    return g


def walk(rule, lr: float, steps: int = 300) -> list:
    """Return the places that a rule visits in the valley."""
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
from course_utils.lessons.adam.by_hand import steps_needed
from course_utils.lessons.adam.figures import walks

rates = (0.01, 0.04, best, 0.082)  # change this
paths = {f"η = {lr:.4f}": walk(gradient_descent, lr) for lr in rates}
counted = steps_needed(walk(gradient_descent, best))
reveal("02.valley", counted, unit="steps")
print(f"estimated {estimated} steps, counted {counted}")
walks(paths, "One step size for two directions: too short along the valley, or too long across it")

# %% [markdown]
# Change 0.082 to 0.079, just below the edge. Predict: does that walk arrive sooner than the best one?
#
# The number of steps grows with the *ratio* of the curvatures. In networks that ratio is not 25 but many powers of ten
# ([Sagun et al. 2016](https://arxiv.org/abs/1611.07476)). Three ideas help, and each costs memory.

# %% [markdown]
# ## Momentum, RMSProp, Adam
# [**Momentum**](../docs/glossary.md#momentum) adds up gradients. Opposite ones cancel, and those that always point the
# same way grow (Polyak 1964). It remembers one number per parameter, *m*.
#
# [**RMSProp**](../docs/glossary.md#rmsprop) divides the gradient by the root of *v*, a running mean of its square. That
# slows the steep direction down and speeds the flat one up (Tieleman and Hinton 2012). It keeps one number, too.
#
# [**Adam**](../docs/glossary.md#adam-adamw) does both ([Kingma and Ba 2015](https://arxiv.org/abs/1412.6980)): two
# numbers. Its name is short for *adaptive moment estimation*. In the code, methods that end in `_` change m and v in
# place.


# %%
def momentum(g: Tensor, m: Tensor, v: Tensor, t: int, beta1: float = 0.6) -> Tensor:
    return m.mul_(beta1).add_(g)


def rmsprop(g: Tensor, m: Tensor, v: Tensor, t: int, beta2: float = 0.9) -> Tensor:
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return g / (v.sqrt() + 1e-8)


def adam(g: Tensor, m: Tensor, v: Tensor, t: int, beta1=0.9, beta2=0.999, eps=1e-8) -> Tensor:
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)  # both began at zero: see below
    return m_hat / (v_hat.sqrt() + eps)


# %% [markdown]
# **Your guess.** How many steps does Adam need, with η = 0.5?

# %%
predict("02.adam_steps", unit="steps")

# %%
rates = {gradient_descent: best, momentum: 0.06, rmsprop: 0.1, adam: 0.5}  # change this
four = {rule.__name__.replace("_", " "): walk(rule, lr) for rule, lr in rates.items()}
reveal("02.adam_steps", steps_needed(walk(adam, 0.5)), unit="steps")
walks(four, "Momentum is the fastest here, and Adam is no faster than tuned gradient descent")

# %% [markdown]
# Adam does not win here: we *knew* the curvature and chose the best η for gradient descent. Double η for both: which
# still arrives?
#
# Adam needs no curvature. Make the loss a thousand times larger: what happens to each rule's first update?

# %%
for rule in rates:
    once = rule(torch.tensor([1.0]), torch.zeros(1), torch.zeros(1), 1)
    louder = rule(torch.tensor([1000.0]), torch.zeros(1), torch.zeros(1), 1)
    print(f"{rule.__name__:17s} the first update is {(louder / once).item():7,.1f} times as long")

# %% [markdown]
# Adam divides by the gradients' size, so the size cancels: η is the length of a step, not a factor of the gradient.
# Layers with large and small gradients get equal steps. That is what *v* is for.
#
# One text says that parameters with larger gradients get *smaller updates*. Do they? Try three sizes, steady and noisy.

# %%
sizes = torch.tensor([0.001, 1.0, 1000.0])
for noise in (0, 1, 10):
    torch.manual_seed(0)
    m, v, walked = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for t, dice in enumerate(torch.randn(2000), 1):
        walked += adam((1 + noise * dice) * sizes, m, v, t).abs()
    shown = ", ".join(f"{length:.2f}" for length in (walked / 2000).tolist())
    print(
        f"noise {noise:2d} times the mean: mean update at gradients of 0.001, 1 and 1,000: "
        f"{shown} learning rates"
    )

# %% [markdown]
# The updates are equally long. *Noise* shortens an update: opposite signs cancel in m, but their squares add up in v.
# Larger gradients only make $\eta / \sqrt{\hat v}$ smaller, the learning rate *per unit of gradient*.

# %% [markdown]
# ## Why bias correction?
# Both running means begin at zero. After one step $m = (1 - \beta_1) g$, a tenth of the gradient, and $v = (1 -
# \beta_2) g^2$, a thousandth of its square. After t steps m is a sum of gradients with the weights $(1 - \beta_1)
# \beta_1^i$; the newest has i = 0. A mean's weights must add up to 1. These add up to
#
# $$(1 - \beta_1) (1 + \beta_1 + \dots + \beta_1^{t-1}) = 1 - \beta_1^t$$
#
# [Bias correction](../docs/glossary.md#bias-correction) divides m by exactly that, and v by $1 - \beta_2^t$. With equal
# gradients, every update is then one learning rate long.
#
# **Your guess.** Without the correction, one update is furthest from that length. How long is it?

# %%
predict("02.bias", unit="learning rates")

# %%
from course_utils.figures import lines

waits_for("02.bias")
beta1, beta2 = 0.9, 0.999  # change this
t = torch.arange(1, 3001, dtype=torch.float64)
raw = (1 - beta1**t) / (1 - beta2**t).sqrt()
steps = t.tolist()
curves = {"without": (steps, raw.tolist()), "with": (steps, torch.ones_like(raw).tolist())}
title = "Without bias correction the first updates have the wrong length"
length = "length of the update, in learning rates"
lines(curves, title, "step", length, log_x=True, markers=False)

# %%
reveal("02.bias", raw[(raw - 1).abs().argmax()].item(), unit="learning rates")
print(
    f"step 1 by hand: (1 − β1) / √(1 − β2) = {(1 - beta1) / (1 - beta2) ** 0.5:.2f}; "
    f"in the figure: {raw[0]:.2f}"
)
print(f"the longest is step {raw.argmax() + 1}; still {raw[999]:.2f} at step 1,000")

# %% [markdown]
# Why not *shorter*? The update divides by √v, and at first √v is even further below its true value than m. Change β2 to
# 0.95. Predict: is the first update too long or too short?
#
# ### All of it as equations
# For each parameter θ, with its gradient g in step t:
#
# $$m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t$$
#
# $$v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$$
#
# $$\hat m_t = \frac{m_t}{1 - \beta_1^t} \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t}$$
#
# $$\theta_t = \theta_{t-1} - \eta \cdot \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon}$$
#
# | line | what | decided by |
# |---|---|---|
# | 1 | direction | β1: a mean over about 1/(1 − β1) gradients |
# | 2 | size | β2: a mean over about 1/(1 − β2) squares |
# | 3 | bias correction | t: it wears off as βᵗ goes to 0 |
# | 4 | update | η: the length of a step; ε: an update is half as long where √v̂ equals ε |
#
# The mean of a quantity is its *first moment*, and the mean of its square its *second moment*. Adam estimates both of
# the gradient, by m̂ and v̂: these are its two [moments](../docs/glossary.md#first-moment). The second is
# *uncentered*: no mean is subtracted before squaring. So v̂ is not the variance, although many texts call it that. A
# gradient that never changes has no variance, but v̂ is its square.
#
# A larger β1 averages away more noise, and turns more slowly. A larger β2 notices a jump in size later. GPT-3 took β2 =
# 0.95 ([Brown et al. 2020](https://arxiv.org/abs/2005.14165), appendix B). So did Llama 2, with ε = 10⁻⁵ ([Touvron et
# al. 2023](https://arxiv.org/abs/2307.09288), section 2.2). Watch ε = 10⁻⁸ take over:

# %%
gradients = torch.tensor([1e-4, 1e-7, 1e-8, 1e-9, 1e-11])
lengths = adam(gradients, torch.zeros(5), torch.zeros(5), t=1)
for g, length in zip(gradients.tolist(), lengths.tolist(), strict=True):
    print(f"gradient {g:.0e}: an update of {length:.3f} learning rates")

# %% [markdown]
# Far below ε, the update is $\eta \hat m / \varepsilon$: gradient descent again, and almost no step.

# %% [markdown]
# ## Adam by hand
# With `adam` from above, an optimizer is short. PyTorch's base class gives each parameter p a dictionary,
# `self.state[p]`. AdamW also shrinks the weights, in a line of its own ([Loshchilov and Hutter
# 2019](https://arxiv.org/abs/1711.05101)).


# %%
class HandAdamW(torch.optim.Optimizer):
    """AdamW with two states per parameter, made when the first step needs them."""

    def __init__(
        self, parameters, lr: float = 1e-3, eps: float = 1e-8, decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(
                    adam(p.grad, state["m"], state["v"], state["t"], eps=group["eps"]),
                    alpha=group["lr"],
                )


# %% [markdown]
# Does it equal PyTorch's AdamW? Test it on GPT-2 from PyTorch's layers: tiny now, full size on the GPU later.

# %%
from torch import nn
from torch.nn.functional import cross_entropy, linear


class GPT(nn.Module):
    def __init__(self, vocab=50257, positions=1024, hidden=768, layers=12, heads=12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        options = {"dropout": 0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, **options) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return linear(self.norm(x), self.words.weight)


# %% [markdown]
# Train the tiny model on a short text with each optimizer, from the same seed.
#
# **Your guess.** How many KB does Adam keep for its hundred thousand fp32 parameters?

# %%
from course_utils.lessons.shared.language_model import batches, vocabulary


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=len(vocabulary()), positions=128, hidden=64, layers=2, heads=4)


n = sum(p.numel() for p in small_model().parameters())
print(f"{n:,} parameters")
predict("02.small", unit="KB")


# %%
def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 40) -> Tensor:
    """Return the losses of all steps."""
    losses = []
    for tokens, targets in batches(steps, seed=0):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


settings = {"lr": 1e-3, "eps": 1e-8}  # change this
ours, theirs = small_model(), small_model()
hand = HandAdamW(ours.parameters(), **settings)
official = torch.optim.AdamW(theirs.parameters(), **settings)
losses, their_losses = train(ours, hand), train(theirs, official)
print(f"loss: {losses[0]:.1f} in the first step, {losses[-1]:.1f} in the last")
print(
    "largest difference between the two trainings' losses: "
    f"{(losses - their_losses).abs().max():.4f}, expected 0"
)

# %% [markdown]
# Do all *weights* agree as well?

# %% tags=["nbval-ignore-output"]
pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
apart = {name: (one - other).detach().abs() for (name, one), other in pairs}
biases = apart["blocks.0.self_attn.in_proj_bias"].chunk(3)
for name, difference in zip(("queries", "keys", "values"), biases, strict=True):
    print(f"first block, biases of the {name}: {difference.max():.6f}")
others = max(
    difference.max().item() for name, difference in apart.items() if "in_proj_bias" not in name
)
print(f"all weights except these biases: {others:.6f}")

# %% [markdown]
# The bias of the *keys* differs most. It adds the same number to all scores of a query, and softmax does not notice.
# Its true gradient is zero, and autograd computes rounding noise. Adam divides this noise by its own size, so only ε
# keeps the steps short. Set `eps` to 1e-16 and run both cells again. Predict the losses and the keys' biases.
#
# PyTorch's optimizer keeps for one tensor of weights:

# %%
for name, tensor in official.state[theirs.words.weight].items():
    print(
        f"{name:10s} {tuple(tensor.shape)!s:9s} {tensor.dtype} on the {tensor.device}: "
        f"{tensor.nbytes:6,} bytes"
    )
kept = sum(tensor.nbytes for state in official.state.values() for tensor in state.values())
print(f"all states: {kept:,} bytes; 8 bytes per parameter minus that: {8 * n - kept:,}")
by_hand = sum(state["m"].nbytes + state["v"].nbytes for state in hand.state.values())
reveal("02.small", by_hand, unit="KB")

# %% [markdown]
# *exp_avg* is m, *exp_avg_sq* is v: 8 bytes per parameter. `step` is t, a counter per tensor: 4 bytes on the *CPU*.
# Only a fused or capturable Adam keeps it on the GPU.

# %% [markdown]
# ## When do the states appear?
# `torch.optim.AdamW(...)` allocates nothing. The first `step()` makes the states. Train GPT-2 on eight sequences of 512
# tokens under [autocast](../docs/glossary.md#autocast).
#
# **Your guess.** How much higher does step 2 peak than step 1?

# %%
predict("02.second_step", unit="MB")

# %%
from course_utils import on_gpu

waits_for("02.second_step")
peaks, requested = [], []
with on_gpu():
    model = GPT().to("cuda")
    N = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(50257, (8, 512), device="cuda")  # change this
    for step in (1, 2, 3):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        requested.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        print(
            f"step {step}: peak {peaks[-1]:,} bytes, afterwards {torch.cuda.memory_allocated():,}"
        )

# %%
more, more_requested = peaks[1] - peaks[0], requested[1] - requested[0]
print(f"N = {N:,}; the gap, 8·N minus what step 2 has more than step 1: {8 * N - more:,} bytes")
print(
    f"in two parts: requested {8 * N - more_requested:+,}, "
    f"remainders of blocks {more_requested - more:+,}"
)
reveal("02.second_step", more, unit="MB")

# %% [markdown]
# The first step peaks *before* the states exist, so one successful step does not show that a configuration fits. Change
# (8, 512) to (1, 512). Predict: how much higher is step 2 now? (In which phase is the peak?)
#
# **The gap** of half a percent has two parts, and they add up to it. The first is one of cuBLAS's
# [workspaces](../docs/glossary.md#workspace). Forward's first matrix product allocates one, backward's first a second.
# Step 1 peaks between the two. From step 2 on, both are there.
#
# The second part is the allocator's. `memory_allocated()` counts whole blocks, and a remainder below 1 MiB is not split
# off ([lesson 12](12_allocator_and_fragmentation.ipynb)). In step 2 the tensors are in other blocks, with smaller
# remainders.
#
# `measure` takes such steps for any *run* and counts only tensors.

# %%
from course_utils import TrainingRun, measure
from course_utils.figures import timeline

three_steps = measure(TrainingRun("gpt2", micro_batch=8, seq_len=512), steps=3)
one, two, _ = three_steps.timeline.step_peaks().values()
print(f"the gap, 8·N minus what step 2 has more than step 1: {8 * N - (two - one):,} bytes")
title = "The two states appear at the end of step 1, and the peak rises by exactly their size"
timeline(three_steps, title)

# %% [markdown]
# The same picture in six lines of matplotlib. `curves()` has the bytes of each kind after every allocation and free.

# %%
import matplotlib.pyplot as plt

from course_utils.figures import COLOURS, show

curves = three_steps.timeline.curves()
fig, ax = plt.subplots(figsize=(7, 3))
for kind in ("optimizer_states", "activations"):  # change this: add "gradients"
    ax.plot([size / 1e9 for size in curves[kind]], color=COLOURS[kind], label=kind)
ax.legend()
ax.set(title="Two kinds of memory over three steps", xlabel="allocations and frees", ylabel="GB")
show(fig, "Activations rise and fall in each step; optimizer states rise once and stay.")

# %% [markdown]
# ## What other optimizers keep
# SGD keeps nothing, momentum one number. The others:
#
# * [Lion](../docs/glossary.md#lion) keeps one number and takes its sign ([Chen et al.
#   2023](https://arxiv.org/abs/2302.06675)).
# * [Adafactor](../docs/glossary.md#adafactor) keeps only a row and a column for each matrix of *v* ([Shazeer and Stern
#   2018](https://arxiv.org/abs/1804.04235)).
# * [8-bit Adam](../docs/glossary.md#8-bit-adam) keeps both of Adam's numbers in 8 bits, with a scale for each block of
#   numbers ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861) take 2,048; here it is 256).
# * [Muon](../docs/glossary.md#muon) keeps one number for the blocks' matrices and leaves embeddings and vectors to
#   AdamW ([Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)).
#
# **Your guess.** How many bytes per parameter does Muon keep for GPT-2, in fp32?

# %%
embeddings = model.words.weight.numel() + model.positions.weight.numel()
print(f"{embeddings / N:.0%} of GPT-2's parameters are embeddings of words and positions")
predict("02.muon", unit="bytes")


# %%
waits_for("02.muon")


def kept_after_a_step(optimizer: torch.optim.Optimizer) -> int:
    optimizer.step()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor) and tensor.is_cuda)


with on_gpu():
    weights = list(model.parameters())
    for p in weights:
        p.grad = torch.zeros_like(p)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or "blocks" not in name]
    states = {"sgd": kept_after_a_step(torch.optim.SGD(weights, lr=0.1))}
    states["momentum"] = kept_after_a_step(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    muon = kept_after_a_step(torch.optim.Muon(matrices))
    states["muon"] = muon + kept_after_a_step(torch.optim.AdamW(rest))
    states["adamw"] = kept_after_a_step(torch.optim.AdamW(weights, amsgrad=False))  # change this
print(", ".join(f"{name} {size / N:.2f}" for name, size in states.items()), "bytes per parameter")

# %% [markdown]
# Set `amsgrad=True`: then AdamW divides by the largest v so far. Predict its bytes.
#
# The others need helpers: Lion and 8-bit Adam are the course's short versions. PyTorch's Adafactor reads a weight's
# norm, which a simulated GPU does not have.

# %%
from course_utils import estimate, plus_minus
from course_utils.figures import bars

plain = TrainingRun("gpt2", micro_batch=1, seq_len=128, precision="fp32", attention="efficient")
for name in ("lion", "adam8bit", "adafactor"):
    measured = measure(plain.replace(optimizer=name), steps=1)
    states[name] = measured.moments["end of step 1"]["optimizer_states"]
for name, size in states.items():
    estimated = estimate(plain.replace(optimizer=name))["optimizer_states"]
    print(f"{name:9s} estimated {estimated:11,} bytes, gap {plus_minus(estimated - size)}")
per_parameter = {name: size / N for name, size in sorted(states.items(), key=lambda one: one[1])}
title = "Adam keeps 8 bytes per parameter; most others keep half of that or less"
reveal("02.muon", per_parameter["muon"], unit="bytes")
source = str(measured.provenance)
bars(per_parameter, title, unit="bytes per parameter", kind="optimizer_states", provenance=source)

# %% [markdown]
# Muon is between 4 and 8 bytes, because AdamW handles the embeddings.

# %% [markdown]
# ## What the step itself needs
# The step also needs room: $\sqrt{\hat v} + \varepsilon$ is a new tensor. How many exist at once depends on how PyTorch
# goes through the parameters: [*for-loop, foreach, fused*](../docs/glossary.md#foreach-for-loop-fused).
#
# **Your guess.** How many bytes per parameter does AdamW with foreach need on top, at its fullest moment?

# %%
predict("02.transient", unit="bytes")


# %%
def comes_and_goes(**way) -> int:
    """Return the bytes that one step of AdamW needs on top of weights, gradients and states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **way)
    optimizer.step()  # makes the states
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return torch.cuda.max_memory_allocated() - before


# change this
ways = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
with on_gpu():
    came = {name: comes_and_goes(**way) for name, way in ways.items()}
print(", ".join(f"{name} {size / N:.2f}" for name, size in came.items()), "bytes per parameter")
largest = model.words.weight.nbytes
for name, estimated in {"for-loop": 2 * largest, "foreach": 4 * N, "fused": 0}.items():
    print(f"{name:9s} estimated {estimated:11,} bytes, gap {plus_minus(estimated - came[name])}")
reveal("02.transient", came["foreach"] / N, unit="bytes")

# %% [markdown]
# **Foreach** computes √v for *all* parameters before it uses any: 4 bytes per parameter in fp32, plus what the
# allocator does not split off. The **for-loop** has two temporaries for one tensor at a time: at most twice the
# largest, the embedding. **Fused** has none: one kernel reads g, m and v and writes the weight. Which of the three is
# PyTorch's default on a GPU? Guess, then add `"default": {}` to `ways`.
#
# This matters where the peak is in the optimizer phase: with small batches or
# [recomputation](../docs/glossary.md#activation-recomputation). There, `fused=True` is this course's cheapest saving.
# Which is the fastest?

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("optimizer")

# %% [markdown]
# ## Sixteen bytes, plus the step
# Training with [master weights](../docs/glossary.md#master-weights) keeps 2 bytes for the 16-bit weight, 2 for the
# gradient, 4 for the fp32 master, 8 for m and v: 16.
#
# Some training loops first convert *all* gradients to fp32, then call the optimizer. Megatron-LM's does, in
# `_copy_model_grads_to_main_grads`
# ([optimizer.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/optimizer.py)). It prefers a
# fused Adam, from Transformer Engine or Apex. If neither is installed, it takes PyTorch's AdamW
# ([\_\_init\_\_.py](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/__init__.py)), which is
# foreach on a GPU.
#
# **Your guess.** All gradients are converted, the 16-bit ones are freed, and foreach AdamW steps. How many bytes per
# parameter are alive at the fullest moment?

# %%
predict("02.upcast", unit="bytes")

# %%
waits_for("02.upcast")
paper = {"weights": 2, "gradients in fp32": 4, "master weights": 4, "m and v": 8}
paper["foreach's tensors"] = 4
print(" + ".join(f"{size} ({name})" for name, size in paper.items()), "=", sum(paper.values()))


# %%
def fullest_moment(at_once: bool) -> float:
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
with on_gpu():
    at_once, one_by_one = fullest_moment(at_once=True), fullest_moment(at_once=False)
print(f"at once {at_once:.2f}, one at a time {one_by_one:.2f} bytes per parameter")
reveal("02.upcast", at_once, unit="bytes")

# %% [markdown]
# All at once, the step needs 6 bytes more than 16: 2 for the wider gradients, 4 for foreach. What the allocator does
# not split off comes on top. If you [upcast](../docs/glossary.md#upcasting) *one at a time*, only one tensor needs
# these 6. One word saves foreach's 4 in your own loop: change `foreach` to `fused`, and predict both numbers.
#
# A `TrainingRun` names the way in its optimizer. `"adamw"` is PyTorch's default, foreach, where weights are fp32: in
# plain fp32 and under autocast. With 16-bit weights and fp32 masters, `"adamw"` upcasts and updates *one tensor at a
# time*, and `"adamw-foreach"` all at once. `"adamw-fused"` is fused everywhere:

# %%
from course_utils import moments

for precision in ("amp-bf16", "bf16-master"):
    for optimizer in ("adamw", "adamw-foreach", "adamw-fused"):  # change this
        run = TrainingRun("gpt2", seq_len=128, precision=precision, optimizer=optimizer)
        peak = moments(run)["optimizer step"].total
        print(
            f"{precision:11s} {optimizer:13s} "
            f"{peak / N:5.2f} bytes per parameter in the optimizer step, estimated"
        )

# %% [markdown]
# So compare two recipes only if the optimizer goes the same way in both.

# %% [markdown]
# ## K, the optimizer's bytes per parameter
# The [ZeRO](../docs/glossary.md#zero) paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.1)
# calls the optimizer's bytes per parameter, master weights included, [K](../docs/glossary.md#k). With 16-bit weights
# and gradients, a run keeps $(2 + 2 + K) \cdot N$ bytes.
#
# **Your guess.** What is K for mixed-precision Adam? And how many GB are $(2 + 2 + K) \cdot N$ for GPT-2 XL?

# %%
xl = TrainingRun("gpt2-xl", attention="efficient")
print(f"GPT-2 XL: N = {xl.model.parameters:,}")
predict("02.xl", unit="GB")

# %%
from course_utils import format_bytes
from course_utils.estimating.published import zero_state_bytes
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes

choices = {"bf16-master": ("adamw", "momentum", "adafactor")}  # change this
choices |= {"fp32": ("adamw",), "bf16": ("adamw",)}
parts = (parameter_bytes, gradient_bytes, optimizer_state_bytes)
for precision, optimizers in choices.items():
    for name in optimizers:
        run = xl.replace(precision=precision, optimizer=name)
        sizes = [size(run) / run.model.parameters for size in parts]
        print(
            f"{precision:11s} {name:9s} weights {sizes[0]:.0f}, gradients {sizes[1]:.0f}, "
            f"K = {sizes[2]:5.2f}"
        )
reveal("02.xl", sum(zero_state_bytes(xl.model.parameters).values()))
rounded = format_bytes(sum(zero_state_bytes(1_500_000_000).values()))
print(f"with 1.5 billion parameters, as ZeRO rounds: {rounded}")

# %% [markdown]
# fp32 Adam keeps 4 + 4 + 8 and mixed-precision Adam 2 + 2 + 12: both are 16. The master copy costs what the 16-bit
# weights and gradients save. Add `"lion"` to fp32's optimizers, and predict its K.

# %% [markdown]
# ## Turn the knobs
# Use the sliders or the line below. At which η does gradient descent leave the valley, and how does the steepness
# change that? Turn the valley by 45°: which two optimizers notice? Set Adam's β1 to 0: what is missing?
#
# <details><summary>Answers</summary>
#
# Beyond η = 2/steepness. RMSProp and Adam notice: each axis has its own *v*, and in a turned valley the axes no longer
# separate the steep direction from the flat one. With β1 = 0, Adam is RMSProp with bias correction.
#
# </details>

# %%
from course_utils.lessons.adam.widget import walker

walker("Adam", rate=0.5)  # change this

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

sizes = Counter()
for state in optimizer.state.values():
    for name, tensor in state.items():
        if torch.is_tensor(tensor):
            sizes[f"{name}, {tensor.dtype} on {tensor.device.type}"] += tensor.nbytes
parameters = sum(p.numel() for p in model.parameters())
for name, size in sizes.items():
    print(f"{name:32s} {size:12,} bytes, {size / parameters:5.2f} per parameter")

# %% [markdown]
# ## Take home
# **Remember** Adam keeps two numbers per parameter, 8 bytes in fp32, and makes them in the first step. With master
# weights, K = 12. The step itself needs 4 bytes per parameter with foreach, nothing when fused.
#
# **Breaks when** all gradients are upcast at once and AdamW is foreach: 16 bytes per parameter become 22, and
# `fused=True` saves 4 of them. And when you try only one step: the states are not there yet.
#
# **Cheat-sheet line** optimizer bytes per parameter, fp32 states: SGD 0 · Adafactor ≈ 0 · 8-bit Adam ≈ 2 · momentum,
# Lion 4 · Muon 4 to 8 · Adam 8 · with fp32 masters 4 more · foreach: 4 more for a moment.
#
# This lesson corrects claim 30 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/02_adam.ipynb).
