# ---
# jupyter:
#   course:
#     minutes: 105
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 15 · Which cut when
#
# **105 minutes** for all four; each one says its own. You should know what [lesson
# 15](../notebooks/15_which_cut_when.ipynb) shows, and for exercise 1 the `Function` that [lesson
# 06](../notebooks/06_recomputation.ipynb) writes under *By hand*. You need no GPU.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
import torch
import torch.nn.functional as F

from course_utils import on_gpu
from course_utils.lessons.parallelism import checks as check

# %% [markdown]
# ## 1 · A tensor-parallel MLP that trains
# **Difficulty** ●●●●○ · **30 minutes** · **Trains** messages inside autograd
#
# Write a tensor-parallel MLP, as one of t ranks computes it, with gradients that are right on every rank. The lesson's
# MLP by hand adds up parts that one process has. Real ranks send, and autograd does not see that. Megatron-LM uses two
# small functions instead, f and g ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3). Write both as
# `autograd.Function`s ([torch's notes](https://docs.pytorch.org/docs/stable/notes/extending.html) explain them):
#
# - `Shared` (their f) returns its input unchanged. In backward it sums the gradient over all ranks.
# - `Summed` (their g) sums over all ranks in forward. In backward it returns the gradient unchanged.
#
# Then write `parallel_mlp` with them. Its arguments:
#
# - `x` (rows, h) is the same on every rank. `up` (4h/t, h), `up_bias` (4h/t) and `down` (h, 4h/t) are this rank's
#   parts. `down_bias` (h) is complete on every rank.
# - `all_reduce(tensor)` puts the sum over all ranks into `tensor`, as `dist.all_reduce` does.
#
# Return the output of the complete MLP, (rows, h): gelu(x·upᵀ + up_bias)·downᵀ + down_bias. On every rank, x and
# down_bias get the complete MLP's gradient; up, up_bias and down get their part of it.
#
# Use one all-reduce in forward and one in backward, also with t = 1. x may be used elsewhere, as in `x +
# parallel_mlp(x, …)`: sum only the MLP's part of its gradient. The check calls only `parallel_mlp`.


# %%
class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, all_reduce):
        ### BEGIN SOLUTION Return x unchanged.
        ctx.all_reduce = all_reduce
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION Return the sum of all ranks' gradients, and None.
        gradient = gradient.clone()
        ctx.all_reduce(gradient)
        return gradient, None
        ### END SOLUTION


# %%
class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, all_reduce):
        ### BEGIN SOLUTION Return the sum of all ranks' parts.
        whole = part.clone()
        all_reduce(whole)
        return whole
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION Return the gradient of a part, and None.
        return gradient, None
        ### END SOLUTION


# %%
def parallel_mlp(x, up, up_bias, down, down_bias, all_reduce):
    """The complete MLP's output, computed with this rank's parts."""
    ### BEGIN SOLUTION Return the output, (rows, h).
    hidden = F.gelu(F.linear(Shared.apply(x, all_reduce), up, up_bias))
    return Summed.apply(F.linear(hidden, down), all_reduce) + down_bias
    ### END SOLUTION


# %%
check.parallel_mlp(parallel_mlp)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What does each rank have only a part of? In forward: after `down`, a part of a sum. In backward: each rank's `up`
# gives x a gradient, and x's complete gradient is their sum. So where does each of the two functions go?
#
# </details>
# <details><summary>Hint 2: what does not need a message</summary>
#
# y = part₀ + part₁ + … If you know y's gradient, what is the gradient of one part? Every rank has it already. Summing
# it once more makes it t times too large.
#
# </details>
# <details><summary>Hint 3: details</summary>
#
# `all_reduce` writes into its argument, and the tensor that autograd hands you may be in use elsewhere: give it a
# `.clone()`. `backward` returns a second value for the second argument of forward: `None`. And where must you add
# `down_bias`, so that it is in the sum once and not t times?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# f and g are mirror images: where one sums, the other passes its input on. Tensor parallelism needs no other
# messages: for each block of attention and MLP, two all-reduces in forward and two in backward, each of s·b·h
# numbers. In a ring, each rank sends 2(t − 1)/t times that. An all-reduce that autograd differentiates as a sum would
# be wrong here, because it sums the gradient, too. Between the matrices, the tensors are 4h/t wide and shrink with t.
# x and y are complete on every rank, whatever t is.

# %% tags=["solution"]
with on_gpu():
    h = 1024
    x = torch.randn(4096, h, device="cuda", requires_grad=True)
    F.linear(x[:1], x[:1])  # the first product allocates cuBLAS's workspace
    for t in (1, 2, 4, 8):
        up = torch.randn(4 * h // t, h, device="cuda", requires_grad=True)
        down = torch.randn(h, 4 * h // t, device="cuda", requires_grad=True)
        biases = torch.randn(4 * h // t, device="cuda"), torch.randn(h, device="cuda")
        before = torch.cuda.memory_allocated()
        y = parallel_mlp(x, up, biases[0], down, biases[1], lambda tensor: None)
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        expected = 2 * 4096 * 4 * h * 4 / t / 1e6
        print(f"t = {t}: {kept / 1e6:6.1f} MB kept between x and y, {expected:.1f} expected")
        del y

# %% [markdown]
# ## 2 · Attention in a ring
# **Difficulty** ●●●○○ · **25 minutes** · **Trains** context parallelism: an exact softmax, part by part
#
# Each of c ranks has an equal part of the sequence: s tokens with their queries, keys and values. Keys and values go
# around in a ring. Write the *causal* attention of one rank's queries:
#
# - `q` (s, d): this rank's queries. `rank` counts from 0, and so do the parts of the sequence.
# - `keys`, `values`: lists of c tensors (s, d), one per part. Look at one part at a time: no matrix of scores may have
#   more than s·s numbers in a real ring.
#
# Return the output, (s, d): softmax of q·kᵀ/√d over all tokens up to each query's own, times their values. Scores may be
# thousands, whose exponentials overflow.


# %%
def ring_attention(q, rank, keys, values):
    """Causal attention of this rank's queries over all tokens up to their own."""
    ### BEGIN SOLUTION Return the output, (s, d).
    s, d = q.shape
    y, log_sum = torch.zeros_like(q), torch.full((s, 1), float("-inf"), dtype=q.dtype)
    for part in range(rank + 1):  # later parts hold only later tokens
        scores = q @ keys[part].T / d**0.5
        if part == rank:
            later = torch.ones(s, s, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        other_sum = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(log_sum, other_sum)
        y = y * (log_sum - both).exp() + (scores - both).exp() @ values[part]
        log_sum = both
    return y
    ### END SOLUTION


# %%
check.ring_attention(ring_attention)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Forget causality first, and copy the loop of the lesson. Then look at each part: is it before this rank's, its own, or
# after it?
#
# </details>
# <details><summary>Hint 2: what each query may see</summary>
#
# Parts before its own: all of them. Later parts: nothing, so skip them. In its own part: token i sees tokens 0 to i. Set
# the other scores to minus infinity.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Keep the logarithm of the sum of exponentials so far. When a part comes, `both = torch.logaddexp(log_sum, other)`. What
# you have counts `(log_sum - both).exp()`, the new part's values count `(scores - both).exp()`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A softmax is a quotient of two sums, and sums can be made in parts. Logarithms keep them from overflowing. That is the
# idea of flash attention, too, there within one card. Under a causal mask, rank 0 has one part to compute and the last
# rank c: real implementations give each rank an early and a late piece, so that all work equally long.

# %% tags=["solution"]
for c in (1, 4, 16):
    s, h = 8192 // c, 4096
    sent = 2 * 2 * (c - 1) * s * h
    print(f"c = {c:2d}: scores of {s * s:>10,} numbers at a time", end="; ")
    print(f"keys and values sent {sent / 1e6:5.1f} MB")

# %% [markdown]
# ## 3 · An upper end for an expert
# **Difficulty** ●●○○○ · **20 minutes** · **Trains** experts: what a capacity drops
#
# A router has chosen k experts for each token. An expert takes at most `int(factor · equal share)` pairs of token and
# expert, where the equal share is all pairs divided by the number of experts. Experts take pairs in order: token by
# token, and a token's choices from first to last. What comes later is dropped.
#
# - `choices` (tokens, k): integers, the experts of each token.
# - `experts`: how many there are. `factor`: the capacity factor.
#
# Return a mask of the same shape, `torch.bool`: True for each pair that is taken.


# %%
def within_capacity(choices, experts, factor):
    """A mask of the pairs that their experts take."""
    ### BEGIN SOLUTION Return a mask, (tokens, k).
    most = int(factor * choices.numel() / experts)
    chosen = F.one_hot(choices.flatten(), experts)  # one row per pair
    place = (chosen.cumsum(0) * chosen).sum(1)  # 1 for an expert's first pair, 2 for its second
    return (place <= most).view_as(choices)
    ### END SOLUTION


# %%
check.within_capacity(within_capacity)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# How many pairs are there? `choices.numel()`. `choices.flatten()` has them in the right order.
#
# </details>
# <details><summary>Hint 2: which place has a pair?</summary>
#
# A loop that counts per expert is right. Without one: `F.one_hot` makes a row per pair with a single 1. A `cumsum` down
# the rows counts each expert's pairs.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Of each row's counts you need only that of its own expert: multiply by the row itself and add up. A pair whose count is
# at most the capacity is taken.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Without a capacity, what an expert keeps lies between nothing and all pairs. With one, the upper end is known before
# the step, so buffers can have a fixed size. The price: dropped pairs leave a token with fewer experts, or with the
# residual alone. Libraries without a capacity must be ready for the whole interval.

# %% tags=["solution"]
torch.manual_seed(0)
choices = (torch.randn(4096, 8) + torch.linspace(2, 0, 8)).topk(2).indices
for factor in (1.0, 1.25, 2.0):
    taken = within_capacity(choices, 8, factor)
    print(f"capacity {factor}: {1 - taken.float().mean():.0%} of the pairs are dropped")

# %% [markdown]
# ## 4 · Plan a cluster
# **Difficulty** ●●●○○ · **30 minutes** · **Trains** the decision: memory first, then cost
#
# Which plan (d, t, p) do you choose: d replicas with ZeRO-1, tensor parallelism of t, p stages under 1F1B? Arguments:
#
# - `N` parameters in `L` equal blocks; `sbh` numbers in the residual stream of a micro-batch; `m` micro-batches per step,
#   of all replicas together.
# - `gpus`, `per_node` of them in a machine, each with `card` bytes.
#
# A plan is possible if d · t · p = gpus, t divides `per_node`, p divides L, and d divides m. It *fits* if one rank's
# bytes are at most `card`: 4 bytes for each of its N/(t·p) parameters, and 12 more that d ranks share. Under full
# recomputation, add a checkpoint of 2·sbh bytes per block and micro-batch that the *first* stage keeps under 1F1B.
#
# Of all plans that fit, return the one with the least cost: the bubble (p − 1)/(m/d + p − 1), plus 0.01 · (t − 1) for
# messages that cannot hide. If two cost the same, take the smaller d. If nothing fits, return `None`.


# %%
def choose(N, L, sbh, m, gpus, per_node, card):
    """The cheapest plan (d, t, p) that fits, or None."""
    ### BEGIN SOLUTION Return three numbers, or None.
    found = []
    for t in range(1, per_node + 1):
        for p in range(1, L + 1):
            d = gpus // (t * p)
            if d * t * p != gpus or per_node % t or L % p or m % d:
                continue
            own = N / (t * p)
            needs = 4 * own + 12 * own / d + min(p, m / d) * (L / p) * 2 * sbh
            if needs <= card:
                cost = (p - 1) / (m / d + p - 1) + 0.01 * (t - 1)
                found.append((cost, (d, t, p)))
    return min(found)[1] if found else None
    ### END SOLUTION


# %%
check.choose(choose)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two loops, over t and p. Then d is given, or there is none. Skip what is impossible, then what does not fit.
#
# </details>
# <details><summary>Hint 2: the checkpoints</summary>
#
# A stage has L/p blocks. How many micro-batches has a replica, and how many of them does its first stage keep under
# 1F1B? (Not more than there are.)
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Collect pairs of cost and plan, (cost, (d, t, p)). Python's `min` compares costs first, then the plan's numbers in
# order.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The order of the two questions matters: the cheapest plan of all is nearly always plain data parallelism, and does not
# fit. Memory pushes towards t and p, cost pulls back. Pipelines with few micro-batches are expensive, so a small global
# batch asks for tensor parallelism. Real costs depend on the model and the links, as in the lesson's table; the search
# is the same.

# %% tags=["solution"]
for gpus in (16, 32, 64, 128):
    plan = choose(70e9, 80, 4096 * 8192, 512, gpus, 8, 80e9)
    print(f"70 billion parameters on {gpus:3d} GPUs of 80 GB: (d, t, p) = {plan}")
