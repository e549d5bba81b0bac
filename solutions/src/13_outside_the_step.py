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
# # Exercises 13 · Outside the step
#
# **12 minutes.** You should know what [lesson 13](../notebooks/13_outside_the_step.ipynb) shows.

# %%
import torch

from course_utils.lessons.outside_the_step import checks as check

# %% [markdown]
# ## 1 · What does a weight's gradient need?
# **Difficulty** ●○○○○ · **10 minutes** · **Trains** seeing why forward must keep its inputs
#
# YOURS: the task in one sentence. Then every argument with its shape and dtype, what to return, what must not change.


# %%
def weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return dL/dW (outputs, inputs), from x (b, s, inputs) and dL/dy (b, s, outputs)."""
    ### BEGIN SOLUTION Return a tensor of shape (outputs, inputs).
    return dy.flatten(0, 1).T @ x.flatten(0, 1)
    ### END SOLUTION


# %%
check.weight_gradient(weight_gradient)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# YOURS: there are three hints, from general to specific; none is the answer.
#
# </details>
# <details><summary>Hint 2: one token</summary>
#
# YOURS: the task for the smallest case.
#
# </details>
# <details><summary>Hint 3: all of them</summary>
#
# YOURS: every step except the last.
#
# </details>

# %% [markdown] tags=["explanation"]
# **Why.** YOURS: what the solution shows; learners do not see this cell.
