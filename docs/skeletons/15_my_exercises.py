# ---
# jupyter:
#   course:
#     minutes: 10
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 15 · My lesson
#
# **10 minutes.** You should know what [lesson 15](../notebooks/15_my_lesson.ipynb) shows.

# %%
from course_utils.lessons.parameters import checks as check  # yours: a folder that you add

# %% [markdown]
# ## 1 · One block
# **Difficulty** ●○○○○ · **5 minutes** · **Trains** counting matrix by matrix
#
# What is asked for, with every letter named.


# %%
def block(h: int, bias: bool) -> int:
    """Parameters of one GPT block of hidden size h."""
    ### BEGIN SOLUTION Return a whole number.
    return 12 * h * h + (13 * h if bias else 2 * h)
    ### END SOLUTION


# %%
check.block(block)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Hints come in three rungs; none is the answer.
#
# </details>

# %% [markdown] tags=["explanation"]
# **Why.** What the solution shows; learners do not see this cell.
