# ---
# jupyter:
#   course:
#     minutes: 30
#     budget_seconds: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · My lesson
#
# **30 minutes.** You should know [lesson 01](01_where_did_the_memory_go.ipynb). No GPU is needed.
#
# What this lesson answers, in two or three sentences, and why one wants to know.

# %% [markdown]
# ## A question, as a heading
# What one has to know to guess. **Your guess.** How many GB does a step of GPT-2 take with 4 sequences?

# %%
from course_utils import TrainingRun, compare, estimate
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("15.first", unit="GB")

# %% [markdown]
# **Estimate.** The formula, in words. Then **measure** the same run.

# %%
waits_for("15.first")  # this cell gives the answer away: it is folded until there is a guess
run = TrainingRun("gpt2", micro_batch=4, seq_len=256)
compare(run)

# %%
reveal("15.first", estimate(run).total)

# %% [markdown]
# **The gap**, term by term: which tensor is it?
#
# Practice: [the exercises](../exercises/15_my_lesson.ipynb).

# %% [markdown]
# ## Take home
# **Remember** One sentence.
#
# **Breaks when** the case in which it does not hold.
#
# **Cheat-sheet line** the formula on one line.
