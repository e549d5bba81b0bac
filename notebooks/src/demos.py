# ---
# jupyter:
#   course:
#     minutes: 31
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Demos for the stage
#
# **31 minutes** for all seven, three to six for each. For a lecture: each cell below is a demo in large type. Run it,
# and go on with the space bar. It asks for a guess, then estimates, then runs. The room should know what lives in a
# training step; the lesson that goes with a demo can come before it or after.
#
# Run `python3 -m course_utils rehearse` beforehand: it says what will happen on this machine. Keys, projector, and what
# to do when a demo fails: [in a classroom](../docs/classroom.md#demos).

# %%
from course_utils.demos import demo

# %% [markdown]
# ## One training step
# With [lesson 01](01_where_did_the_memory_go.ipynb). What rises in forward, falls in backward, and stays?

# %%
demo("training-step")

# %% [markdown]
# ## Out of memory, and back
# Fails on purpose. With lesson 01, or with [lesson 14](14_will_it_fit.ipynb).

# %%
demo("out-of-memory")

# %% [markdown]
# ## What Adam remembers
# With [lesson 02](02_adam.ipynb). How much more than SGD, and from which moment on?

# %%
demo("optimizer-states")

# %% [markdown]
# ## Recomputation
# With [lesson 06](06_recomputation.ipynb). One batch, three policies.

# %%
demo("recomputation")

# %% [markdown]
# ## Gradient accumulation
# With [lesson 07](07_gradient_accumulation.ipynb). Does a quarter of the batch take a quarter of the memory?

# %%
demo("accumulation")

# %% [markdown]
# ## Free, but in pieces
# Fails on purpose. With [lesson 10](10_allocator_and_fragmentation.ipynb).

# %%
demo("fragmentation")

# %% [markdown]
# ## ZeRO, by estimate
# With [lesson 09](09_zero_and_fsdp.ipynb). Nothing is run: the other cards are not there.

# %%
demo("sharding")
