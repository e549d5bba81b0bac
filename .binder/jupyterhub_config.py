"""Settings for a JupyterHub that serves this course: `jupyterhub --config .binder/jupyterhub_config.py`.

They are what the course needs, and no more; authentication and spawners are your hub's own. The course and nbgitpuller
are installed in the environment that starts single-user servers.
"""

c = get_config()  # noqa: F821, JupyterHub defines it

# Lessons open in JupyterLab; a link of nbgitpuller says which.
c.Spawner.default_url = "/lab"

# A simulated step of GPT-2 XL takes under 1 GB of host memory, four processes of lesson 08 more. Not every
# spawner holds to this: JupyterHub's own LocalProcessSpawner does not.
c.Spawner.mem_limit = "3G"
c.Spawner.cpu_limit = 2.0

# Everybody's figures are the same, and nobody's matrix product takes all cores.
c.Spawner.environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Thirty people who come at once start within a minute or two, and idle servers do not keep the memory of a lesson.
c.JupyterHub.concurrent_spawn_limit = 15
c.Spawner.start_timeout = 180
