# ---
# jupyter:
#   course:
#     minutes: 30
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20 · My lesson
#
# **30 minutes.** You should know [lesson 01](01_where_did_the_memory_go.ipynb). No GPU is needed.
#
# YOURS: what this lesson answers and why it matters, in two or three sentences.

# %% [markdown]
# ## A question, as a heading
# YOURS: what a learner must know to guess. **Your guess.** How many GB does a step of GPT-2 take with 4 sequences?

# %%
from course_utils import TrainingRun, compare, estimate
from course_utils.figures import stack
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("20.first", unit="GB")

# %% [markdown]
# **Estimate.** YOURS: the formula, in a sentence. Then **measure** the same run.

# %%
waits_for("20.first")  # this cell gives the answer away, so it is folded until you guess
run = TrainingRun("gpt2", micro_batch=4, seq_len=256)  # change this
compare(run)

# %%
reveal("20.first", estimate(run).total)

# %%
runs = {f"{b} sequences": estimate(run.replace(micro_batch=b)) for b in (4, 8)}
stack(runs, "YOURS: the figure's conclusion, as a sentence.", provenance="estimated from formulas")

# %% [markdown]
# **The gap**, term by term. YOURS: which tensor is it?
#
# Practice: [the exercises](../exercises/20_my_lesson.ipynb).

# %% [markdown]
# ## Three questions
# Each choice answers at once: why it is right, or what mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(20)

# %% [markdown]
# ## Take home
# **Remember** YOURS: one sentence.
#
# **Breaks when** YOURS: a case where it does not hold.
#
# **Cheat-sheet line** YOURS: the formula on one line.
