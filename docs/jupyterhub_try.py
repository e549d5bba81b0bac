"""Try the hub's settings on your own machine, with no accounts: `jupyterhub --config docs/jupyterhub_try.py`.

Never for a class: one password, `try`, lets everybody in under any name, and all servers run as you.
"""

import os
from pathlib import Path

c = get_config()  # noqa: F821, JupyterHub defines it
load_subconfig(str(Path(__file__).with_name("jupyterhub_config.py")))  # noqa: F821

HOMES = Path(os.environ.get("COURSE_HOMES", "hub-homes")).resolve()

c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "try"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(HOMES / "{username}")
c.Spawner.args = ["--allow-root"] if os.geteuid() == 0 else []
