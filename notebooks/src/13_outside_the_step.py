# ---
# jupyter:
#   course:
#     minutes: 85
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · Outside the step
#
# **85 minutes.** You should know what is in memory during a training step ([lesson
# 01](01_where_did_the_memory_go.ipynb)), and the difference between allocated and reserved ([lesson
# 12](12_allocator_and_fragmentation.ipynb)). You need no GPU.
#
# The step fits. Then you resume, evaluate, save, or read an error, and the GPU is out of memory. Here is one training
# script and six ways to break it. None of them changes the step.

# %% [markdown]
# ## A step of 9.4 GB
# The model is a GPT with 205 million parameters: 8 blocks, h = 1,024, V = 50,304. It trains under autocast on 8
# sequences of 1,024 tokens.

# %%
import torch
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
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.a, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %%
class GPT(nn.Module):
    def __init__(self, h=1024, L=8, a=16, V=50304):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks = nn.Sequential(*(Block(h, a) for _ in range(L)))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, V, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def make():
    model = GPT().to("cuda")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


# %%
def batch(b=8):
    return torch.randint(50304, (b, 1024), device="cuda")


def loss_of(model, ids):  # the targets are not shifted: only sizes matter here
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(b=8):
    loss_of(model, batch(b)).backward()
    optimizer.step()
    optimizer.zero_grad()


# %% [markdown]
# Any work can be weighed by three counters: allocated before, allocated after, and the most in between. People forget
# the reset.


# %%
def weigh(work, *arguments, **named):
    """Bytes allocated before and after some work, and the most in between."""
    torch.cuda.reset_peak_memory_stats()  # or an older peak counts
    before = torch.cuda.memory_allocated()
    result = work(*arguments, **named)
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del result  # which was alive until now
    return before, after, peak


# %% [markdown]
# An H200 counted this run, too. So simulate that card: inside `on_gpu`, "cuda" is your GPU if it is one, else a
# [simulated GPU](../docs/glossary.md#simulated-gpu). The script saves a
# [checkpoint](../docs/glossary.md#checkpoint) after two steps: weights and optimizer states, in a file.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

from course_utils import on_gpu
from course_utils.lessons.outside_the_step.recorded import PROVENANCE, RECORDED

card, folder = "H200-141GB", TemporaryDirectory()
path = Path(folder.name, "checkpoint.pt")
with on_gpu(card=card):
    model, optimizer = make()
    for number in (1, 2):
        before, after, peak = weigh(train)
        counted = RECORDED[f"step {number}"].peak
        print(f"step {number}: {before / 1e9:.2f} GB before it, {after / 1e9:.2f} after", end=", ")
        print(f"peak {peak / 1e9:.2f}; the H200 counted {counted / 1e9:.2f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
print(PROVENANCE)

# %% [markdown]
# Now the closed form. Between two steps there are 12 bytes per parameter, weights and Adam's moments, and 64 MiB of
# cuBLAS's [workspaces](../docs/glossary.md#workspace) on this card. Call this sum *rest*. Forward adds a *graph*, what
# backward needs ([lesson 05](05_activations.ipynb)): 36 bytes per number in a block, 6 per
# [logit](../docs/glossary.md#logits), the norm at the end, and autocast's copies of the weights. The peak comes when the
# loss's backward adds an fp32 gradient of the logits.

# %%
T, h, L, V = 8 * 1024, 1024, 8, 50304
N = sum(weight.numel() for weight in model.parameters())
rest = 12 * N + 2 * 32 * 2**20
weight_copies = 2 * (12 * L * h * h + V * h)  # the linear layers in bf16
graph = (36 * L + 6) * T * h + 6 * T * V + weight_copies
usual = rest + graph + 4 * T * V
print(f"N = {N:,}: rest {rest / 1e9:.2f} GB, graph {graph / 1e9:.2f} GB, step {usual / 1e9:.2f} GB")

# %% [markdown]
# **The gap** to the card is small, and has names: the statistics of flash attention and of the norms, and 1 MiB that
# torch 2.9 to 2.11 keep for products with a bias.
#
# The run goes on: it evaluates four batches in four ways, saves, copies the weights for an average, generates text,
# adds up losses, hits an error, and resumes. Twelve such moments were counted. **Your guess.** How many of the twelve peak
# higher than the step? You can change your guess until the last figure.

# %%
from course_utils.interactive.guesses import predict, reveal

predict("13.count", unit="moments")

# %% [markdown]
# ## 1 · Resume
# "From scratch it fits. When I resume, it is out of memory." The checkpoint's weights and moments take 12 bytes per
# parameter, as many as there are at rest. They are loaded with `map_location="cuda"`, copied into model and optimizer,
# and the name `checkpoint` stays. **Your guess.** By how many GB does the next step's peak rise?

# %%
predict("13.resume", unit="GB")


# %%
def resume(where):
    global checkpoint
    checkpoint = torch.load(path, map_location=where, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


loads, steps = {}, {}
with on_gpu(card=card):
    for where in ("cpu", "cuda"):  # change this
        model = optimizer = checkpoint = None  # the old ones would count, too
        model, optimizer = make()
        loads[where] = weigh(resume, where)[2]
        steps[where] = weigh(train)[2]
    checkpoint = None
    steps["cuda, name deleted"] = weigh(train)[2]
reveal("13.resume", steps["cuda"] - steps["cpu"], unit="GB")

# %%
from course_utils.figures import Segment, stack


def alive(peak, copy=0, name="the checkpoint's weights"):
    """What is alive at the peak of a step: weights, moments, perhaps a copy, and the rest."""
    weights = Segment("weights", 4 * N, "parameters")
    moments = Segment("moments", 8 * N, "optimizer_states")
    others = Segment("activations, gradients, …", peak - 12 * N - copy, "activations")
    return [weights, moments, Segment(name, copy, "weight_copies"), others]


title = "While its name lives, a checkpoint on the GPU is a second copy of the weights"
rows = {"checkpoint on the CPU": alive(steps["cpu"])}
rows["on the GPU, still named"] = alive(steps["cuda"], 4 * N)
rows["on the GPU, name deleted"] = alive(steps["cuda, name deleted"])
stack(rows, title, provenance="step after resuming, on the card of the cell above")

# %% [markdown]
# Only 4 bytes per parameter, not 12. `model.load_state_dict` *copies* weights into the model, so there are two of each.
# The optimizer *takes* the loaded moments, because they are already on its device. While loading, it has none of its
# own. But go back to a checkpoint in the middle of a training, and the old moments are there as well, until the
# new ones have replaced them.
#
# Next to the card, with the closed forms:

# %%
from course_utils.lessons.outside_the_step.recorded import three_ways

three_ways(
    {
        "resume, map_location cuda, checkpoint kept": (rest + 4 * N, loads["cuda"]),
        "resume, map_location cpu": (rest, loads["cpu"]),
        "step after it, checkpoint still named": (usual + 4 * N, steps["cuda"]),
        "step after it, checkpoint deleted": (usual, steps["cuda, name deleted"]),
    }
)

# %% [markdown]
# **The cure** `torch.load(path, map_location="cpu", mmap=True)`, and load inside a function, so that the name dies.
#
# Without `map_location`, tensors return to the GPU that they were saved from. On several GPUs, that is GPU 0 for *every*
# rank: D copies of the checkpoint on one card.

# %% [markdown]
# ## 2 · Evaluate
# Training forgets a batch's [activations](../docs/glossary.md#activations) in `backward()`. Evaluation has no
# `backward()`. So what frees them?
#
# **Your guess.** A script sets `model.eval()` and collects the losses of four batches, without `no_grad`. What is the
# peak in GB?

# %%
predict("13.no_grad", unit="GB")

# %%
with on_gpu(card=card):
    held_out = [batch() for _ in range(4)]  # change this
    model.eval()
    careless = weigh(lambda: [loss_of(model, ids) for ids in held_out])
    model.train()
print(f"one graph {graph / 1e9:.2f} GB by formula, {(careless[1] - careless[0]) / 4e9:.2f} here")
reveal("13.no_grad", careless[2], unit="GB")

# %% [markdown]
# `eval()` only switches layers such as dropout. Autograd keeps everything for a backward that never comes: each loss is
# 4 bytes, and holds a graph of 5 GB.
#
# With `torch.no_grad()` there is no graph. What remains is what you collect:


# %%
def evaluate(keep):
    """Evaluate four batches; `keep` says what of their logits is collected."""
    kept = []
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for ids in held_out:
            logits = model(ids)
            kept.append(keep(logits))
    model.train()
    return kept


collect = {
    "evaluation, no_grad, fp32 logits kept on the GPU": lambda logits: logits.float(),
    "evaluation, no_grad, logits moved to the host": lambda logits: logits.float().cpu(),
    "evaluation, no_grad, only predictions kept": lambda logits: logits.argmax(-1),
}

# %%
moved = rest + weight_copies + 6 * T * V
formulas = {"evaluation, no no_grad, losses kept": rest + 4 * graph + 2 * T * V}
formulas["evaluation, no_grad, fp32 logits kept on the GPU"] = moved + 3 * 4 * T * V
formulas["evaluation, no_grad, logits moved to the host"] = moved
formulas["evaluation, no_grad, only predictions kept"] = (
    rest + weight_copies + 2 * 2 * T * V + 10 * T * h
)
here = {"evaluation, no no_grad, losses kept": careless[2]}
with on_gpu(card=card):
    for name, keep in collect.items():
        here[name] = weigh(evaluate, keep)[2]
three_ways({name: (formulas[name], here[name]) for name in formulas})

# %% [markdown]
# Read the formulas as pictures. *Kept*: four batches of fp32 logits, 4 bytes each, and the last ones in bf16. *Moved*:
# one batch in both formats. *Predictions*: 2 · 2 bytes per logit. Why twice, if no logits are kept?
#
# Watch all four ways, module by module:


# %%
def trace(work, *arguments):
    """Gigabytes allocated whenever the forward of a module ends."""
    seen = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda *_: seen.append(torch.cuda.memory_allocated() / 1e9)
    )
    work(*arguments)
    hook.remove()
    return range(len(seen)), seen


# %%
from course_utils.figures import lines

ways = ("kept on the GPU", "moved to the host", "predictions")
with on_gpu(card=card):
    curves = {"no no_grad": trace(lambda: [loss_of(model, ids) for ids in held_out])}
    for way, keep in zip(ways, collect.values()):
        curves[way] = trace(evaluate, keep)
title = "A graph per batch, or its logits, or nothing: four evaluations of four batches"
source = "allocated as modules end, on the card of the cell above"
lines(curves, title, "modules, in order", "GB", markers=False, provenance=source)

# %% [markdown]
# **Your turn.** After the first batch, even the lowest curves never come back to where they began. Write one line, so
# that this evaluation stays below 4 GB.


# %%
def evaluate_lean():
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        predictions = []
        for ids in held_out:
            logits = model(ids)
            predictions.append(logits.argmax(-1))
            # write one line
        return torch.cat(predictions)


with on_gpu(card=card):
    lean = weigh(evaluate_lean)[2]
    right = evaluate_lean().shape == (8 * len(held_out), 1024)
print("Right." if right and lean < 4e9 else f"Not yet: {lean / 1e9:.2f} GB.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `del logits`. Without it, the name still holds the last batch's logits while the next ones are computed. A training
# loop that binds `outputs = model(ids)` pays the same price in each forward.
#
# </details>
#
# **The cure** `no_grad` or `inference_mode`; collect numbers, not logits; `.cpu()` what you must keep. A
# Trainer has `no_grad` already. It needs a smaller `per_device_eval_batch_size`, `eval_accumulation_steps` to move
# logits, or `preprocess_logits_for_metrics` to keep only predictions.

# %% [markdown]
# ## 3 · Add up losses
# For the log, a script computes `total = total + loss` after each `loss.backward()`, without `.item()`. Many texts say
# that this keeps every graph. **Your guess.** How many MB does it keep after three steps?

# %%
predict("13.total", unit="MB")


# %%
def epoch(steps=3):  # change this
    total = 0
    for _ in range(steps):
        loss = loss_of(model, batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss
    return total


def losses():
    return sum(loss_of(model, batch()) for _ in range(3))


# %%
with on_gpu(card=card):
    before, after, peak = weigh(epoch)
    print(f"after backward: {after - before} bytes more, peak {peak / 1e9:.2f} GB")
    summed = weigh(losses)
reveal("13.total", after - before, unit="MB")
three_ways({"step, losses summed as tensors": (rest + 3 * graph + 2 * T * V, summed[2])})

# %% [markdown]
# 512 bytes: one number. `backward()` frees what the graph has saved, and only the empty graph stays, in the host's
# memory. So `total += loss` is harmless after `backward()`. It is expensive *before* it: several losses that are summed
# and then differentiated once, or an evaluation without `no_grad`. Then each loss holds a graph of 5 GB.
#
# **The cure** `backward()` for each loss, which adds up the same gradients ([lesson
# 08](08_gradient_accumulation.ipynb)), and `total += loss.detach()` for the log.

# %% [markdown]
# ## 4 · An error that stays
# In a notebook you call the model once, to look at its output, without autocast. The next line has a typo. You correct
# it, run the cell again, and the GPU is out of memory. **Your guess.** How many GB does the error hold?

# %%
predict("13.error", unit="GB")


# %%
def look():
    ids = batch()
    logits = model(ids)
    raise RuntimeError(f"a typo in what follows {logits.shape}")


def notebook():
    """Run `look()` as a notebook does: show the error, and keep it."""
    try:
        look()
    except RuntimeError as error:
        return error


# %%
def tensors_of(error):
    """Names and shapes of the tensors in all frames of an error."""
    place = error.__traceback__
    while place is not None:
        for name, value in place.tb_frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                graph = "and its graph" if value.requires_grad else ""
                print(f"{place.tb_frame.f_code.co_name}(): {name} {[*value.shape]} {graph}")
        place = place.tb_next


# %%
with on_gpu(card=card):
    before, after, peak = weigh(notebook)
    error = notebook()
    tensors_of(error)  # change this
    error = None
    dropped = torch.cuda.memory_allocated()
print(f"with the error {after / 1e9:.2f} GB, without it {dropped / 1e9:.2f}")
reveal("13.error", after - before, unit="GB")
fp32_graph = (64 * L + 8) * T * h + 4 * T * V
three_ways({"an error kept in sys.last_value": (rest + fp32_graph, after)})

# %% [markdown]
# An error has a traceback, a traceback has frames, and a frame has its local variables. `logits` is one of them, with
# its whole graph behind it. (In fp32, 64 bytes per number in a block.) A script ends with its error. A notebook keeps
# the error, so that `%debug` can open it:
#
# - `sys.last_value`, `sys.last_traceback` and, from Python 3.12 on, `sys.last_exc`: until the *next* error. Running
#   `1/0` in a cell is a cure.
# - `Out[7]`, `_`, `__`, `___`: a cell whose last line is `model(ids)` keeps that output. `%reset -f out` clears
#   them.
# - The debugger's frames, while it is open.
#
# **The cure** In a notebook, `1/0` or a new kernel. In a script that goes on after errors, keep none with its traceback:
# `error.with_traceback(None)`, or `traceback.clear_frames(error.__traceback__)`. `empty_cache()` frees nothing that is
# alive.

# %% [markdown]
# ## 5 · Save
# `torch.save` writes both state dicts, 12 bytes per parameter. **Your guess.** How many GB does the GPU need for that, on
# top of what is there?

# %%
predict("13.save", unit="GB")


# %%
def save():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def snapshot():
    return {name: weight.clone() for name, weight in model.state_dict().items()}


with on_gpu(card=card):
    saved, copied = weigh(save), weigh(snapshot)
reveal("13.save", saved[2] - saved[0], unit="GB")
rows = {"torch.save of both state dicts": (rest, saved[2])}
rows["copy of the state dict on the GPU"] = (rest + 4 * N, copied[2])
three_ways(rows)

# %% [markdown]
# Nothing. A state dict is a dictionary of *references*, and `torch.save` copies tensor by tensor to the host. Only your
# own copy costs memory, such as "the best weights so far". Let it be `weight.to("cpu", copy=True)`.
#
# A sharded model is different. Rank 0 of 8 holds an eighth ([lesson 11](11_zero_and_fsdp.ipynb)), and a *full* state
# dict puts the shards together, on the GPU:

# %%
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard


def shard(every_block=True):
    """Shard the model, and take a step."""
    global model, optimizer
    model = GPT().to("cuda")
    for block in model.blocks if every_block else ():
        fully_shard(block)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters(), lr=1e-4)
    train()


# %%
from course_utils.figures import bars

peaks = {}
for offload in (False, True):  # change this
    with on_gpu(ranks=8, card=card):
        dist.init_process_group("nccl")
        shard()
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        rest_of_8, _, peak = weigh(get_state_dict, model, optimizer, options=options)
        peaks[f"full, cpu_offload={offload}"] = peak
peaks["before saving: its own shards"] = rest_of_8
title = f"A full state dict is {12 * N / 1e9:.1f} GB more on each GPU, unless it goes to the host"
bars(peaks, title, provenance="rank 0 of 8, simulated; no recording exists")

# %% [markdown]
# **The cure** `cpu_offload=True`: one tensor at a time is whole. Or save shards, with
# `torch.distributed.checkpoint.save`.

# %% [markdown]
# ## 6 · A second model
# A moving average of the weights (EMA), a reference model for reinforcement learning, a teacher: each is another model
# on the GPU, in every step. **Your guess.** `average = copy.deepcopy(model)`. What does the next step peak at, in GB?

# %%
predict("13.copy", unit="GB")

# %%
import copy

model = optimizer = None
with on_gpu(card=card):
    model, optimizer = make()
    train()
    made, plain = weigh(copy.deepcopy, model)[2], weigh(train)[2]
    average = copy.deepcopy(model)  # change this: .bfloat16(), then .cpu()
    copied = weigh(train)[2]
    average = None
reveal("13.copy", copied, unit="GB")
title = "A second model is one more copy of the weights, in every step"
rows = {"no copy": alive(plain), "an average": alive(copied, copied - plain, "the copy")}
stack(rows, title, provenance="a step's peak, on the card that this cell names")

# %% [markdown]
# An average needs no gradient, no moments and no graph. So it costs only the weights, if you update it under `no_grad`,
# and it can wait on the host. A frozen reference model can be bf16, or be the base model of a
# [LoRA](../docs/glossary.md#lora) with its adapters switched off ([lesson 16](16_lora.ipynb)). But it
# also makes logits, next to those that you train.
#
# The last moment is generation: 64 new tokens for each of 8 prompts, under `no_grad`.


# %%
def generate(prompt, new):
    ids = torch.randint(50304, (8, prompt), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(new):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)


with on_gpu(card=card):
    text = weigh(generate, 79, 1)[2]  # the last of 64 forwards has the most tokens
logits = 2 * 8 * 79 * V
name = "generation without a cache, 64 tokens, in the middle of training"
rows = {"deepcopy for EMA": (rest + 4 * N, made)}
rows[name] = (rest + weight_copies + logits, text)
three_ways(rows)

# %% [markdown]
# Small, but it grows. Libraries keep keys and values of all tokens, to save time: 4 · L · h bytes per token in bf16
# (the *KV cache*). In *training* such a cache only costs: set `model.config.use_cache = False`. Generation needs
# smaller batches, or fewer new tokens.

# %% [markdown]
# ## Rent for the largest moment
# All twelve moments as the H200 counted them. "step 3" is a step with nothing else around it:

# %%
as_usual = ("step 1", "step 2", "step after it", "step after it, checkpoint deleted")
left_out = (*as_usual, "after it is dropped", "copy of the state dict on the GPU")
ranked = sorted(RECORDED.items(), key=lambda item: -item[1].peak)
moments = {name.partition(", 64")[0]: one.peak for name, one in ranked if name not in left_out}
above = [name for name, peak in moments.items() if peak > moments["step 3"]]
title = "An evaluation without no_grad needs more than twice as much as the step"
reveal("13.count", len(above), unit="moments")
bars(moments, title, highlight="step 3", provenance=f"peak of each moment · {PROVENANCE}")

# %% [markdown]
# So the number to rent a card by is a maximum over *moments*, not over steps:
#
# $$\text{peak of the run} = \text{states} + \max(\text{step}, \text{evaluate}, \text{resume}, \text{save}, \dots)$$
#
# Evaluate once *before* the first step, and save once. Then a run that will fail fails at once. What `weigh` does
# here, `measure_moments` does for a list of functions:

# %%
from course_utils import measure_moments

with on_gpu(card=card):
    model, optimizer = make()
    ways = [("step 1", train), ("step 2", train), ("evaluation", evaluate_lean)]  # change this
    print(measure_moments(ways))
model = optimizer = None

# %% [markdown]
# And `python3 -m course_utils watch --whole train.py` finds the moments of a script by itself: it follows it through
# loading, evaluation and saving, and names the largest ([commands](../docs/commands.md)).

# %% [markdown]
# ## Which counter?
# Somebody says "it needs 12 GB", somebody else "9.4 GB". Both have looked at the same run. Here is the script after two
# steps, on a smaller card:

# %%
model = optimizer = None
with on_gpu(card="RTX4090-24GB"):  # change this
    model, optimizer = make()
    train()
    train()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    model = optimizer = None
parts = [
    Segment("allocated", allocated, "parameters"),
    Segment("reserved, no tensor", reserved - allocated, "cached"),
    Segment("CUDA's context", total - free - reserved, "workspaces"),
    Segment("free", free, "free"),
]
title = f"Tensors take {allocated / 1e9:.1f} GB, and nvidia-smi shows {(total - free) / 1e9:.1f}"
stack({"between two steps": parts}, title, provenance="simulated; context assumed")

# %% [markdown]
# | you ask | it says | it does not see |
# |---|---|---|
# | `memory_allocated()` | tensors that are alive now | the peak, the cache, NCCL |
# | `max_memory_allocated()` | their peak since the last reset | holes between tensors |
# | `max_memory_reserved()` | the most that PyTorch took from the driver | context, NCCL, other libraries |
# | `mem_get_info()` | free and total of the card, all processes together | who has it |
# | `nvidia-smi` | per process: context + reserved + libraries | that reserved memory can be reused |
#
# To compare two versions of your code, read `max_memory_allocated()`. To ask whether a card suffices, read
# `max_memory_reserved()`, and add the context.
#
# **Several processes on GPU 0.** You start 8 ranks, and `nvidia-smi` shows 8 processes on GPU 0. Each rank that touches
# "cuda" before `torch.cuda.set_device(local_rank)` makes a [context](../docs/glossary.md#context-cuda) there, of
# hundreds of MB. Seven contexts too many, and only rank 0 is out of memory. A `torch.load` without `map_location` and a
# bare `.cuda()` do it, too.

# %% [markdown]
# ## What people say
# ### "Checkpointing changed nothing"
# Recompute every block ([lesson 06](06_recomputation.ipynb)), for 8, 4, 2 sequences and one:

# %%
from functools import partial

from torch.utils.checkpoint import checkpoint

sizes = (1, 2, 4, 8)  # change this
with on_gpu(card=card):
    model, optimizer = make()
    train()
    curves = {"as it is": (sizes, [weigh(train, b)[2] / 1e9 for b in sizes])}
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    curves["checkpointing"] = sizes, [weigh(train, b)[2] / 1e9 for b in sizes]
title = "With one sequence, checkpointing saves nothing, and a smaller batch would not either"
level = ("20 · N", 20 * N / 1e9)
lines(curves, title, "sequences", "GB at the peak", level=level, provenance="simulated, H200")

# %% [markdown]
# With one sequence the peak is in `optimizer.step()`: weights, gradients, moments, and foreach's temporaries, 20 bytes
# per parameter. No activation is left there. This is also the answer to "*batch 1 is still too large*": what remains is
# per parameter, so change the optimizer (fused: 16), shard, or train fewer weights. With 8 sequences, checkpointing
# saves a quarter. Then the loss decides. Go through this list:
#
# 1. Is the peak in a block? Or in the loss ([lesson 05](05_activations.ipynb)), or the optimizer's step?
# 2. Does it run? Under `use_reentrant=True`, no input that requires a gradient means no gradient at all.
#    `gradient_checkpointing_enable()` needs `model.train()`.
# 3. Is the segment small? One checkpoint around the whole model recomputes everything at once.
# 4. Did you reset the peak?

# %% [markdown]
# ### "FSDP is no better than DDP"
# In DDP, each GPU does what one GPU does alone, and keeps buckets ([lesson 10](10_data_parallelism.ipynb)). Compare that
# with rank 0 of 8 in FSDP, where only the model is wrapped, or every block:

# %%
_, alone = curves["as it is"]
peaks = {"b = 8, one GPU": 1e9 * alone[-1], "b = 1, one GPU": 1e9 * alone[0]}
for name, every_block in {"only the model": False, "each block": True}.items():
    model = optimizer = None
    with on_gpu(ranks=8, card=card):
        dist.init_process_group("nccl")
        shard(every_block)
        for b in (8, 1):  # change this
            peaks[f"b = {b}, FSDP, {name}"] = weigh(train, b)[2]
peaks = dict(sorted(peaks.items(), key=lambda item: -item[1]))
title = "FSDP divides weights, gradients and states. With b = 8, most of the peak is something else"
bars(peaks, title, provenance="a step's peak, rank 0 of 8, simulated")

# %% [markdown]
# With 8 sequences each, FSDP saves less than a fifth, wherever it wraps: activations are not sharded. With one sequence
# it more than halves the peak, and the blocks count. Three more reasons: the optimizer was made *before* `fully_shard`
# and holds the whole weights; the model was built on the GPU first; the new room was spent on a larger batch.
#
# **"4 × 24 GB is 96 GB."** Not for one model. At 16 bytes per parameter, 24 GB hold 1.5 billion parameters. In DDP four
# cards hold the same 1.5 billion, four times. FSDP gets near 6 billion, minus one gathered block, and minus activations:
# each card must hold those of its own sequences.

# %% [markdown]
# ### "I catch the error, and go on"
# On a card of 6 GB, this code halves the batch until it fits: 8, 4, 2, 1 sequences. It says that not even one fits. But
# 4.2 GB are enough for one, and 4.5 for two.
#
# **Your turn.** Move one line, so that the answer is 2. (An `except` needs a line of its own: `optimizer.zero_grad()`
# is a good one, because a backward that failed leaves some gradients.)


# %%
def fitting(b):
    """The largest of b, b / 2, b / 4, … sequences that fits, or 0."""
    if b == 0:
        return 0
    try:
        train(b)
        return b
    except torch.OutOfMemoryError:
        return fitting(b // 2)  # move this line


model = optimizer = None
with on_gpu("6 GB", card=card):
    torch.cuda.empty_cache()  # what is cached is no longer asked for
    model, optimizer = make()
    train(1)  # from now on there are moments
    found = fitting(8)
print("Right." if found == 2 else f"Not yet: it says that {found} sequences fit.")

# %% [markdown]
# <details><summary>The lines</summary>
#
# ```
#     except torch.OutOfMemoryError:
#         optimizer.zero_grad()
#     return fitting(b // 2)
# ```
#
# Inside `except`, the error is alive. It holds the frames of the step that failed, and they hold all its activations: way
# 4 again.
#
# </details>
#
# In DDP do not catch it at all: the other ranks wait for this one's gradients ([lesson
# 10](10_data_parallelism.ipynb)).

# %% [markdown]
# ### "A mask switched flash off"
# Flash attention takes no mask but the causal one. So what does a mask cost? Forward and backward of one attention, 8
# sequences of 1,024 tokens and 16 heads, on an A100:


# %%
def attend(**mask):
    q = torch.randn((8, 16, 1024, 64), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q, **mask)
    kernels.append(type(y.grad_fn).__name__.removeprefix("ScaledDotProduct").split("Att")[0])
    y.sum().backward()


kernels, peaks = [], {}
with on_gpu(card="A100-80GB"):  # change this
    seen = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").tril()
    bias = torch.zeros(16, 1024, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    masks = {"is_causal=True": {"is_causal": True}, "a mask (s, s)": {"attn_mask": seen}}
    for name, mask in {**masks, "a learned bias (a, s, s)": {"attn_mask": bias}}.items():
        before, _, peak = weigh(attend, **mask)
        peaks[f"{name}: {kernels[-1]}"] = peak - before
title = "A mask changes the kernel, and little else. A learned bias costs its own gradient"
bars(peaks, title, unit="MB", provenance="peak of forward and backward, simulated")

# %% [markdown]
# The next kernel, *efficient*, needs as little memory as flash. So a mask alone does not explain gigabytes. Three
# things do: a bias that is trained, for every sequence and head; scores that you compute or return yourself (`softmax(q @
# k.mT)`, `need_weights=True`); and a format that no fused kernel takes on your card. On a T4 or V100, that is bf16.

# %% [markdown]
# ### And more
# | people say | look here first |
# |---|---|
# | "GBs are free, and 20 MiB were refused" | who shares the card (`nvidia-smi`); a limit: `set_per_process_memory_fraction`, MIG, WSL; "reserved but unallocated" in the message: fragments ([lesson 12](12_allocator_and_fragmentation.ipynb)) |
# | "it fits on your card of the same size" | other cards have other workspaces (8.1 or 32 MiB, twice), kernels and contexts; another process |
# | "since the new torch it fails" | another default: foreach, attention kernel, workspace. Compare one step's snapshots |
# | "it fails after an hour" | longer batches, something kept from step to step, the first evaluation |
# | "the process was killed, without an error" | the *host's* memory (`dmesg` says so): each rank loads the checkpoint, DataLoader workers, offloading. "Bus error": a container's `/dev/shm` |
# | "vLLM has too little memory next to my training" | it takes a share of the *whole* card: `gpu_memory_utilization`. And its KV cache: `max_model_len` |
#
# `python3 -m course_utils oom error.txt` reads such a message, and says which cause its numbers fit. [Questions that
# people ask](../docs/questions.md) has these and more, each with its answer and a command.
#
# Nothing here changes the step. So `my_train.py`, the script that grows through the course, stays as it is, and so do
# its bytes.

# %% [markdown]
# ## In your own script
# Resume, evaluate and save, each in a function whose names die. `resume` loads on the CPU, `evaluate` keeps numbers,
# and the first evaluation comes before the first step.

# %%
import tempfile

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def save(path):  # a state dict has references: no copy on the GPU
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def resume(path):
    parts = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])


model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# %%
held_out = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(4)]


@torch.no_grad()
def evaluate(batches):
    model.eval()
    right = torch.zeros((), device=device)
    for x, y in batches:
        right += (model(x.to(device)).argmax(-1) == y.to(device)).sum()
    model.train()
    return right.item()


evaluate(held_out)  # before the first step
with tempfile.TemporaryDirectory() as folder:
    save(f"{folder}/checkpoint.pt")
    resume(f"{folder}/checkpoint.pt")
print("evaluated, saved and resumed before the first step")

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(13)

# %% [markdown]
# ## Take home
# **Remember** A run needs what its largest *moment* needs, and memory lives as long as something names it: a
# checkpoint, a list, an error.
#
# **Breaks when** the first evaluation comes after an hour, a notebook keeps an error, you retry inside `except`, or
# you read the wrong counter.
#
# **Cheat-sheet line** peak of a run = max over moments · resume on the GPU: + weights while the name lives · no
# `no_grad`: + one graph per batch · logits kept: + 4 · tokens · V · full state dict of shards: + states · EMA, reference: +
# weights · load to the CPU, `.detach()`, `del`, evaluate before step 1.
#
# Now solve the [exercises of this lesson](../exercises/13_outside_the_step.ipynb).
