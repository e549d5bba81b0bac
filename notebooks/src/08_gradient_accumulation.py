# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Gradient accumulation
#
# **60 minutes.** You should know what lives when in a training step ([lesson 01](01_where_did_the_memory_go.ipynb)) and
# what an optimizer does with a gradient ([lesson 02](02_adam.ipynb)). You need no GPU.
#
# Activations grow with the batch. So cut it into pieces that fit, and add up their gradients before the optimizer
# steps: [gradient accumulation](../docs/glossary.md#gradient-accumulation). It takes ten lines of Python, and its
# well-known bugs raise no error. How large a batch *should* be is [lesson 09](09_large_batches.ipynb).

# %% [markdown]
# ## Three sizes
# A [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is what goes through the network at once. Several
# make the *global batch* of one optimizer step. Large trainings count it in tokens, so that batches of short and of
# long sequences compare. A lecture: "400 sequences of 1,024 tokens are about 4 million tokens". Are they?

# %%
import torch

batch = torch.zeros(400, 1024, dtype=torch.int64)  # token ids
parts = batch.split(16)  # change this
print(f"{len(parts)} micro-batches, {len(parts[-1])} sequences in the last")
print(f"400 sequences · 1,024 = {batch.numel():,} tokens")

# %% [markdown]
# The lecture is off by a factor of ten. Change 16 to 48. Predict: how many sequences does the last micro-batch have?

# %% [markdown]
# ## Gradients add
# `backward()` *adds* to `.grad`. The loss of a batch is a mean over its sequences.
#
# **Your guess.** Call `backward()` on the mean loss of each of 25 micro-batches of 4, and do nothing else. How many
# times as long is `.grad` as the gradient of all 100 sequences?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("08.factor", unit="times")

# %% [markdown]
# Try it on a small GPT with random weights. It predicts characters, on the CPU, because losses need values. `batches(k,
# 4)` gives k micro-batches of 4 sequences: token ids, and the ids that follow them.

# %%
from torch.nn.functional import cross_entropy

from course_utils.lessons.shared.language_model import batches, language_model


def mean_loss(model, tokens, targets):
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def gradient(model, parts, factor=1.0):
    """Add up the gradients of all micro-batches; return them as one vector."""
    model.zero_grad()
    for tokens, targets in parts:
        loss = mean_loss(model, tokens, targets) * factor
        loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


# %%
k = 25  # change this
model, parts = language_model(), list(batches(k, 4))
at_once = tuple(map(torch.cat, zip(*parts)))  # all sequences in one batch
large = gradient(model, [at_once])
for name, factor in {"as they are": 1, "divided by k": 1 / k}.items():
    added = gradient(model, parts, factor)
    turned = (added / added.norm() - large / large.norm()).norm()
    print(f"{name:12s} {added.norm() / large.norm():6.3f} times as long, turned by {turned:.5f}")
reveal("08.factor", (gradient(model, parts).norm() / large.norm()).item(), unit="times")

# %% [markdown]
# A sum of 25 means is 25 times the mean of all 100. So divide each loss by 25 before its `backward()`. With $L_i$ the
# mean loss of micro-batch i,
#
# $$\nabla L = \frac{1}{k} \sum_{i=1}^{k} \nabla L_i$$
#
# Change k to 8. What do the two lines say?
#
# The two gradients now differ only by rounding: fp32 adds in another order. So 25 micro-batches of 4 *are* a batch of
# 100. They are not 25 small steps: the optimizer steps once.
#
# This holds for a loss that is a mean over sequences. Batch norm breaks it, because it looks at all examples of a
# micro-batch together. So does a loss that compares examples: a contrastive loss, or the load balancing of experts.

# %% [markdown]
# ## The common loop
# Many tutorials have this loop, with two bugs. The reference is large batches, one for each step.


# %%
def common_loop(model, optimizer, parts, k):
    for number, part in enumerate(parts, 1):
        loss = mean_loss(model, *part)
        loss.backward()
        if number % k == 0:
            optimizer.step()
            optimizer.zero_grad()


def large_batches(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        optimizer.zero_grad()
        tokens, targets = map(torch.cat, zip(*parts[first : first + k]))
        mean_loss(model, tokens, targets).backward()
        optimizer.step()


# %%
from torch.nn.utils import parameters_to_vector


def moved(loop, parts, k, make=torch.optim.SGD, lr=0.1):
    """Return how far one pass moves each parameter."""
    model = language_model(seed=0)
    start = parameters_to_vector(model.parameters()).detach().clone()
    loop(model, make(model.parameters(), lr=lr), parts, k)
    return parameters_to_vector(model.parameters()).detach() - start


def off(loop, *case):
    """Return how far from the large batches a loop ends, relative to the way that they went."""
    reference = moved(large_batches, *case)
    return ((moved(loop, *case) - reference).norm() / reference.norm()).item()


# %% [markdown]
# **Your turn.** An epoch has 10 micro-batches, and k = 4. Write two lines again, so that this loop ends where the large
# batches end.


# %%
def your_loop(model, optimizer, parts, k):
    for number, part in enumerate(parts, 1):
        loss = mean_loss(model, *part)  # write this line again
        loss.backward()
        if number % k == 0:  # and this one
            optimizer.step()
            optimizer.zero_grad()


ten = list(batches(10, 4))
whole, rest = off(your_loop, ten[:8], 4), off(your_loop, ten, 4)
if max(whole, rest) < 0.001:
    print("Right.")
else:
    print(f"Not yet: off by {whole:.1%} after two whole groups, by {rest:.1%} after all ten parts.")

# %% [markdown]
# <details><summary>The lines</summary>
#
# The last group has 2 micro-batches. So divide by `min(k, len(parts) - (number - 1) // k * k)`, and step also `if
# number % k == 0 or number == len(parts)`.
#
# </details>
#
# You have met the first bug: nobody divides the loss. The second: nobody steps on an incomplete group. Its gradients
# wait in `.grad` and mix with the first group of the next epoch. A loop group by group is easier to read:


# %%
def right_loop(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        group = parts[first : first + k]  # the last one may be shorter
        optimizer.zero_grad()
        for part in group:
            loss = mean_loss(model, *part) / len(group)
            loss.backward()
        optimizer.step()


cases = {"SGD, 10 parts": (ten, 4), "SGD, 8 parts": (ten[:8], 4)}  # change this
cases["Adam, 8 parts"] = ten[:8], 4, torch.optim.Adam, 1e-3
for name, case in cases.items():
    print(f"{name}: the common loop {off(common_loop, *case):.1%} off", end=", ")
    print(f"the right one {off(right_loop, *case):.1%}")
print(f"length of the gradient of 100 sequences: {large.norm():.1f}")

# %% [markdown]
# Why is the common loop nearly right under Adam? Adam divides each gradient by its own size, so a constant factor
# cancels. The bug hides, until something looks at the gradient's length.
# [Clipping](../docs/glossary.md#gradient-clipping) at 10 would leave the gradient of 100 sequences alone, and shorten
# one that is 25 times as long.

# %% [markdown]
# ## Lengths differ
# Now sequences end early. The target of padding is −100, which `cross_entropy` leaves out. So a micro-batch's mean loss
# is a mean over its *real* tokens.
#
# **Your guess.** One micro-batch of 4 sequences has 16 real tokens, another has 128. You average their two mean
# losses. How many times as much does a token of the short one count?

# %%
predict("08.weight", unit="times")

# %%
padded = []
for (tokens, targets), length in zip(ten, torch.linspace(4, 32, 10).int()):  # change this
    padding = torch.arange(32) >= length
    padded.append((tokens, targets.masked_fill(padding, -100)))


def real(part):
    return (part[1] != -100).sum()


counts = [real(part).item() for part in padded]
print("real tokens in each micro-batch:", counts)
for loop in (common_loop, right_loop):
    print(f"{loop.__name__} {off(loop, padded, 4):.1%} off")
reveal("08.weight", max(counts) / min(counts), unit="times")

# %% [markdown]
# `right_loop` is right only if all lengths are equal. The large batch is a mean over *all* its tokens. So multiply each
# micro-batch's mean by its share of tokens. With $n_i$ tokens in micro-batch i,
#
# $$L = \sum_{i=1}^{k} \frac{n_i}{n_1 + \dots + n_k} \cdot L_i$$


# %%
def loop_by_tokens(model, optimizer, parts, k):
    for first in range(0, len(parts), k):
        group = parts[first : first + k]
        total = sum(real(part) for part in group)  # before the first backward
        optimizer.zero_grad()
        for part in group:
            loss = mean_loss(model, *part) * real(part) / total
            loss.backward()
        optimizer.step()


print(f"loop_by_tokens {off(loop_by_tokens, padded, 4):.1%} off")

# %% [markdown]
# The `transformers` library averaged over micro-batches until October 2024 ([its own
# report](https://huggingface.co/blog/gradient_accumulation)). Change the shortest length from 4 to 32. What do the three
# loops say? (A loader that streams cannot know `total` beforehand: exercise 1.)

# %% [markdown]
# ## Once per step
# Three things must wait for the last micro-batch.
#
# **Clip once.** The length that counts is that of the whole sum.
#
# **Unscale once.** Trainings in fp16 multiply the loss by a large number, so that small gradients do not vanish
# ([lesson 03](03_mixed_precision.ipynb)). `GradScaler` does it. All micro-batches of a sum need the same scale, so
# `update()` comes once, after the step. And `clip_grad_norm_` must see the gradients at their own size. `unscale_()`
# divides `.grad`, the sum. A second call before the step raises an error.
#
# Without a scale, a step looks like this:

# %%
from torch.nn.utils import clip_grad_norm_


def plain_step(model, optimizer, parts, k):
    gradient(model, parts[:k], 1 / k)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# %% [markdown]
# **Your turn.** With a scale, two lines are missing: unscale, then clip the length at 1. (In fp32 here, so that only
# your lines count.)


# %%
def scaled_step(model, optimizer, parts, k):
    scaler = torch.amp.GradScaler("cpu")  # in a script: before the first step, and "cuda"
    for part in parts[:k]:
        loss = mean_loss(model, *part) / k
        scaler.scale(loss).backward()
    # write two lines here, with scaler, optimizer and model
    scaler.step(optimizer)
    scaler.update()


times = (moved(scaled_step, ten, 4).norm() / moved(plain_step, ten, 4).norm()).item()
right = abs(times - 1) < 0.001
print("Right." if right else f"Not yet: your step is {times:.3g} times as long as a clipped one.")

# %% [markdown]
# <details><summary>The two lines</summary>
#
# `scaler.unscale_(optimizer)`, then `clip_grad_norm_(model.parameters(), 1.0)`. The other way round, you clip
# gradients that are 65,536 times too long, and the step becomes 65,536 times too short. Without `unscale_`, too:
# `scaler.step` divides what was clipped.
#
# </details>
#
# **Exchange once.** On several GPUs, `DistributedDataParallel` averages the gradients of all processes in each
# `backward()`: k times per step. Only the last time is needed. `with model.no_sync():` around the others switches it
# off ([lesson 10](10_data_parallelism.ipynb) counts the bytes). [FSDP](../docs/glossary.md#fsdp), which splits weights,
# gradients and states over the GPUs, has `set_requires_gradient_sync(False)`. There it costs memory: each GPU keeps
# *all* gradients until the last micro-batch.

# %% [markdown]
# ## Can bf16 add up gradients?
# [bf16](../docs/glossary.md#fp16-and-bf16) has 8 significant bits. Add a number about 256 times smaller than the sum,
# and it is rounded away, like small weight updates in [lesson 03](03_mixed_precision.ipynb). A bf16 `.grad` adds one
# gradient to a sum of k. If all gradients agree, the sum is k times larger. If they are mostly noise, it is about √k
# times larger. Compare bf16 and fp32 with fp64:

# %%
model = language_model()  # change this
kinds = torch.bfloat16, torch.float32, torch.float64
sums = {kind: torch.zeros(large.numel(), dtype=kind) for kind in kinds}
for number, part in enumerate(batches(256, 4), 1):
    new = gradient(model, [part])
    for kind in kinds:
        sums[kind] += new.to(kind)
    if number in (1, 2, 8, 32, 128, 256):
        bf16, fp32, exact = (one.double() for one in sums.values())
        both = [(one - exact).norm() / exact.norm() for one in (bf16, fp32)]
        print(f"{number:3d} micro-batches: bf16 {both[0]:.2%} off, fp32 {both[1]:.4%}")

# %% [markdown]
# Random weights are the worst case: their gradients nearly agree. Train the model first: import
# `train_language_model` from the module of `language_model`, and take `train_language_model(steps=300).model`. What
# does bf16 lose now?
#
# The recipe `bf16-master-fp32grad` avoids the rounding: for two more bytes per parameter, gradients are fp32.

# %% [markdown]
# ## The floor under the next micro-batch
# People say that the peak is "one micro-batch's". Is it? Here is the script's GPT-2 again. Its head is a module of its
# own now, and so is its loss: modules take hooks.

# %%
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # flash, in bf16
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %%
class GPT(nn.Module):
    def __init__(self, h, L, a, V=50257):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks = nn.Sequential(*(Block(h, a) for _ in range(L)))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, V, bias=False)
        self.head.weight, self.loss = self.tokens.weight, nn.CrossEntropyLoss()

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return self.loss(logits.flatten(0, 1), targets.flatten())


def forward(model, part, k):
    with torch.autocast("cuda", torch.bfloat16):
        return model(part[:, :-1], part[:, 1:]) / k


# %% [markdown]
# Note two things whenever a module's forward ends, and whenever backward reaches its output: the most that was
# allocated since the last note, and what `.grad` takes. Inside `on_gpu()`, "cuda" is your GPU or a [simulated
# one](../docs/glossary.md#simulated-gpu). One step comes first, so that AdamW's states exist.
#
# **Your guess.** The model has 124 million parameters in fp32. By how many MB is the peak of the second micro-batch
# higher than that of the first?

# %%
predict("08.floor", unit="MB")

# %%
from course_utils import on_gpu


def note(module=None, inputs=None, y=None):
    grads = sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
    notes.append((torch.cuda.max_memory_allocated(), grads))
    torch.cuda.reset_peak_memory_stats()
    if y is not None and y.requires_grad:
        y.register_hook(lambda dy: note())


# %%
def accumulate(model, optimizer, parts):
    """One step; return where in `notes` each forward and each backward begins and ends."""
    work = []
    for number, part in enumerate(parts, 1):
        start = len(notes)
        loss = forward(model, part, len(parts))
        work.append((f"forward {number}", start, len(notes), "activations"))
        loss.backward()
        note()
        work.append(("backward", work[-1][2], len(notes), "gradients"))
    optimizer.step()
    optimizer.zero_grad()
    return work


# %%
from course_utils.lessons.shared.time_axis import time_axis

k = 4  # change this
with on_gpu(needs="10 GB"):
    model = GPT(768, 12, 12).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parts = torch.randint(50257, (16, 1025), device="cuda").chunk(k)
    for _ in range(2):
        notes, hook = [], nn.modules.module.register_module_forward_hook(note)
        rest = torch.cuda.memory_allocated()
        work = accumulate(model, optimizer, parts)
        hook.remove()
    kind = torch.cuda.get_device_name()
weights = sum(weight.nbytes for weight in model.parameters())
first, second = (max(most for most, _ in notes[part[1] : part[2]]) for part in work[1:4:2])
print(f"the second peak is {(second - first) / 1e6:.1f} MB higher; all gradients", end=" ")
print(f"{weights / 1e6:.1f} MB, the gap {(weights - second + first) / 1e6:+.1f} MB")
reveal("08.floor", second - first, unit="MB")

# %% tags=["hide-input"]
memory = {"parameters": [weights] * len(notes), "optimizer_states": [rest - weights] * len(notes)}
memory["gradients"] = [grads for _, grads in notes]
memory["activations"] = [most - rest - grads for most, grads in notes]
time_axis(
    {"compute": work},
    memory,
    range(len(notes)),
    "From the second micro-batch on, all gradients are a floor under the activations",
    xlabel="modules, forward and backward, in order",
    provenance=f"{kind}; activations with all that is temporary",
)

# %% [markdown]
# With one micro-batch, activations disappear as gradients appear. From the second on, all gradients are already there:
# 4 bytes per parameter. A third adds nothing. **The gap**: the allocator may give a tensor a freed block that is
# up to 1 MB larger. Change k to 8: activations and logits halve. What does not?
#
# The narrow towers are the loss: logits, [log-softmax](../docs/glossary.md#log-softmax) and their gradients ([lesson
# 05](05_activations.ipynb)).

# %% [markdown]
# ## What it saves, what it costs
# A batch of 64 sequences of 1,024 tokens. **Your guess.** All at once, a GPU has counted a peak of 56.85 GB
# ([recorded](../docs/evidence.md#memory-against-time)). What is the peak with 16 micro-batches of 4?

# %%
predict("08.memory", unit="GB")

# %% [markdown]
# Weigh every way to cut the batch with the counter of `torch.cuda`. (Two micro-batches suffice: a third adds
# nothing.) A `TrainingRun` writes the same training down, and `estimate` adds up its tensors by formula.

# %%
from course_utils import TrainingRun, estimate
from course_utils.lessons.accumulation import recorded


def weigh(sizes):
    """The peak of a step on 64 sequences, by the size of its micro-batches."""
    start, peaks = torch.cuda.memory_allocated(), {}
    model = GPT(768, 12, 12).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for b in (1, *sizes):  # the first step makes AdamW's states
        torch.cuda.reset_peak_memory_stats()
        for _ in range(min(64 // b, 2)):
            text = torch.randint(50257, (b, 1025), device="cuda")
            forward(model, text, 64 // b).backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks[b] = torch.cuda.max_memory_allocated() - start
    return peaks


# %%
run = TrainingRun("gpt2", 64, precision="amp-bf16", optimizer="adamw-fused", dropout=0.0)
print(f"peaks in GB; counted and tokens/s: {recorded.PROVENANCE}")
with on_gpu(needs="60 GB"):
    weighed = weigh(recorded.SPLIT)
for b, (counted, speed) in recorded.SPLIT.items():
    formula = estimate(run.replace(micro_batch=b, accumulation_steps=64 // b)).total
    print(
        f"{64 // b:2d} × {b:2d}: {formula / 1e9:5.2f} estimated, {weighed[b] / 1e9:5.2f}", end=" "
    )
    print(f"weighed here, {counted / 1e9:5.2f} counted, {speed:7,} tokens/s")
reveal("08.memory", weighed[4])

# %% [markdown]
# **The gap.** The formula adds up tensors. Counters add workspaces of cuBLAS, NVIDIA's library for matrix products,
# which are larger on an H200, and blocks that are larger than their tensors. CUDA's
# [context](../docs/glossary.md#context-cuda), hundreds of MB, is in none of these numbers.
#
# Each cut in half saves less than the one before: weights, states and gradients do not shrink. And speed? Accumulation
# costs no [FLOPs](../docs/glossary.md#flops): the arithmetic is the large batch's. Predict: how much slower are 64
# micro-batches of 1?

# %%
slow, fast = recorded.SPLIT[1].speed, recorded.SPLIT[64].speed
print(f"64 × 1 takes {fast / slow:.1f} times as long as 1 × 64", end="; ")
print(f"16 × 4 takes {fast / recorded.SPLIT[4].speed:.2f} times as long")
recorded.draw_speeds("From 8 sequences on, a larger micro-batch buys little speed")

# %% [markdown]
# Below the knee, half as many sequences take nearly as long: the kernels are so short that they probably end before
# Python has launched the next ones, and the GPU waits. Above it, a larger micro-batch costs memory and buys little. So
# do not take "the largest that fits", but *the smallest that keeps your GPU busy*. Compiled ([lesson
# 07](07_torch_compile.ipynb)), this one is done sooner, so the knee lies further right. With a larger model, longer
# sequences or a slower card it should lie further left: time your own step.
#
# And the puzzle of lesson 01, GPT-2 XL with 32 sequences? One recipe adds up gradients in bf16, the other in fp32. Both
# keep [master weights](../docs/glossary.md#master-weights).

# %%
xl = TrainingRun("gpt2-xl", 32, 1024, precision="bf16-master", recompute="full")
for k in (1, 2, 4, 8, 16, 32):  # change this
    cut = xl.replace(micro_batch=32 // k, accumulation_steps=k)
    both = [estimate(cut).total, estimate(cut.replace(precision="bf16-master-fp32grad")).total]
    print(f"{k:2d} × {32 // k:2d}: {both[0] / 1e9:5.1f} GB with bf16 gradients", end=", ")
    print(f"{both[1] / 1e9:5.1f} GB with fp32 gradients (estimated)")

# %% [markdown]
# A card "of 32 GB" gives a program a little more than 33 GB ([lesson 01](01_where_did_the_memory_go.ipynb)). As 8
# micro-batches of 4, the step fits even with fp32 gradients, so take them. Each further cut saves less, because the
# states remain. A GPU has taken the steps of 8 × 4 in bf16: see [all recorded runs](../docs/gpu_results.md).
#
# **Predict**: does it fit a card of 24 GB, if you cut further? Choose another GPU, and cut as you like:

# %%
from course_utils.interactive.widgets import run_sliders

run_sliders(
    "gpt2-xl",
    gpu="RTX5090-32GB",
    micro_batch=4,
    accumulation_steps=8,
    precision="bf16-master-fp32grad",
    recompute="full",
)

# %% [markdown]
# <details><summary>An answer</summary>
#
# 24 GiB are 25.8 GB. The driver and CUDA's context take some of it, and even single sequences with bf16 gradients need
# 25.4. So no. One way out is other states, such as 8-bit Adam's ([lesson 02](02_adam.ipynb)).
#
# </details>

# %% [markdown]
# ## The script's next lines
# Your script takes a step on 8 sequences, with checkpoints, the loss in chunks, and compiled. Now let a step have 32: as 4
# micro-batches of 8. **Predict** the peak: which of its parts are there at the same time? Then make the change in
# `my_train.py`, save, and run the cell again.

# %%
from course_utils.lessons.shared.growing_script import script

script(8)

# %% [markdown]
# Four times the batch costs half a GB: all gradients, 4 bytes per parameter, are the floor under the next micro-batch.
# (The loss that the script prints is the last micro-batch's. And lesson 09 changes the learning rate alone: no byte.)

# %% [markdown]
# ## In your own script
# The accumulation loop with everything in its place: weigh each micro-batch by its tokens, unscale and clip once after
# the last one, step once. A group may be incomplete.

# %%
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=False)  # True if autocast is to fp16
x, y = torch.randn(88, 64), torch.randint(10, (88,))  # your data: 11 micro-batches of 8
loader, k = list(zip(x.split(8), y.split(8), strict=True)), 4

# %%
for first in range(0, len(loader), k):
    group = loader[first : first + k]
    total = sum((targets != -100).sum().item() for _, targets in group)
    optimizer.zero_grad(set_to_none=True)
    for inputs, targets in group:
        with torch.autocast(device, torch.bfloat16):
            logits, wanted = model(inputs.to(device)), targets.to(device)
            loss = nn.functional.cross_entropy(logits, wanted, reduction="sum") / total
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    length = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # once, on the sum
    scaler.step(optimizer)
    scaler.update()
    print(f"{len(group)} micro-batches, then one step")

# %% [markdown]
# Run `python3 -m course_utils watch --save before.gz train.py`, change a line, then run `watch --against before.gz
# train.py`. It lists every tensor that came, went or grew, and the effect on the peak.

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(8)

# %% [markdown]
# ## Take home
# **Remember** Gradients add. Many small micro-batches are one large batch, if each counts by its share of tokens and
# the optimizer does not step in between.
#
# **Breaks when** losses are not divided, the last group is left over, lengths differ and you average over
# micro-batches, gradients are clipped before the last one, or a bf16 `.grad` adds up hundreds.
#
# **Cheat-sheet line** global batch = b · k · ranks · loss × (tokens of the micro-batch / tokens of the group) · peak:
# one micro-batch and all gradients · DDP: `no_sync()` until the last micro-batch.
#
# This lesson corrects claim 15 of [what the sources got wrong](../docs/errata.md).
#
# Now solve [exercises 1 to 3](../exercises/08_gradient_accumulation.ipynb). Then, if you like, [lesson
# 09](09_large_batches.ipynb): large batches and their learning rate.
