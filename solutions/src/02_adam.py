# ---
# jupyter:
#   course:
#     minutes: 70
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 02 · Adam
#
# **70 minutes** for all six; each one says its own. You should know what [lesson 02](../notebooks/02_adam.ipynb) shows,
# and for the last two how a Python class works. No GPU is needed.
#
# Each exercise asks for one function or class. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
import torch

from course_utils.lessons.adam import checks as check

# %% [markdown]
# ## 1 · What each one remembers
# **Difficulty** ●○○○○ · **7 minutes** · **Trains** knowing an optimizer by its states
#
# One fp32 matrix of `rows` × `columns` parameters. How many bytes does each optimizer keep of it from one step to the
# next? Take `"sgd"`, `"momentum"`, `"adam"`, `"adafactor"` and `"adam8bit"`. The last one stores one byte for each
# number of either moment, and with every 256 such numbers one fp32 scale. (Its matrix is large and divides by 256.)


# %%
def state_bytes(optimizer: str, rows: int, columns: int) -> int:
    """Bytes of the states that `optimizer` keeps of an fp32 matrix."""
    ### BEGIN SOLUTION Return the bytes of all states of this optimizer.
    elements = rows * columns
    sizes = {
        "sgd": 0,
        "momentum": 4 * elements,
        "adam": 4 * elements + 4 * elements,
        "adafactor": 4 * rows + 4 * columns,
        "adam8bit": 2 * (elements + 4 * (elements // 256)),
    }
    return sizes[optimizer]
    ### END SOLUTION


# %%
check.state_bytes(state_bytes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What does the update rule of each read that was there before this step's gradient? Weights and gradients don't count.
#
# </details>
# <details><summary>Hint 2: numbers first</summary>
#
# Count numbers: none, m, m and v. Adafactor does not keep v but two vectors from which it makes it up.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Each number takes 4 bytes, in the 8-bit Adam 1. There are `rows * columns // 256` scales for *each* of its two
# moments. Adafactor's vectors have `rows` and `columns` numbers.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The states decide more than the weights do. Below is the largest matrix of GPT-2, its embedding. Adafactor's two
# vectors vanish beside it, and 8 bits cost a quarter of fp32 and a little for the scales.

# %% tags=["solution"]
from course_utils import format_bytes

for name in ("sgd", "momentum", "adam", "adafactor", "adam8bit"):
    print(f"{name:10s} {format_bytes(state_bytes(name, 50257, 768)):>9s}")

# %% [markdown]
# ## 2 · The best step
# **Difficulty** ●●○○○ · **8 minutes** · **Trains** seeing why one step size is too few
#
# A loss has the curvatures c₁, c₂, … along its axes. With the rate η, gradient descent multiplies the distance along
# axis i by 1 − η·cᵢ in each step. The walk is as slow as its slowest direction.
#
# Return the η for which the slowest direction is as quick as possible. The list is in no order.


# %%
def best_rate(curvatures: list[float]) -> float:
    """The learning rate at which the largest |1 − η·c| is as small as possible."""
    ### BEGIN SOLUTION Return one learning rate.
    return 2 / (min(curvatures) + max(curvatures))
    ### END SOLUTION


# %%
check.best_rate(best_rate)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Draw |1 − η·c| over η for the flattest and for the steepest direction: two lines that fall to zero and rise again.
#
# </details>
# <details><summary>Hint 2: which matter</summary>
#
# Only the flattest and the steepest do. For a small η the flattest is the slower one, for a large η the steepest. Best
# is where they are equal.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# There the flattest is still before the minimum and the steepest is beyond it: 1 − η·min = η·max − 1. Solve for η.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# At its best, gradient descent still shrinks by (κ − 1)/(κ + 1) only, where κ is the ratio of the extremes. The valley
# below is the lesson's. Adam's v gives each axis a step of its own, so that no η has to serve two curvatures.

# %% tags=["solution"]
from course_utils.lessons.adam.by_hand import trajectory
from course_utils.lessons.adam.figures import walks

best = best_rate([1.0, 25.0])
rates = {"a tenth less": 0.9 * best, "a tenth more": 1.1 * best}
walks(
    {name: trajectory("gradient descent", rate, 200) for name, rate in rates.items()},
    "A tenth below the best rate is only a little slower than in the lesson; a tenth above it diverges",
)

# %% [markdown]
# ## 3 · Adam, in place
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** writing an update that allocates no new states
#
# Write one step of Adam (no weight decay) for one tensor. `m` and `v` are its states, zero before the first step;
# `step` is 1 in the first step. Change `weight`, `m` and `v` **in place**; return nothing. ε is added to the root.


# %%
@torch.no_grad()
def adam_step(weight, gradient, m, v, step, rate, beta1, beta2, epsilon) -> None:
    """Update weight, m and v in place as Adam does."""
    ### BEGIN SOLUTION Change weight, m and v in place; return nothing.
    m.mul_(beta1).add_(gradient, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    weight.sub_(rate * m_hat / (v_hat.sqrt() + epsilon))
    ### END SOLUTION


# %%
check.adam_step(adam_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Four lines of the lesson: m, v, the two corrected means, the update. Only the first two change what is kept.
#
# </details>
# <details><summary>Hint 2: in place</summary>
#
# `m = beta1 * m + …` makes a new tensor, and the one that was handed over stays as it was. `m.mul_(beta1)` changes it,
# and `.add_(gradient, alpha=1 - beta1)` after it adds a part of the gradient.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# After t steps the weights of all gradients in m add up to 1 − β1ᵗ, and those in v to 1 − β2ᵗ: divide by just that, in
# new tensors. For the last line, compare with your equation: is ε outside of the root? And does the weight change in
# place?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# In place is not a matter of style. A state that is rebound, `m = …`, is a new allocation in each step, next to the old
# one, until the old one goes; and here it would be lost, since the caller still holds the old one. What is new in your
# step, m̂, v̂ and the root, comes and goes: exercise 4 counts such tensors.

# %% [markdown]
# ## 4 · What comes and goes
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** predicting the step's own peak
#
# `sizes` lists how many fp32 numbers each parameter has, in the order of the step. How many bytes are alive at once at
# most, beside weights, gradients and states? Three ways to walk:
#
# `"fused"`: one kernel reads and writes everything in place.
#
# `"foreach"`: makes one tensor for each parameter, all of them, before it uses the first.
#
# `"loop"`: for one parameter after the other, makes *two* tensors as large as it; then lets go of one of the two, and
# of the one that the parameter before has left. (A Python variable holds its old tensor until the new one is there.)


# %%
def step_transient(sizes: list[int], how: str) -> int:
    """The most bytes alive at once in an Adam step, beside weights, gradients and states."""
    ### BEGIN SOLUTION Return bytes for "fused", "foreach" and "loop".
    if how == "fused":
        return 0
    if how == "foreach":
        return 4 * sum(sizes)
    most = before = 0
    for size in sizes:
        most = max(most, before + 2 * size)
        before = size
    return 4 * most
    ### END SOLUTION


# %%
check.step_transient(step_transient)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two of the three are one line. For the loop, take sizes 100, 300, 200 and write down what is alive after each event.
#
# </details>
# <details><summary>Hint 2: the loop</summary>
#
# While a parameter has its two tensors, the parameter before it still has one. It is the sum of these three that
# counts.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# One variable is enough besides the largest sum so far: what the parameter before has left. What is it for the first?
# Update it after you have used it. And at the end: `sizes` counts numbers, not bytes.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Compare with steps that run. The rule above is PyTorch's: GPT-2's embedding comes first and is by far the largest of
# its parameters, so the loop needs twice that. (A GPU's memory comes in blocks of 512 bytes; these sizes fill theirs.)

# %% tags=["solution"]
from course_utils import TrainingRun, measure

sizes = check.gpt2_shapes()
for how in ("fused", "foreach", "loop"):
    run = TrainingRun("gpt2", 1, 128, "fp32", f"adamw-{how}", attention="efficient")
    seen = measure(run).phase_peaks.get("optimizer", {}).get("temporaries", 0)
    print(f"{how:8s} yours {step_transient(sizes, how):>12,} bytes, a step that ran {seen:>12,}")

# %% [markdown]
# ## 5 · Two faults
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** finding what is kept for nothing
#
# A colleague's Adam learns, but keeps twice the memory that it should. And it differs from PyTorch's, which nobody has
# noticed. There are two faults: one of memory, one of arithmetic.


# %%
class ColleaguesAdam:
    def __init__(self, parameters, rate=1e-3):
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.states = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self):
        for weight, state in zip(self.parameters, self.states, strict=True):
            self.steps += 1
            g = weight.grad
            m, v = state.get("m", torch.zeros_like(g)), state.get("v", torch.zeros_like(g))
            state["m"], state["v"] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            state["m_hat"] = state["m"] / (1 - 0.9**self.steps)
            state["v_hat"] = state["v"] / (1 - 0.999**self.steps)
            weight -= self.rate * state["m_hat"] / (state["v_hat"].sqrt() + 1e-8)


# %%
tried = check.trial(ColleaguesAdam, steps=4)
print(f"{tried.parameters:,} parameters, {tried.kept:,} bytes kept: {tried.kept / tried.parameters:.0f} a parameter")

# %% [markdown]
# Write `LeanAdam`: the same use, but 8 bytes per parameter, both states in fp32. Its weights are to be those of plain
# Adam, as `torch.optim.Adam` makes them by default: **no weight decay**, so not AdamW. Any way that is right will do.


# %%
class LeanAdam:
    def __init__(self, parameters, rate=1e-3):
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.states = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self):
        """Update every parameter from its gradient."""
        ### BEGIN SOLUTION Update the parameters and keep m and v alone.
        self.steps += 1
        for weight, state in zip(self.parameters, self.states, strict=True):
            if not state:
                state["m"], state["v"] = torch.zeros_like(weight), torch.zeros_like(weight)
            adam_step(weight, weight.grad, state["m"], state["v"], self.steps, self.rate, 0.9, 0.999, 1e-8)
        ### END SOLUTION


# %%
check.lean_adam(LeanAdam)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# List what is in `state` after a step. For each entry: is it *read* in the next step, before it is written?
#
# </details>
# <details><summary>Hint 2: the other fault</summary>
#
# The model has many parameter tensors. Print `self.steps` after the first call of `step()`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# m̂ and v̂ are local variables, not states: they go when the function moves on. And a step is counted once for all
# parameters, before the loop. Your `adam_step` of exercise 3 can do the rest.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A tensor lives as long as somebody refers to it. A dictionary that is never emptied does so for the whole training:
# two corrected means, 8 bytes a parameter, for nothing. The other fault is quieter. With a counter that runs once for
# each tensor, bias correction is right for the first tensor only and soon ends for all others: their first steps
# are too long, as the lesson's figure shows. The loss still falls.

# %% tags=["solution"]
for made in (ColleaguesAdam, LeanAdam):
    tried = check.trial(made, steps=4)
    print(f"{made.__name__:15s} {tried.kept / tried.parameters:4.1f} bytes a parameter")

# %% [markdown]
# ## 6 · Design your own
# **Difficulty** ●●●●● · **18 minutes** · **Trains** deciding what is worth remembering
#
# Adam's 8 bytes are too much for you. Design an optimizer that keeps **at most 4.5 bytes per parameter** from one step
# to the next, wherever it keeps them, and that
#
# 1. learns: after 60 steps on the small language model its loss is at most 2.7 (it begins above 3.5);
# 2. does not care how large the loss is: with gradients 1,024 times as large it trains the same.
#
# There is no single right answer. It is made with a list of parameters alone, so choose the learning rate yourself.
# `check.trial(Frugal, steps=60)` trains with it and tells `.kept`, `.parameters` and `.final`.


# %%
class Frugal:
    def __init__(self, parameters):
        self.parameters, self.steps = list(parameters), 0
        self.states = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self):
        """Update every parameter from its gradient."""
        ### BEGIN SOLUTION Update the parameters; keep at most 4.5 bytes for each.
        self.steps += 1
        for weight, state in zip(self.parameters, self.states, strict=True):
            v = state.setdefault("v", torch.zeros_like(weight))
            v.mul_(0.99).addcmul_(weight.grad, weight.grad, value=0.01)
            v_hat = v / (1 - 0.99**self.steps)
            weight.sub_(3e-3 * weight.grad / (v_hat.sqrt() + 1e-12))
        ### END SOLUTION


# %%
check.frugal(Frugal)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The second condition rules out gradient descent and momentum: their steps are as long as the gradient. What can be
# made of a gradient that does not depend on its length?
#
# </details>
# <details><summary>Hint 2: three ways</summary>
#
# Divide by √v and keep no m (RMSProp). Take the sign of a running mean and keep no v (Lion). Or keep both in fewer
# bytes: in bf16, or v as a row and a column.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The shortest way starts from exercise 3: leave out one of the two states and all that belongs to it. Mind two things.
# A mean that begins at zero still needs its correction. And ε must be far smaller than the gradients, or the second
# condition fails: ε does not grow with the loss. For the rate, try a few between 0.0003 and 0.03.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each way gives up something. RMSProp (above) has no memory of the direction. Lion takes the sign of a running mean and
# forgets how sure it was. A row and a column assume that gradients are large by rows and by columns. And on so small a
# model even the bare sign of the gradient passes, with no state at all: what a short test accepts may fail at scale.
#
# Both moments in bf16 fit into 4 bytes, too. But bf16 has 8 bits of precision, and a running mean moves by a thousandth
# of its distance. Does v move at all, if it begins at 1 and every gradient is 0.5? Lesson 03 is about this.

# %% tags=["solution"]
for dtype in (torch.float32, torch.bfloat16):
    v = torch.ones((), dtype=dtype)
    for _ in range(1000):
        v.mul_(0.999).add_(torch.tensor(0.25, dtype=dtype), alpha=0.001)
    print(f"{str(dtype).removeprefix('torch.'):9s} v after 1,000 steps: {v.item():.2f}, on its way from 1 to 0.25")


# %% tags=["solution"]
class Signs(Frugal):
    @torch.no_grad()
    def step(self):
        for weight in self.parameters:
            weight.sub_(torch.sign(weight.grad), alpha=5e-3)


for made in (Frugal, Signs):
    tried = check.trial(made, steps=60)
    print(f"{made.__name__:7s} {tried.kept / tried.parameters:.0f} bytes a parameter, learns: {tried.final < 2.7}")
