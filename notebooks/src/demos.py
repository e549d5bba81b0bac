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
# **31 minutes** for all seven, three to six for each. Each cell below is a demo in large type, for a lecture. Run the
# cell, then press the space bar for the next step. A demo asks for a guess, then estimates, then runs. The audience
# should know what lives in a training step. You can show a demo before its lesson or after it.
#
# Run `python3 -m course_utils rehearse` beforehand: it shows what will happen on this machine. [In a
# classroom](../docs/classroom.md#demos) has the keys, the projector, and what to do when a demo fails.

# %%
from course_utils.demos import demo

# %% [markdown]
# ## One training step
# With [lesson 01](01_where_did_the_memory_go.ipynb). Which memory rises, which falls, and which stays?

# %%
demo("training-step")

# %% [markdown]
# ## Out of memory, and back
# This demo fails on purpose. With lesson 01 or [lesson 19](19_will_it_fit.ipynb).

# %%
demo("out-of-memory")

# %% [markdown]
# ## What Adam remembers
# With [lesson 02](02_adam.ipynb). How much more memory than SGD does Adam need, and from when on?

# %%
demo("optimizer-states")

# %% [markdown]
# ## Recomputation
# With [lesson 06](06_recomputation.ipynb). One batch, three policies.

# %%
demo("recomputation")

# %% [markdown]
# ## Gradient accumulation
# With [lesson 08](08_gradient_accumulation.ipynb). Does a quarter of the batch take a quarter of the memory?

# %%
demo("accumulation")

# %% [markdown]
# ## Free, but in pieces
# This demo fails on purpose. With [lesson 12](12_allocator_and_fragmentation.ipynb).

# %%
demo("fragmentation")

# %% [markdown]
# ## ZeRO, by estimate
# With [lesson 11](11_zero_and_fsdp.ipynb). Nothing is run, because the other cards are not here.

# %%
demo("sharding")
