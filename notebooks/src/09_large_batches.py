# ---
# jupyter:
#   course:
#     minutes: 45
#     cpu_seconds: 35
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · Large batches
#
# **45 minutes.** You should know [lesson 08](08_gradient_accumulation.ipynb): memory limits only the
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch). So this lesson is about learning. How large should a
# batch be, and what must change when it grows? Later lessons do not need it. You need no GPU.

# %% [markdown]
# ## The path of θ
# Why is a step on each micro-batch not the same as one step on all? Fit a line to 100 points, with two parameters θ,
# and draw their path. The left path has 8 steps, each on all 100 points, or, which is the same, on 25 accumulated
# micro-batches of 4.
#
# **Your guess.** The middle path has a step on each 4 points, at the same rate, for 8 passes. How many steps?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("09.steps", unit="steps")

# %%
import torch

from course_utils.lessons.accumulation.micro_batches import LineFit

fit = LineFit()  # 100 points near the line y = 1 + 2x, seed 0


def walk(size, rate, passes=8):
    theta = torch.tensor([-1.5, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=rate)
    path = [theta.tolist()]
    for x, y in list(zip(fit.x.split(size), fit.y.split(size), strict=True)) * passes:
        optimizer.zero_grad()
        loss = (theta[0] + theta[1] * x - y).square().mean() / 2
        loss.backward()
        optimizer.step()
        path.append(theta.tolist())
    return path


# %%
from course_utils.lessons.accumulation.figures import theta_paths

paths = {
    "a step on all 100": walk(size=100, rate=0.5),
    "a step on each 4, same rate": walk(size=4, rate=0.5),
    "a step on each 4, rate / 25": walk(size=4, rate=0.5 / 25),  # change this
}
reveal("09.steps", len(paths["a step on each 4, same rate"]) - 1, unit="steps")
title = "Small steps at the same rate wander; at 1/25 of the rate they follow the large batch"
theta_paths(fit, paths, title)

# %% [markdown]
# At the same rate, many small steps reach the minimum sooner. Then they jump around it, because each sees only 4
# points. At 1/25 of the rate η, 25 steps go about as far as one large one: while the gradient hardly changes, they add
# up the same gradients.
#
# Change the last path to `size=1`. Which rate does a step on every single point need? The same walk with sliders:

# %%
from course_utils.lessons.accumulation.widget import theta_sliders

theta_sliders(size=4, group=1)

# %% [markdown]
# <details><summary>An answer</summary>
#
# It needs 1/100 of the rate, 0.005. With the sliders, every pair that makes 100 walks the large batch's path at its
# rate: 1 · 100, 4 · 25, 50 · 2.
#
# </details>

# %% [markdown]
# ## How large should a batch be?
# A batch's gradient is the mean of its sequences' gradients: the true gradient G plus noise. The noise shrinks as the
# batch B grows.
#
# The squared length of a batch's gradient is on average
#
# $$|G|^2 + \frac{\text{tr}(\Sigma)}{B}$$
#
# where tr(Σ) is the mean squared length of one sequence's noise. The two are equal at
# $B = \text{tr}(\Sigma) / |G|^2$, the [noise scale](../docs/glossary.md#gradient-noise-scale) ([McCandlish et al.
# 2018](https://arxiv.org/abs/1812.06162), section 2). Check the formula with the gradients of 256 single sequences:

# %%
from torch.nn.functional import cross_entropy

from course_utils.lessons.shared.language_model import batches, language_model, train_language_model

tokens, targets = map(torch.cat, zip(*batches(256, 1, seed=1), strict=True))


def flat(tensors):
    return torch.cat([one.flatten() for one in tensors])


def mean_loss(model, chosen):
    return cross_entropy(model(tokens[chosen]).flatten(0, 1), targets[chosen].flatten())


def sequence_gradients(model):
    losses = (mean_loss(model, slice(number, number + 1)) for number in range(256))
    weights = list(model.parameters())
    return torch.stack([flat(torch.autograd.grad(loss, weights)) for loss in losses])


# %%
def signal_and_noise(each):
    G = each.mean(0)
    noise = (each - G).square().sum() / (len(each) - 1)  # tr(Σ)
    # |G|², without the noise that 256 sequences leave in G
    return G.square().sum() - noise / len(each), noise


each = sequence_gradients(language_model(seed=0))
signal, noise = signal_and_noise(each)
lengths = {}
for B in (1, 2, 4, 8, 16, 32):  # change this
    of_batches = each.view(256 // B, B, -1).mean(1)
    lengths[B] = of_batches.square().sum(1).mean()
    print(
        f"B = {B:2d}: |G|² + tr(Σ)/B = {signal + noise / B:5.2f}, "
        f"mean over batches {lengths[B]:5.2f}"
    )

# %% [markdown]
# **The gap** is chance: few batches of 32 fit into 256 sequences. Add 128 to the sizes. How large is the gap there, and
# why?
#
# Instead of each sequence's gradient, two batch sizes are enough: two equations for two unknowns (appendix A.1 of the
# paper). Accumulation gives both for nothing: the length of a micro-batch's gradient, and that of the sum.

# %%
small, large = 2, 32
equations = torch.tensor([[1, 1 / small], [1, 1 / large]])
by_two = torch.linalg.solve(equations, torch.stack([lengths[small], lengths[large]]))
print(
    "from every sequence: "
    f"|G|² = {signal:.1f}, tr(Σ) = {noise:.1f}, noise scale {noise / signal:.1f}"
)
print(
    f"from B = 2 and 32:   |G|² = {by_two[0]:.1f}, "
    f"tr(Σ) = {by_two[1]:.1f}, scale {by_two[1] / by_two[0]:.1f}"
)

# %% [markdown]
# With random weights the noise scale is tiny: all sequences agree on what to learn first, which characters are
# frequent.
#
# **Your guess.** What is the noise scale after 300 steps, in sequences of 32 characters, rounded to a power of two?

# %%
predict("09.noise", unit="sequences")

# %%
# AdamW, lr=3e-3, seed 0
trained = {steps: train_language_model(steps=steps).model for steps in (20, 300)}
gradients = {steps: sequence_gradients(model) for steps, model in trained.items()}
for steps, each in gradients.items():
    signal, noise = signal_and_noise(each)
    near = [2 ** value.log2().round().item() for value in (signal, noise, noise / signal)]
    print(
        f"after {steps:3d} steps: "
        f"|G|² near {near[0]:g}, tr(Σ) near {near[1]:g}, noise scale near {near[2]:g}"
    )
reveal("09.noise", near[2], unit="sequences")

# %% [markdown]
# Within a few steps, the model learns what all sequences share, and |G|² shrinks. What is left differs from sequence to
# sequence. From then on both grow, but tr(Σ) far more. By this scale, the batch that is worth its price grows, too.
#
# What is it worth? A step on B sequences should gain this part of the best possible step's gain, each at its best rate
# (section 2.2):
#
# $$\frac{1}{1 + B_{\text{noise}} / B}$$
#
# **B_noise** is also a noise scale, but noise counts only where the loss curves. H holds the loss's second
# derivatives:
#
# $$B_{\text{noise}} = \frac{\text{tr}(H \Sigma)}{G^T H G}$$
#
# If the loss curves alike in all directions, H cancels and tr(Σ)/|G|² is left. Is that good enough? H is far too
# large to compute, but H times a vector is only one more backward through the gradient:


# %%
def curvature_noise(model, each):
    """Return tr(HΣ)/(GᵀHG), from the gradients of the first sequences."""
    count, weights = len(each), list(model.parameters())
    slopes = torch.autograd.grad(mean_loss(model, slice(count)), weights, create_graph=True)
    slope = flat(slopes)
    G = slope.detach()

    def bend(way):  # wayᵀ·H·way
        return way @ flat(torch.autograd.grad(slope @ way, weights, retain_graph=True))

    noise = sum(bend(one - G) for one in each) / (count - 1)
    return noise / (bend(G) - noise / count)


# %% tags=["nbval-ignore-output"]
steps, count = 300, 32  # change this
each = gradients[steps][:count]
signal, noise = signal_and_noise(each)
B_noise = curvature_noise(trained[steps], each)
print(f"after {steps} steps: B_noise {B_noise:.1f}, tr(Σ)/|G|² {noise / signal:.1f}")

# %% [markdown]
# The loss does not curve equally in all directions: here, B_noise is the smaller one. After 20 steps it is the larger
# one, and other first weights may reverse both. So tr(Σ)/|G|² tells the order of magnitude, and not more: this is one
# moment of one tiny model. (How much is chance? Change the count to 64.)
#
# To reach the same loss, batches of B take $1 + B_{\text{noise}} / B$ times the fewest steps, and
# $1 + B / B_{\text{noise}}$ times the fewest examples (section 2.3).

# %%
ratios = 2.0 ** torch.arange(-3, 4)  # change this
steps, examples = 1 + 1 / ratios, 1 + ratios
for row in torch.stack([ratios, steps, examples]).T.tolist():
    print(
        "B = {:5.3f} · B_noise: "
        "{:5.3f} times the fewest steps, {:5.3f} times the fewest examples".format(*row)
    )

# %% [markdown]
# B = B_noise is the [critical batch size](../docs/glossary.md#critical-batch-size). Below it, twice the batch nearly
# halves the steps. Above it, you compute more for hardly fewer steps.

# %% [markdown]
# ## A batch that grows
# For language models, [Kaplan et al. 2020](https://arxiv.org/abs/2001.08361) measured a critical batch that is a power
# law of the loss L only, whatever the model's size:
#
# $$B_{\text{crit}} = \frac{B^{\ast}}{L^{1 / \alpha_B}}$$
#
# with $B^{\ast} \approx 2 \cdot 10^8$ tokens and $\alpha_B \approx 0.21$ (eq. 1.4). MiniMax-01 fitted its own law,
# and doubles its batch at the losses 1.98, 1.77 and 1.58 ([MiniMax 2025](https://arxiv.org/abs/2501.08313), section
# 4.2 and figure 13). In logarithms, a power law is a straight line:

# %%
losses = torch.tensor([1.98, 1.77, 1.58])
theirs = torch.tensor([32.0, 64.0, 128.0])  # million tokens, MiniMax-01, from these losses on
kaplan = 200 / losses ** (1 / 0.21)  # change this
for row in torch.stack([losses, kaplan, theirs]).T.tolist():
    print(
        "loss {:.2f}: Kaplan et al. {:4.1f} million tokens, MiniMax-01 {:3.0f} million".format(*row)
    )
line = torch.stack([torch.ones(3), losses.log()], dim=1)
fitted = torch.linalg.lstsq(line, theirs.log()[:, None]).solution
for name, alpha in (("Kaplan et al.", 0.21), ("MiniMax-01", -1 / fitted[1].item())):
    print(
        f"{name:13s} α_B = {alpha:.2f}: "
        f"the batch doubles whenever the loss falls by {1 - 2**-alpha:.0%}"
    )

# %% [markdown]
# The constants differ, because a loss per token depends on text and tokenizer. So fit your own. (Which α_B makes
# Kaplan's batch at a loss of 1.58 as large as MiniMax-01's?)
#
# **Your guess.** MiniMax-01's batch has 16 million tokens at first, 32 million after 69 billion tokens, 64 million
# after 790 billion, and 128 million after 4,700 billion. With 16 million throughout, 4,700 billion tokens take 293,750
# steps. How many thousand does the ramp take?

# %%
predict("09.ramp", unit="thousand steps")

# %%
from course_utils import plus_minus

ends = torch.tensor([0.0, 69.0, 790.0, 4700.0])  # billion tokens
steps = ends.diff() * 1000 / torch.tensor([16.0, 32.0, 64.0])
misread = torch.tensor([0.0, 69.0, 690.0, 4700.0]).diff() * 1000 / torch.tensor([16.0, 32.0, 64.0])
print("steps at 16, 32 and 64 million tokens:", steps.round().int().tolist())
gap = plus_minus(misread.sum() - steps.sum())
print(f"with 690 billion instead of 790, as in a lecture: {gap} steps")
reveal("09.ramp", round(steps.sum().item() / 1000, 1), unit="thousand steps")

# %% [markdown]
# The ramp saves most steps at the end. In memory it costs nothing: accumulation takes more micro-batches.

# %% [markdown]
# ## Another batch, another rate
# A batch k times as large takes 1/k of the steps per epoch. To get as far, multiply the learning rate by k. This is the
# [**linear scaling rule**](../docs/glossary.md#linear-scaling-rule) of [Goyal et al.
# 2017](https://arxiv.org/abs/1706.02677) for SGD: the picture of θ, read backwards.
#
# For Adam and similar optimizers the rule is **√k**, because they divide by the gradient's size. Where noise dominates,
# most of a step is noise, and a larger batch hardly changes the step's length. But it makes the noise √k times smaller,
# so after the division the *useful* part, along G, is √k times larger. Here is Adam's own formula with made-up
# gradients: a small slope G, and noise that shrinks with the batch.

# %%
G = 0.01
for B in (1, 4, 16, 64):  # change this
    dice = torch.Generator().manual_seed(0)
    m, v = torch.zeros(20_000), torch.zeros(20_000)
    for _ in range(400):
        gradient = G + torch.randn(20_000, generator=dice) / B**0.5
        m.lerp_(gradient, 1 - 0.9)
        v.lerp_(gradient.square(), 1 - 0.99)
    step = m / v.sqrt()
    print(
        f"B = {B:2d}: a step's length {step.square().mean().sqrt():.3f}, "
        f"its part along G {step.mean():.3f}"
    )

# %% [markdown]
# So the useful part grows by √k on its own, and the rate adds the other √k. Granziol et al. argue for this from random
# matrix theory ([2022](https://arxiv.org/abs/2006.09092)). Malladi et al. derive it
# ([2022](https://arxiv.org/abs/2205.10287)) if β₁, β₂ and ε change with the batch, too.
#
# Goyal et al. trained ResNet-50 on ImageNet. Batches of 256 at rate 0.10 gave 23.60 % error. **Your guess.** What
# percentage do batches of 8,192 give, with as many epochs and the same rate?

# %%
predict("09.goyal", unit="%")

# %%
from course_utils.lessons.accumulation.large_batch_results import GOYAL, published

for row in GOYAL:
    print(f"batch {row.batch:5,}, rate {row.rate:8s} error {row.error:.2f} % ± {row.spread:.2f}")
reveal("09.goyal", published(8192, "0.10").error, unit="%")

# %% [markdown]
# Unscaled, the large batch takes 1/32 of the steps and does not get far. Scaled by k = 32, it loses next to nothing.
# Scaled by √32, it ends in between. (The paper's caption gives 23.68 % for rate 0.1. In the table it belongs to 0.20.)
#
# At first the gradient changes quickly, so k small steps are not one large one, and the large rate throws the weights
# out. A [warm-up](../docs/glossary.md#warm-up) lets the rate grow: from nothing,
# $\alpha_t = \alpha_{\text{max}} \cdot t / T_w$, or from the small batch's rate, as Goyal et al. do over 5 epochs:

# %%
from torch.optim.lr_scheduler import LinearLR

k, small = 32, 0.1  # change this
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=small * k)
warm_up = LinearLR(optimizer, start_factor=1 / k, total_iters=5)
rates = []
for _ in range(8):  # epochs
    rates += warm_up.get_last_lr()
    optimizer.step()
    warm_up.step()
print("linear:", [f"{rate:.2f}" for rate in rates], f"with √k: {small * k**0.5:.2f}")

# %% [markdown]
# Change k to 8. Which of the numbers stay?

# %% [markdown]
# ## Try it
# A four-layer classifier trains on made-up data for 6 epochs, with batches of 16 and of 512: again k = 32. Large first
# weights make it start as steep as a deep network.

# %%
torch.set_num_threads(1)  # products this small are slower with more
dice = torch.Generator().manual_seed(0)
x = torch.randn(12288, 20, generator=dice)  # the last 4,096 are for the test
hidden = torch.tanh(x @ torch.randn(20, 32, generator=dice) * 1.5 / 20**0.5)
scores = hidden @ torch.randn(32, 10, generator=dice)
y = (scores + 0.3 * torch.randn(12288, 10, generator=dice)).argmax(1)


def classifier(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(*sizes) for sizes in ((20, 64), (64, 64), (64, 64), (64, 10))]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=1.3 * (2 / layer.in_features) ** 0.5)
        torch.nn.init.zeros_(layer.bias)
    parts = [part for layer in layers for part in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(*parts[:-1])


# %%
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR


def test_error(batch, rate, warm_from=None, make=torch.optim.SGD, seed=0, **options):
    """Percent wrong after 6 epochs.

    The warm-up takes 2; the rate drops to 1/10 after 4 and again after 5.
    """
    model = classifier(seed)
    steps = 8192 // batch
    optimizer = make(model.parameters(), lr=rate, **options)
    warm_up = LinearLR(optimizer, start_factor=(warm_from or rate) / rate, total_iters=2 * steps)
    drops = MultiStepLR(optimizer, [4 * steps, 5 * steps], gamma=0.1)
    schedule = ChainedScheduler([warm_up, drops])
    for epoch in range(6):
        order = torch.randperm(8192, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(batch):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return 100 * (model(x[8192:]).argmax(1) != y[8192:]).float().mean().item()


# %% tags=["nbval-ignore-output"]
from course_utils.figures import bars

n, eta, k = 16, 0.02, 32  # change this
settings = {
    "n, η": (n, eta),
    f"{k}n, η": (k * n, eta),
    f"{k}n, √{k}·η, warm-up": (k * n, eta * k**0.5, eta),
    f"{k}n, {k}·η, warm-up": (k * n, eta * k, eta),
    f"{k}n, {k}·η, no warm-up": (k * n, eta * k),
}
errors = {name: test_error(*setting, momentum=0.9) for name, setting in settings.items()}
title = (
    "SGD: with k and a warm-up the large batch keeps up; "
    "unscaled, with √k or without warm-up it does not"
)
source = f"test error after 6 epochs; SGD, n = {n}, η = {eta}, seed 0; trained on the CPU"
bars(errors, title, unit="%", provenance=source)

# %% [markdown]
# The shape is that of Goyal et al.'s table. SGD has [momentum](../docs/glossary.md#momentum) here.
#
# Is k really the factor? Try a quarter of the rate, and four times the rate:

# %% tags=["nbval-ignore-output"]
size, rate = k * n, k * eta  # change this
for part in (1 / 4, 1, 4):
    error = test_error(size, part * rate, part * eta, momentum=0.9)
    print(f"batches of {size}, a rate of {part * rate:5.3f}: {error:.1f} %")

# %% [markdown]
# The large batch's best rate is near k·η. Is the small batch's near η? Change the first line to `n, eta`: a quarter is
# a little worse here, too, and four times the rate is far worse. So the best rate did grow by about k. (Try a half and
# twice the rate. Which batch minds more?)
#
# And Adam: unscaled, by √k without and with a warm-up, and by k with a warm-up.

# %% tags=["nbval-ignore-output"]
eta, k, Adam = 0.012, 32, torch.optim.Adam  # change this
settings = {
    "n, η": (n, eta),
    f"{k}n, η": (k * n, eta),
    f"{k}n, √{k}·η, no warm-up": (k * n, eta * k**0.5),
    f"{k}n, √{k}·η, warm-up": (k * n, eta * k**0.5, eta),
    f"{k}n, {k}·η, warm-up": (k * n, eta * k, eta),
}
by_adam = {name: test_error(*setting, make=Adam, fused=True) for name, setting in settings.items()}
title = "Adam: with √k and a warm-up the large batch keeps up; with k it fails even with one"
source = f"test error after 6 epochs; Adam, n = {n}, η = {eta}, seed 0; trained on the CPU"
bars(by_adam, title, unit="%", provenance=source)

# %% [markdown]
# √k is not a law either. Change η to 0.006: from a rate below the best one, k with a warm-up works nearly as well. One
# seed and a made-up problem prove nothing about a large model. (Try `seed=1`.) And beyond the critical batch size, no
# rate makes a step much better.

# %% [markdown]
# ## In your own script
# Measure the noise scale while you accumulate, and warm up the rate. You need only the squared length of the first
# micro-batch's gradient and that of the sum.

# %% tags=["nbval-ignore-output"]
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
k, b, short, long = 8, 16, 0.0, 0.0
truth = torch.randn(20, 10)
for _ in range(50):
    optimizer.zero_grad()
    for number in range(k):
        x = torch.randn(b, 20)  # your data: a micro-batch of b examples
        wanted = (x @ truth).argmax(1).to(device)
        (nn.functional.cross_entropy(model(x.to(device)), wanted) / k).backward()
        if number == 0:
            short += k**2 * sum(weight.grad.square().sum().item() for weight in model.parameters())
    long += sum(weight.grad.square().sum().item() for weight in model.parameters())
    optimizer.step()
    warm_up.step()
print(f"noise scale: {k * b * (short - long) / (k * long - short):.0f} examples")

# %% [markdown]
# ## Take home
# **Remember** A batch is worth its price up to the noise scale, which grows during training. A larger batch needs a
# larger rate, and a warm-up to reach it.
#
# **Breaks when** the batch is far above the noise scale, the best rate of Adam is scaled by k, or a large rate starts
# without a warm-up.
#
# **Cheat-sheet line** |gradient|² = |G|² + tr(Σ)/B · a batch is worth it up to tr(Σ)/|G|² · rate: SGD ×k, Adam ×√k,
# with a warm-up.
#
# This lesson corrects claims 17 and 18 of [what the sources got wrong](../docs/errata.md).
#
# Now solve exercises 3 and 4 of [lessons 08 and 09](../exercises/08_gradient_accumulation.ipynb).
