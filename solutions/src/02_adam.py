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
# shows. From the third exercise on, you should also know how a Python class works. You need no GPU.
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
# ## 2 · A step inside backward
# **Difficulty** ●●●●○ · **18 minutes** · **Trains** hooks on gradients, and what a hook remembers
#
# The lesson's hook updates fp32 weights. Here the weights are in 16 bits, so their updates happen in fp32 [master
# weights](../docs/glossary.md#master-weights). Do all of it inside backward. What is kept from step to step is then 2 +
# 12 bytes per parameter, and no gradient waits.
#
# Write `update_in_backward(parameters, rate)`. `parameters` is a list; some of them are frozen, with `requires_grad`
# False. You are called once. From then on, each `loss.backward()` trains: as soon as a parameter has its gradient,
#
# * its gradient is copied to fp32, and the 16-bit one is freed;
# * its master weight takes a step of `torch.optim.AdamW(…, lr=rate)`, whose states stay from step to step;
# * its master weight is copied back to the parameter, and the fp32 gradient is freed.
#
# Do not change frozen parameters, and return nothing.


# %%
def update_in_backward(parameters, rate) -> None:
    """Let backward update each parameter that is trained, and free its gradient."""

    ### BEGIN SOLUTION Register a hook for each parameter; return nothing.
    def prepare(p):
        master = torch.nn.Parameter(p.detach().float())
        optimizer = torch.optim.AdamW([master], lr=rate)

        def update(p):
            master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            master.grad = None
            p.copy_(master)

        p.register_post_accumulate_grad_hook(update)

    for p in parameters:
        if p.requires_grad:
            prepare(p)
    ### END SOLUTION


# %%
check.update_in_backward(update_in_backward)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Each parameter needs a master weight, an optimizer for it, and a hook that uses both. `p.detach().float()` is a copy
# in fp32, and `torch.nn.Parameter(…)` makes it something that an optimizer accepts. Skip frozen parameters.
#
# </details>
# <details><summary>Hint 2: which master weight is it?</summary>
#
# A function looks up the names around it when it *runs*. If you define hooks in a loop, they all see the last
# parameter's master weight. Either make each hook in a function of its own, or keep master weights and optimizers in
# dictionaries: PyTorch calls your hook with the parameter.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The hook has four lines: the gradient to fp32 and `p.grad = None`; the step; the master's gradient to None; and
# `p.copy_(master)`. Backward is under `no_grad`, so you may change p in place.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The hook is a closure: it keeps a master weight and an optimizer alive, for as long as the parameter has the hook. So
# the states are there in the next step. Names of a loop are looked up later, which is why such hooks all use the last
# parameter.
#
# Below, a network with a plain loop, then with your hooks. Backward of the plain loop ends with 2 bytes per parameter
# more: its gradients.


# %% tags=["solution"]
def step_after_backward(weights, rate):
    """Return a plain loop's step, with fp32 masters of all weights."""
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate)

    def step():
        for p, master in zip(weights, masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()

    return step


# %% tags=["solution"]
import gc


def after_backward(prepare):
    gc.collect()  # hooks and parameters keep each other until then
    before = torch.cuda.memory_allocated()
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
    weights = list(model.to("cuda", torch.bfloat16).parameters())
    step = prepare(weights, 1e-3)  # hooks need none
    for _ in range(2):
        x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
        model(x).square().mean().backward()
        kept = torch.cuda.memory_allocated() - before
        if step:
            step()
    return kept / sum(p.numel() for p in weights)


# %% tags=["solution"]
with on_gpu():
    after_backward(update_in_backward)  # the first run also makes cuBLAS's workspaces
    plain, hooked = after_backward(step_after_backward), after_backward(update_in_backward)
print(f"after backward {plain:.1f} bytes per parameter with a plain loop, {hooked:.1f} with hooks")

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
        ### BEGIN SOLUTION Update each parameter that has a gradient, by a row and a column.
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, new = self.state[p], [p.grad.square() + 1e-30]
                if p.ndim == 2:
                    new = [new[0].mean(1, keepdim=True), new[0].mean(0, keepdim=True)]
                state["t"] = state.get("t", 0) + 1
                for name, mean in zip(("row", "column"), new, strict=False):  # no matrix: one "row"
                    state.setdefault(name, torch.zeros_like(mean)).lerp_(mean, state["t"] ** -0.8)
                v = state["row"]
                if p.ndim == 2:
                    v = v / v.mean() * state["column"]
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
# The shortest way starts from the lesson's `HandAdamW`: leave out one of the two states and all that belongs to it.
# Watch two things. A mean that begins at zero makes the first steps too long if it is not corrected. And ε must be far
# smaller than the gradients, or the second condition fails: ε does not grow with the loss. For the rate, try 0.001,
# 0.002, 0.003, 0.005.
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
