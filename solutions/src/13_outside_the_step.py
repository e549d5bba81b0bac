# ---
# jupyter:
#   course:
#     minutes: 80
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 13 · Outside the step
#
# **80 minutes** for all six; each one says its own. You should know what [lesson
# 13](../notebooks/13_outside_the_step.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints. Open one at a time. (“Run All Cells” stops at
# the first unsolved check.)

# %%
import torch

from course_utils import on_gpu
from course_utils.lessons.outside_the_step import checks as check

# %% [markdown]
# ## 1 · The peak of a run
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** writing down what is alive at a moment
#
# A model with N parameters trains in fp32 with AdamW. You know the peak of its `step` in bytes. An evaluation has
# `batches` batches. One batch's forward keeps a `graph` of so many bytes, or makes logits: `logits` numbers in fp32.
# Return a dictionary with the peaks, in bytes, of four moments. Leave out what only lives for an operation.
#
# - `"careless evaluation"`: without `no_grad`, and the losses are collected. A loss counts nothing.
# - `"logits kept"`: under `no_grad`, and all logits are collected on the GPU.
# - `"resume on the GPU"`: new model, new optimizer, checkpoint with `map_location="cuda"`. Its name lives.
# - `"step with a copy"`: a step while an fp32 average of the weights is on the GPU.


# %%
def peaks_of_a_run(N, step, graph, logits, batches):
    """Return bytes at the peak of each moment, by name."""
    ### BEGIN SOLUTION Return a dictionary with the four moments.
    rest = 12 * N  # weights and two moments
    return {
        "careless evaluation": rest + batches * graph,
        "logits kept": rest + batches * 4 * logits,
        "resume on the GPU": rest + 4 * N,
        "step with a copy": step + 4 * N,
    }
    ### END SOLUTION


# %%
check.peaks_of_a_run(peaks_of_a_run)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What is there between two steps, in bytes per parameter? Each of the first three moments adds something to it.
#
# </details>
# <details><summary>Hint 2: what piles up?</summary>
#
# What is collected lives until the evaluation ends. So the last batch meets all others.
#
# </details>
# <details><summary>Hint 3: one of two</summary>
#
# In the lesson, resuming on the GPU cost a third of what the file has. Which of model and optimizer copies?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Weights and two moments are 12 bytes per parameter, at every moment outside of the step. Graphs and logits of all
# batches add up. `model.load_state_dict` copies, so the checkpoint's weights are there twice. `optimizer.load_state_dict`
# takes the loaded moments as they are. A copy for an average is weights alone.

# %% [markdown]
# ## 2 · Resume
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** loading a checkpoint where there is room
#
# A file at `path` has a dictionary: `"model"` and `"optimizer"` are state dicts, `"step"` is a number. Write
# `resume(path, model, optimizer)`. It loads both, and returns the number. On a GPU, the checkpoint must never be there
# as a whole, and nothing of it may stay. The optimizer may have moments already.


# %%
def resume(path, model, optimizer):
    """Load model and optimizer from the file, and return the number of steps."""
    ### BEGIN SOLUTION Load the file, then both state dicts, and return the number.
    parts = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    return parts["step"]
    ### END SOLUTION


# %%
check.resume(resume)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `torch.load` puts each tensor on the device that it was saved from, unless you say otherwise.
#
# </details>
# <details><summary>Hint 2: who moves the values?</summary>
#
# `load_state_dict` of a model copies into weights that are on the GPU, from wherever the values are. The optimizer's
# moves each state to its parameter's device.
#
# </details>
# <details><summary>Hint 3: all but the last step</summary>
#
# `torch.load` has an argument for the place. Keep what it returns in a local name, so that it dies with your function.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The host usually has more memory than the card, and the checkpoint is needed there only once. Tensor by tensor, the
# values go to their place. `mmap=True` even leaves the file on disk until a tensor is read: several ranks on one
# machine then share its pages.

# %% [markdown]
# ## 3 · Evaluate
# **Difficulty** ●●○○○ · **14 minutes** · **Trains** keeping what you need and nothing else
#
# `batches` is a list of tensors on the model's device, each with one example per row. Write `evaluate(model, batches)`.
# It returns the class of each row, the place of the largest logit, as one tensor. Switch dropout off, and leave the
# model as you found it, in training or not. On a GPU, the peak must be that of one batch: its logits are the largest
# tensor, so no two of them may be alive at a time.


# %%
def evaluate(model, batches):
    """Return the class of each row of all batches, in one tensor."""
    ### BEGIN SOLUTION Return one tensor of classes.
    training = model.training
    model.eval()
    classes = []
    with torch.no_grad():
        for batch in batches:
            logits = model(batch)
            classes.append(logits.argmax(-1))
            del logits  # or they are alive while the next ones are computed
    model.train(training)
    return torch.cat(classes)
    ### END SOLUTION


# %%
check.evaluate(evaluate)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two things could keep a batch's tensors: a graph, and a list.
#
# </details>
# <details><summary>Hint 2: the mode</summary>
#
# `model.training` tells how you found it, and `model.train(mode)` takes True or False.
#
# </details>
# <details><summary>Hint 3: the last name</summary>
#
# In a loop, `logits = model(batch)` computes the new logits first. Only then the old ones lose their name.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# `no_grad` keeps hidden tensors from staying, `argmax` keeps one number per row instead of one per class, and `del`
# keeps two batches from meeting. `model(batch).argmax(-1)` without a name does the same as `del`.

# %% [markdown]
# ## 4 · A peak that does not move
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** measuring after a warm-up
#
# A colleague compares ways to compute something, after a warm-up. All ways come out alike:


# %%
def their_peaks(ways, warm_up):
    found = {}
    for name, way in ways.items():
        before = torch.cuda.memory_allocated()
        warm_up()
        way()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def small():
    torch.empty(2**20, device="cuda")


def large():
    torch.empty(2**23, device="cuda")


with on_gpu():
    print(their_peaks({"small": small, "large": large}, lambda: torch.empty(2**24, device="cuda")))

# %% [markdown]
# Write `peaks(ways, warm_up)`. For each way, run `warm_up()` and then the way. Return by name how many bytes *the way*
# takes at its peak, on top of what is allocated when it begins. The first warm-up leaves something on the GPU that stays.


# %%
def peaks(ways, warm_up):
    """Return the peak of each way by name, without the warm-up's."""
    ### BEGIN SOLUTION Return a dictionary of peaks.
    found = {}
    for name, way in ways.items():
        warm_up()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found
    ### END SOLUTION


# %%
check.peaks(peaks)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `max_memory_allocated()` is the largest value since the last reset, or since the program began.
#
# </details>
# <details><summary>Hint 2: three moments</summary>
#
# Warm-up, way, reading. Which two lines belong between the first and the second?
#
# </details>
# <details><summary>Hint 3: what stays</summary>
#
# A warm-up makes optimizer states and workspaces. They are there before the way begins, so they must not count.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Without a reset, every number is the largest so far, here the warm-up's. And "before" belongs after the warm-up: what
# it leaves is not the way's. A reset changes no memory, only the counter.

# %% [markdown]
# ## 5 · Which model is larger?
# **Difficulty** ●●●○○ · **14 minutes** · **Trains** seeing which names are alive
#
# `makers` has functions by name. Each returns `(model, optimizer, batch)` on the GPU, and `train(model, optimizer,
# batch)` takes two steps. A colleague weighs one after the other. Here the two models are equal, their numbers are not:


# %%
def their_weights(makers, train):
    found = {}
    for name, make in makers.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model, optimizer, batch = make()
        train(model, optimizer, batch)
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


# %%
def make():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    return model, torch.optim.AdamW(model.parameters(), fused=True), model.weight.detach()


def train(model, optimizer, batch):
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


with on_gpu():
    train(*make())
    print(their_weights({"one": make, "its twin": make}, train))

# %% [markdown]
# Write `weigh_models(makers, train)`. It returns by name how many bytes each training takes at its peak, from before its
# model is made, as if it were alone on the card. Nothing may be alive when you return.


# %%
def weigh_models(makers, train):
    """Return each training's peak by name, as if it were alone."""
    ### BEGIN SOLUTION Return a dictionary of peaks.
    found = {}
    for name, make in makers.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        training = make()
        train(*training)
        found[name] = torch.cuda.max_memory_allocated() - before
        del training
    return found
    ### END SOLUTION


# %%
check.weigh_models(weigh_models)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Print `before` in each round of the colleague's loop. What is in it, the second time?
#
# </details>
# <details><summary>Hint 2: three names</summary>
#
# An optimizer refers to the weights and the moments. If only the model's name is deleted, they stay.
#
# </details>
# <details><summary>Hint 3: two ways</summary>
#
# Delete the names at the end of each round. Or weigh one training in a function of its own: its names die with it.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# In the second round, `before` contains the first model. Then the names get new values, the first model dies, and the
# difference is too small by its bytes. If the reset came before `make()` alone, both models would be alive at the peak. In a
# notebook it is worse: names of a cell live until the end.

# %% [markdown]
# ## 6 · Errors that hold nothing
# **Difficulty** ●●●●○ · **16 minutes** · **Trains** knowing what a traceback holds
#
# `jobs` is a list of functions without arguments, such as trainings of a search. Some raise. Write `run_all(jobs)`. It
# runs them in order, and returns a list: for each job what it returned, or the error that it raised, with its type and
# message. An error must hold no tensor of its job, neither when the next job begins nor at the end. An error may have
# been raised `from` another one. Ctrl-C must end your function.


# %%
def run_all(jobs):
    """Return each job's result or its error, in a list."""
    ### BEGIN SOLUTION Return a list of results and errors.
    results = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)
            while error is not None:
                error.__traceback__ = None
                error = error.__cause__ or error.__context__
    return results
    ### END SOLUTION


# %%
check.run_all(run_all)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `error.__traceback__` leads to the frames of the functions that failed, and each frame has its local variables.
#
# </details>
# <details><summary>Hint 2: more than one error</summary>
#
# `raise … from error` stores `error` in `__cause__`. Raising inside `except` stores it in `__context__`.
#
# </details>
# <details><summary>Hint 3: all but the last step</summary>
#
# Walk from the error to its cause, and to the cause's cause. Each can lose its traceback and keep its message.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The list keeps errors, errors keep tracebacks, tracebacks keep frames, and frames keep tensors. Without its traceback,
# an error is a type and a text. `traceback.clear_frames` empties the frames instead, so that you can still print where
# it happened: `for one in chain: traceback.clear_frames(one.__traceback__)`.
