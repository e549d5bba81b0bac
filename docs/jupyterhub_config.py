"""Settings for a JupyterHub that serves this course: `jupyterhub --config docs/jupyterhub_config.py`.

They are what the course asks for, and no more: authentication and spawner are your hub's own. Set before you
start it:

COURSE_REPOSITORY   the address that each learner's server clones, of a branch that `release` made: no
                    solutions
COURSE_BRANCH       its branch; `main` unless said
COURSE_ENVIRONMENT  the Python environment with the course, JupyterLab, jupyterhub and nbgitpuller, which
                    everybody reads and nobody but you may write; the hub's own unless said
"""

import os
import sys
from pathlib import Path, PurePosixPath
from urllib.parse import urlencode

c = get_config()  # noqa: F821, JupyterHub defines it

ENVIRONMENT = Path(os.environ.get("COURSE_ENVIRONMENT", sys.prefix))
REPOSITORY = os.environ.get("COURSE_REPOSITORY", "")
FIRST = "notebooks/00_start_here.ipynb"

# One environment for all, with the course in it: a learner's own copy holds notebooks, and installs nothing.
c.Spawner.cmd = [str(ENVIRONMENT / "bin" / "jupyterhub-singleuser")]

# Who logs in gets the course, or what is new in it, and sees the first lesson. Without a repository, that is
# just JupyterLab.
c.Spawner.default_url = "/lab"
if REPOSITORY:
    folder = PurePosixPath(REPOSITORY).name.removesuffix(".git")
    branch = os.environ.get("COURSE_BRANCH", "main")
    pull = {"repo": REPOSITORY, "branch": branch, "urlpath": f"lab/tree/{folder}/{FIRST}"}
    c.Spawner.default_url = f"/git-pull?{urlencode(pull)}"

# A simulated step of GPT-2 XL takes under 1 GB of host memory, four processes of lesson 10 more. Not every
# spawner holds to this: SystemdSpawner, DockerSpawner and KubeSpawner do, JupyterHub's own
# LocalProcessSpawner does not.
c.Spawner.mem_limit = "3G"
c.Spawner.cpu_limit = 2.0

# Everybody's figures are the same, and nobody's matrix product takes all cores.
c.Spawner.environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Thirty people who come at once start within a minute or two.
# Idle servers do not keep the memory of a lesson.
c.JupyterHub.concurrent_spawn_limit = 15
c.Spawner.start_timeout = 180
