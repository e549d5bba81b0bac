"""Links that open a lesson elsewhere: `python3 -m course_utils links --repository URL [--hub URL | --colab]`.

Forms: nbgitpuller's link generator (https://nbgitpuller.readthedocs.io), Binder's for any git repository
(https://mybinder.readthedocs.io, "v2/git") and Colab's for one on GitHub.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from urllib.parse import quote, urlencode, urlsplit

from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT, numbered

FIRST = "notebooks/00_start_here.ipynb"


def hub_link(hub: str, repository: str, branch: str = "main", notebook: str = FIRST) -> str:
    """A link that fetches the course into a learner's home on a JupyterHub, or renews it, and opens a notebook."""
    return f"{hub.rstrip('/')}/hub/user-redirect{pull_path(repository, branch, notebook)}"


def pull_path(repository: str, branch: str, notebook: str) -> str:
    """The path that nbgitpuller answers on a learner's server. Its folder is the repository's name, as git has it."""
    folder = PurePosixPath(urlsplit(repository).path.rstrip("/")).name.removesuffix(".git")
    query = {"repo": repository, "branch": branch, "urlpath": f"lab/tree/{folder}/{notebook}"}
    return f"/git-pull?{urlencode(query)}"


def binder_link(repository: str, branch: str = "main", notebook: str = FIRST) -> str:
    """A link that builds the course's image on mybinder.org, or finds it built, and opens a notebook."""
    path = f"{quote(repository, safe='')}/{quote(branch, safe='')}"
    return f"https://mybinder.org/v2/git/{path}?{urlencode({'labpath': notebook})}"


def colab_link(repository: str, branch: str = "main", notebook: str = FIRST) -> str:
    """A link that opens a notebook in Colab. ValueError for a repository that is not on GitHub."""
    place = urlsplit(repository)
    if place.hostname != "github.com":
        raise ValueError(f"Colab opens notebooks from GitHub, and {repository} is not there")
    return f"https://colab.research.google.com/github{place.path.removesuffix('.git')}/blob/{branch}/{notebook}"


def main(arguments: Sequence[str]) -> int:
    """`links --repository URL [--branch B] [--hub URL | --colab]`: a line of Markdown for each lesson."""
    parser = Parser("links", "Links that open lessons.")
    parser.add_argument(
        "--repository", required=True, help="the address that git clones, of a branch without solutions"
    )
    parser.add_argument("--branch", default="main", help="its branch (default: main)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--hub", help="the address of your JupyterHub; without it, links are for Binder")
    place.add_argument("--colab", action="store_true", help="links for Colab, to the copies that `colab` writes")
    options = parser.parse_args(arguments)
    elsewhere = partial(hub_link, options.hub) if options.hub else colab_link if options.colab else binder_link
    for path in numbered(ROOT / "notebooks"):
        print(f"- [{path.stem}]({elsewhere(options.repository, options.branch, f'notebooks/{path.name}')})")
    return 0
