"""The repository's address: one command writes it everywhere, for somebody who publishes a copy."""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..interactive.course_files import ROOT
from ..interactive.learner_folder import write_whole
from ..teaching.other_platforms import COLAB_BRANCH, link

PLACEHOLDER = "https://github.com/where-did-the-memory-go/course"
"""An address at which there is nothing: it stands in the files until somebody sets theirs."""

FILES = ("pyproject.toml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml", "README.md")
MARKS = ("<!-- address: the command of that name writes this -->", "<!-- end of address -->")

FIRST = "notebooks/00_start_here.ipynb"
NOT_SET = (
    "This address is a placeholder until the course is published."
    " `python3 -m course_utils address URL` writes yours everywhere."
)


def pages_of(address: str) -> str:
    """The address at which GitHub publishes a repository's website.

    Raises ValueError for what is not https://github.com/OWNER/NAME.
    """
    parts = re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+?)", address)
    if not parts or parts[2].endswith(".git"):
        raise ValueError(f"{address!r} is not a repository's address: write https://github.com/OWNER/NAME")
    return f"https://{parts[1]}.github.io/{parts[2]}/"


def lines_of_readme(address: str) -> str:
    """The lines of README on the address: that it is none yet, or one line of badges that open lesson 00."""
    if address == PLACEHOLDER:
        return NOT_SET
    colab = link(FIRST, address, COLAB_BRANCH, colab=True)
    binder = link(FIRST, address, "main")
    return (
        f"[![Open lesson 00 in Colab](docs/images/colab.svg)]({colab})"
        f" [![Open lesson 00 in Binder](docs/images/binder.svg)]({binder})"
    )


def address_of(root: Path) -> str:
    """The repository's address as pyproject.toml has it."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'^Repository = "(.+)"$', text, re.MULTILINE)[0]


def set_address(root: Path, address: str) -> list[Path]:
    """Write the address in place of the one that is there, and return the files that changed.

    Raises ValueError for what is not https://github.com/OWNER/NAME; then nothing is written.
    """
    new = {address_of(root): address, pages_of(address_of(root)): pages_of(address)}
    changed = []
    for name in FILES:
        path = root / name
        before = text = path.read_text(encoding="utf-8")
        for old, other in new.items():
            text = text.replace(old, other)
        if name == "README.md":
            between = f"(?<={re.escape(MARKS[0])}\n).*(?=\n{re.escape(MARKS[1])})"
            text = re.sub(between, lambda _: lines_of_readme(address), text, flags=re.DOTALL)
        if text != before:
            write_whole(path, text)
            changed.append(path)
    return changed


def options(parser: ArgumentParser) -> None:
    """Add the arguments of the command `address`."""
    parser.add_argument("url", nargs="?", help="https://github.com/OWNER/NAME (default: print it)")


def run(chosen: Namespace) -> int:
    """Print the address, or set it and print the files that changed. Raises ValueError as `set_address`."""
    if chosen.url is None:
        present = address_of(ROOT)
        print(f"{present} (a placeholder)" if present == PLACEHOLDER else present)
        return 0
    changed = set_address(ROOT, chosen.url.rstrip("/"))
    print("\n".join(f"changed {path.relative_to(ROOT)}" for path in changed) or "It is there already.")
    return 0
