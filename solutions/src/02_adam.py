# ---
# jupyter:
#   course:
#     minutes: 83
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 02 · Adam
#
# **83 minutes** for all four; each one says its own. You should know what [lesson 02](../notebooks/02_adam.ipynb)
# shows. From the second exercise on, you should also know how a Python class works. You need no GPU.
#
# Each exercise asks for one function or class. Write it, run the cell, then run the check below it. A check says what
# is off, never the answer. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at the
# first unsolved check.)

# %%
import torch

from course_utils import on_gpu
from course_utils.lessons.adam import checks as check

# %% [markdown]
# ## 1 · A step in pieces
# **Difficulty** ●●●○○ · **18 minutes** · **Trains** updating in place, with next to no temporaries
#
# A step of Adam has everything it needs: the weight, its gradient, m and v. How much extra memory do the three lines
# below need at their fullest moment? **Predict** it in tensors as large as the weight. Then run them.

# %%
with on_gpu():
    weight, gradient, m, v = (torch.zeros(4096, 4096, device="cuda") for _ in range(4))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.sub_(1e-3 * (m / (1 - 0.9)) / ((v / (1 - 0.999)).sqrt() + 1e-8))
    on_top = torch.cuda.max_memory_allocated() - before
print(f"{on_top / weight.nbytes:.1f} tensors of {weight.nbytes / 1e6:.1f} MB on top")

# %% [markdown]
# Write the same step, but with **at most `size` new numbers at once**, however large the weight is. `step` is the
# number of the step (1 in the first) and `rate` the learning rate. β1 is 0.9, β2 is 0.999 and ε is 1e-8. Change
# `weight`, `m` and `v` in place, only read the gradient, and return nothing. All four tensors are contiguous and have
# the same shape, with any number of dimensions. The check traces every tensor that you make.


# %%
@torch.no_grad()
def adam_in_pieces(weight, gradient, m, v, step, rate, size) -> None:
    """Update weight, m and v in place as Adam does, with at most `size` new numbers at once."""
    ### BEGIN SOLUTION Change weight, m and v in place; return nothing.
    pieces = (tensor.view(-1).split(size) for tensor in (weight, gradient, m, v))
    for w, g, mean, square in zip(*pieces, strict=True):
        mean.mul_(0.9).add_(g, alpha=0.1)
        square.mul_(0.999).addcmul_(g, g, value=0.001)
        root = (square / (1 - 0.999**step)).sqrt_().add_(1e-8)
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))
        del root  # or it lives until the next one is made
    ### END SOLUTION


# %%
check.adam_in_pieces(adam_in_pieces)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# If you change a view, its tensor changes. `view(-1)` is a flat view of a contiguous tensor, and `split(size)` cuts
# that into views of `size` numbers; the last one may be smaller. The lines for m and v allocate nothing, so they can
# stay as they are. In the third line, each operation makes a tensor, and three of them exist at once.
#
# </details>
# <details><summary>Hint 2: one new tensor</summary>
#
# The bias corrections are plain numbers. So √v̂ + ε is the only new tensor that a piece needs. One operation makes it
# from v, and methods that end in `_`, such as `sqrt_` and `add_`, finish it.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `w.addcdiv_(a, b, value=c)` adds c·a/b in place, without a tensor for the quotient. The rate and m's correction fit
# into c. Then think of the second piece: what does your name for the new tensor still hold while the next one is made?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Only tensors that are new at the same time count, and now that is one piece. A fused kernel goes further: its pieces
# are single numbers, in the registers of the GPU. Frameworks work in pieces when they have no such kernel, as in an
# optimizer on the CPU, or when gradients must be converted to fp32 on the way. Below, pieces of 1/16 of the size take
# 1/16 of the memory. The price is more kernels to launch.

# %% tags=["solution"]
with on_gpu():
    weight, gradient, m, v = (torch.zeros(4096, 4096, device="cuda") for _ in range(4))
    for size in (2**24, 2**20, 2**16):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        adam_in_pieces(weight, gradient, m, v, 1, 1e-3, size)
        on_top = torch.cuda.max_memory_allocated() - before
        print(f"pieces of {size:10,} numbers: {on_top / 1e6:5.2f} MB on top")

# %% [markdown]
# ## 2 · Two faults
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** finding what is kept for nothing
#
# A colleague's Adam learns, but it keeps twice the memory that it should. It also differs from PyTorch's, and nobody
# has noticed. Find the two faults: one of memory, one of arithmetic.


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
print(f"{tried.parameters:,} parameters, {tried.kept:,} bytes kept (traced on the CPU)")
print(f"{tried.kept / tried.parameters:.0f} bytes per parameter")

# %% [markdown]
# Write `LeanAdam`: a class that is used in the same way, but keeps 8 bytes per parameter, both states in fp32. Its
# weights must be those of plain Adam, as `torch.optim.Adam` makes them by default: **no weight decay**, so not AdamW.
# Any correct way is fine.


# %%
class LeanAdam:
    def __init__(self, parameters, rate=1e-3):
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.states = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self):
        """Update every parameter from its gradient."""
        ### BEGIN SOLUTION Update the parameters; keep only m and v.
        self.steps += 1
        for weight, state in zip(self.parameters, self.states, strict=True):
            g = weight.grad
            m, v = (state.setdefault(name, torch.zeros_like(g)) for name in ("m", "v"))
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            m_hat, v_hat = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
            weight -= self.rate * m_hat / (v_hat.sqrt() + 1e-8)
        ### END SOLUTION


# %%
check.lean_adam(LeanAdam)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# List what is in `state` after a step. For each entry: does the next step *read* it before it is written?
#
# </details>
# <details><summary>Hint 2: the other fault</summary>
#
# The model has many parameter tensors. Print `self.steps` after the first call of `step()`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# m̂ and v̂ can be local variables instead of states. Then they are freed when the function moves on. And count a step
# once for all parameters, before the loop. The arithmetic of m and v is right.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A tensor lives as long as somebody refers to it. A dictionary that is never emptied does so for the whole training.
# Here it keeps two corrected means, 8 bytes per parameter, for nothing.
#
# The other fault is quieter. The counter goes up once per tensor, so bias correction is right only for the first tensor
# and soon ends for all others. Their first steps are too long, as the lesson's figure shows. The loss still falls.

# %% tags=["solution"]
for made in (ColleaguesAdam, LeanAdam):
    tried = check.trial(made, steps=4)
    each = tried.kept / tried.parameters
    print(f"{made.__name__:15s} {each:4.1f} bytes per parameter (traced on the CPU)")

# %% [markdown]
# ## 3 · A row and a column
# **Difficulty** ●●●●○ · **30 minutes** · **Trains** writing an optimizer that PyTorch can group, save and load
#
# Write Adafactor ([Shazeer and Stern 2018](https://arxiv.org/abs/1804.04235)), without its clipping. It keeps no m, and
# for the v of a matrix it keeps only a row and a column. A parameter with a gradient g is updated like this:
#
# * t counts the updates of this parameter, including this one; $s = t^{-0.8}$;
# * a *running mean* keeps 1 − s of itself and takes s of the new value. At first s is 1, so it needs no bias
#   correction;
# * a matrix (`ndim == 2`) has a running mean for each row of g² + 10⁻³⁰, and one for each column. Then v[i, j] =
#   (row[i] / mean of row[0], row[1], …) · column[j]. Divide first: a product of two squares can be too small for fp32;
# * for every other shape, v is the running mean of g² + 10⁻³⁰ itself;
# * θ ← θ − lr · g/√v, in place.
#
# Keep everything that outlives a step in `self.state[p]`. Each group in `self.param_groups` has its own learning rate,
# `group["lr"]`. Do not change parameters without a gradient, and only read gradients. The check counts bytes wherever
# you keep them. It also continues in a new instance after `load_state_dict()`.


# %%
class Factored(torch.optim.Optimizer):
    def __init__(self, parameters, lr=3e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        """Update every parameter that has a gradient."""
        ### BEGIN SOLUTION Update the parameters; keep a row and a column per matrix.
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                squares = p.grad.square() + 1e-30
                new = {"v": squares}
                if p.ndim == 2:
                    row, column = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
                    new = {"row": row, "column": column}
                state["t"] = state.get("t", 0) + 1
                for name, mean in new.items():
                    state.setdefault(name, torch.zeros_like(mean)).lerp_(mean, state["t"] ** -0.8)
                if p.ndim == 2:
                    v = state["row"] / state["row"].mean() * state["column"]
                else:
                    v = state["v"]
                p.sub_(p.grad / v.sqrt(), alpha=group["lr"])
        ### END SOLUTION


# %%
check.factored(Factored)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `HandAdamW` in the lesson has the two loops, and it makes the state in a parameter's first update. Start with vectors
# only: then v is one running mean. Skip a parameter without a gradient before you touch its state.
#
# </details>
# <details><summary>Hint 2: rows and columns</summary>
#
# `x.mean(1, keepdim=True)` has the shape (rows, 1), `x.mean(0, keepdim=True)` has (1, columns). Their product is
# broadcast to the whole matrix. `mean.lerp_(new, s)` is a step of a running mean, in place.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Running means may begin as zeros: with s = 1, nothing of that is left. The matrix v and its root are local variables.
# Make them again in each step, and never put them into the state.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A matrix of 1,024 × 4,096 has four million v's, but 5,120 numbers in its row and column. Their product is exact if
# gradients are large by rows and by columns. Where they are not, a few entries take steps of the wrong length, and
# training mostly forgives it. The real Adafactor also limits the length of the whole update, and makes the learning
# rate relative to the weights.
#
# You kept everything in `self.state`. So `state_dict()` saved it, and `load_state_dict()` put it back with the right
# parameters. A counter in `self.steps` would have started again at 1.

# %% tags=["solution"]
from functools import partial

for made in (torch.optim.Adam, Factored):
    tried = check.trial(partial(made, lr=3e-3), steps=60)
    kept = f"{tried.kept / tried.parameters:.2f} bytes per parameter (traced on the CPU)"
    print(f"{made.__name__:8s} {kept}, learns: {tried.final < 2.8}")

# %% [markdown]
# ## 4 · Design your own
# **Difficulty** ●●●●● · **20 minutes** · **Trains** deciding what is worth remembering
#
# Design an optimizer that keeps **at most 4.5 bytes per parameter** from one step to the next, wherever it keeps them;
# Adam's 8 bytes are too much for you. It must also
#
# 1. learn: after 60 steps on the small language model, its loss is at most 2.8 (it begins above 3.5);
# 2. not depend on the size of the loss: with gradients 1,024 times as large, its loss after 60 steps is about the same.
#
# Exercise 3 was a recipe; here you decide. There is no single right answer. The check makes your optimizer from a list
# of parameters only, so choose the learning rate yourself. `check.trial(Frugal, steps=60)` trains with it. The result
# has `.kept`, `.parameters` and `.final`, the last loss.


# %%
class Frugal:
    def __init__(self, parameters):
        self.parameters, self.steps = list(parameters), 0
        self.states = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self):
        """Update every parameter from its gradient."""
        ### BEGIN SOLUTION Update the parameters; keep at most 4.5 bytes per parameter.
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
# The second condition rules out gradient descent and momentum: their steps are as long as the gradient. What can you
# compute from a gradient that does not depend on its length?
#
# </details>
# <details><summary>Hint 2: three ways</summary>
#
# Divide by √v and keep no m (RMSProp). Take the sign of a running mean and keep no v (Lion). Or keep both in fewer
# bytes, as in bf16.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The shortest way starts from exercise 2: leave out one of the two states and all that belongs to it. Watch two things.
# A mean that begins at zero makes the first steps too long if it is not corrected. And ε must be far smaller than the
# gradients, or the second condition fails: ε does not grow with the loss. For the rate, try 0.001, 0.002, 0.003, 0.005.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each way gives up something. RMSProp (above) does not remember the direction. Lion takes the sign of a running mean
# and forgets how certain it was. A row and a column assume that gradients are large by rows and by columns. On so small
# a model, even the bare sign of the gradient passes, with no state at all. What a short test accepts may fail at scale.
#
# Both moments in bf16 fit into 4 bytes, too. But bf16 has 8 bits of precision, and a running mean moves by a thousandth
# of its distance. If v begins at 1 and every gradient is 0.5, does v move at all? Lesson 03 is about this.

# %% tags=["solution"]
for dtype in (torch.float32, torch.bfloat16):
    v = torch.ones((), dtype=dtype)
    for _ in range(1000):
        v.mul_(0.999).add_(torch.tensor(0.25, dtype=dtype), alpha=0.001)
    name = str(dtype).removeprefix("torch.")
    print(f"{name:9s} v after 1,000 steps: {v.item():.2f}, on its way from 1 to 0.25")


# %% tags=["solution"]
class Signs(Frugal):
    @torch.no_grad()
    def step(self):
        for weight in self.parameters:
            weight.sub_(torch.sign(weight.grad), alpha=5e-3)


for made in (Frugal, Signs):
    tried = check.trial(made, steps=60)
    kept = f"{tried.kept / tried.parameters:.0f} bytes per parameter (traced on the CPU)"
    print(f"{made.__name__:7s} {kept}, learns: {tried.final < 2.8}")
