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
import torch

from course_utils.lessons.my_lesson import checks as check

# %% [markdown]
# ## 1 · What a weight wants to know
# **Difficulty** ●○○○○ · **10 minutes** · **Trains** seeing why forward has to keep its inputs
#
# YOURS: what is asked for: every argument with its shape and dtype, what is returned, what may not change.


# %%
def weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dL/dW, of shape (outputs, inputs), from the layer's input x (b, s, inputs) and dL/dy (b, s, outputs)."""
    ### BEGIN SOLUTION Return a tensor of shape (outputs, inputs).
    return dy.flatten(0, 1).T @ x.flatten(0, 1)
    ### END SOLUTION


# %%
check.weight_gradient(weight_gradient)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# YOURS: hints come in three rungs; none is the answer.
#
# </details>
# <details><summary>Hint 2: one token</summary>
#
# YOURS: the same for the smallest case.
#
# </details>
# <details><summary>Hint 3: all of them</summary>
#
# YOURS: all but the last step.
#
# </details>

# %% [markdown] tags=["explanation"]
# **Why.** YOURS: what the solution shows; learners do not see this cell.
