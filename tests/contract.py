"""Rules for every committed notebook: each function returns the faults that it finds in one, as sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_utils.authoring.sources import PAGES, THIS_MACHINE
from course_utils.interactive.course_files import EXERCISES_WITH

MOST_UNCOMPARED = 0.25
"""Part of a lesson's code cells whose outputs nbval may leave uncompared."""

MACHINE_PATH = re.compile(
    r"(?<![\w.~])(?:/(?:work|home|root|tmp|Users|mnt)/|/private/var/|[A-Z]:\\+Users)[\w.\\/-]*"
)
MEMORY_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
SENTENCE = re.compile(r"[A-Z0-9“\"].{14,}[.!?]", re.DOTALL)
MINUTES = re.compile(r"^\*\*(\d+) minutes", re.MULTILINE)
MARKDOWN_IMAGE = re.compile(r"!\[([^\]]*)\]\(")
CLOSING = ("Remember", "Breaks when", "Cheat-sheet line")


def faults(notebook: NotebookNode, path: Path) -> list[str]:
    """Everything that is wrong with a lesson or a solution."""
    if not nbformat.validator.isvalid(notebook, version=4):
        return ["is no valid notebook"]  # nothing else can be relied on
    found = [*ids(notebook, path.stem), *outputs(notebook), *private_things(notebook)]
    found += [*pictures(notebook), *opening(notebook)]
    if path.parent.name == "notebooks":
        found += comparison(notebook)
    if path.parent.name == "notebooks" and path.stem not in PAGES:
        found += closing(notebook)
        found += rhythm(notebook, path.stem) if path.stem > "01" else []
    return found


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells with code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells with text, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def ids(notebook: NotebookNode, stem: str) -> Iterator[str]:
    """Fixed ids that count up."""
    numbers = [re.fullmatch(rf"{stem}-(\d\d+)", cell.get("id", "")) for cell in notebook.cells]
    positions = [int(match[1]) for match in numbers if match]
    if len(positions) != len(notebook.cells) or positions != sorted(set(positions)):
        yield f"has ids that are not {stem}-01, {stem}-02 and so on"


def outputs(notebook: NotebookNode) -> Iterator[str]:
    """Every code cell executed, in order; no errors, nothing on stderr, and nothing of the machine."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"was not executed once from top to bottom: {counts}"
    for cell in code_cells(notebook):
        tags = cell.metadata.get("tags", ())
        if THIS_MACHINE in tags and cell.outputs:
            yield f"{cell.id} shows another machine than the reader's"
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"{cell.id} writes to stderr: {output.text.strip()[:100]}"
            if output.output_type == "error" and "raises-exception" not in tags:
                yield f"{cell.id} ends in {output.ename}"


def texts(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """(cell id, text) for everything in the notebook that can be read."""
    for cell in notebook.cells:
        yield cell.id, cell.source
        for output in cell.get("outputs", ()):
            yield cell.id, str(output.get("text", ""))
            yield cell.id, "\n".join(output.get("traceback", ()))
            for kind, content in output.get("data", {}).items():
                if not kind.startswith("image/") or kind == "image/svg+xml":
                    yield cell.id, str(content)


def private_things(notebook: NotebookNode) -> Iterator[str]:
    """No path of the machine that built it, no address in memory; and a simulation is not called measured."""
    for name, text in texts(notebook):
        for pattern, what in ((MACHINE_PATH, "a machine's path"), (MEMORY_ADDRESS, "an address in memory")):
            match = pattern.search(text)
            if match:
                yield f"{name} holds {what}: {match[0]}"
        if "simulated GPU · torch" in text and re.search(r"\bmeasured\b", text):
            yield f"{name} calls the bytes of a simulated GPU measured"


def pictures(notebook: NotebookNode) -> Iterator[str]:
    """Every picture described by a sentence: those drawn by code and those shown by text."""
    for cell in notebook.cells:
        alts = MARKDOWN_IMAGE.findall(cell.source) if cell.cell_type == "markdown" else []
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if any(kind.startswith("image/") for kind in data):
                alts.append(str(data.get("text/plain", "")))
        for alt in alts:
            if not SENTENCE.fullmatch(alt.strip()):
                yield f"{cell.id} shows a picture whose description is no sentence: {alt.strip()[:80]!r}"


def opening(notebook: NotebookNode) -> Iterator[str]:
    """A first cell of text that says how long it takes and what one should know."""
    first = notebook.cells[0]
    match = MINUTES.search(first.source)
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "does not begin with a title"
    if match is None:
        yield "does not say at the top how many minutes it takes"
    elif int(match[1]) != notebook.metadata.get("course", {}).get("minutes", int(match[1])):
        yield f"says {match[1]} minutes at the top and another number in its source's header"
    if not re.search(r"\bknow", first.source):
        yield "does not say at the top what one should know"


def closing(notebook: NotebookNode) -> Iterator[str]:
    """A summary at the end of a lesson."""
    last = "\n".join(cell.source for cell in markdown_cells(notebook)[-4:])
    for words in CLOSING:
        if f"**{words}" not in last:
            yield f"does not end with **{words}**"


def comparison(notebook: NotebookNode) -> Iterator[str]:
    """Most outputs are compared when the lesson is run again."""
    cells = code_cells(notebook)
    ignored = [cell.id for cell in cells if "nbval-ignore-output" in cell.metadata.get("tags", ())]
    ignored += [cell.id for cell in cells if "NBVAL_" in cell.source]
    if len(ignored) > MOST_UNCOMPARED * len(cells):
        yield f"leaves the outputs of {len(ignored)} of {len(cells)} code cells uncompared: {ignored}"
    for cell in cells:
        if {"nbval-skip", "raises-exception"}.intersection(cell.metadata.get("tags", ())):
            yield f"{cell.id} is not tested at all: nbval skips it, or passes whatever it raises"


def rhythm(notebook: NotebookNode, stem: str) -> Iterator[str]:
    """A guess; and a link to the exercise."""
    if not any("predict(" in cell.source for cell in code_cells(notebook)):
        yield "does not ask for a guess with predict()"
    number = EXERCISES_WITH.get(stem[:2], stem[:2])
    exercises = rf"\.\./exercises/{number}_\w+\.ipynb"
    if not any(re.search(exercises, cell.source) for cell in markdown_cells(notebook)):
        yield f"has no link to ../exercises/{number}_….ipynb"
