"""Rules for every committed notebook: each function returns the faults that it finds in one, as sentences."""

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt
from nbformat import NotebookNode

from course_utils.authoring.sources import PAGES, THIS_MACHINE
from course_utils.interactive.course_files import EXERCISES_WITH

MOST_UNCOMPARED = 0.25
"""Part of a lesson's code cells whose outputs nbval may leave uncompared."""

MACHINE_PATH = re.compile(
    r"(?<![\w.~])(?:/(?:work|home|root|tmp|Users|mnt)/|/private/var/|[A-Z]:\\+Users)[\w.\\/-]*"
)
MEMORY_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
TABLE_RULE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")
SENTENCE = re.compile(r"[A-Z0-9“\"].{14,}[.!?]", re.DOTALL)
MINUTES = re.compile(r"^\*\*(\d+) minutes", re.MULTILINE)
MARKDOWN_IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\(")
SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)
HTML_IMAGE = re.compile(r"<(?:img|svg)\b[^>]*>", re.IGNORECASE)
HTML_ALT = re.compile(r"(?:alt|aria-label)=(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)')", re.IGNORECASE)
SPEAKING = frozenset({"print", "display", "predict", "reveal", "waits_for", "show_ledger"})
FOLDED = {"source_hidden", "outputs_hidden"}
CLOSING = ("Remember", "Breaks when", "Cheat-sheet line")


def faults(notebook: NotebookNode, path: Path) -> list[str]:
    """Everything that is wrong with a lesson or a solution."""
    found = list(validity(notebook))
    if found:
        return found  # nothing else can be relied on
    found += [*ids(notebook, path.stem), *execution(notebook), *outputs(notebook)]
    found += [*private_things(notebook), *pictures(notebook), *tables(notebook), *bullets(notebook)]
    found += opening(notebook)
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


def validity(notebook: NotebookNode) -> Iterator[str]:
    """Notebook format 4.5 or newer, as nbformat's schema has it."""
    if not nbformat.validator.isvalid(notebook, version=4):
        yield "is no valid notebook"
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        yield "is older than format 4.5, so its cells have no ids"


def ids(notebook: NotebookNode, stem: str) -> Iterator[str]:
    """Fixed ids that count up, and no metadata but tags, slides and what is folded."""
    numbers = [re.fullmatch(rf"{stem}-(\d\d+)", cell.get("id", "")) for cell in notebook.cells]
    positions = [int(match[1]) for match in numbers if match]
    if len(positions) != len(notebook.cells) or positions != sorted(set(positions)):
        yield f"has ids that are not {stem}-01, {stem}-02 and so on"
    for cell in notebook.cells:
        folded = set(cell.metadata.get("jupyter", ()))
        if set(cell.metadata) - {"tags", "jupyter", "slideshow"} or folded - FOLDED:
            yield f"{cell.get('id')} carries metadata other than tags: {', '.join(cell.metadata)}"


def execution(notebook: NotebookNode) -> Iterator[str]:
    """Every code cell executed, in order, from 1."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"was not executed once from top to bottom: {counts}"


def outputs(notebook: NotebookNode) -> Iterator[str]:
    """Something to see where a cell shows something; no errors and nothing on stderr anywhere."""
    for cell in code_cells(notebook):
        if THIS_MACHINE in cell.metadata.get("tags", ()):
            if cell.outputs:
                yield f"{cell.id} shows another machine than the reader's"
        elif shows_something(cell.source) and not cell.outputs:
            yield f"{cell.id} shows nothing, though its code says that it should"
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"{cell.id} writes to stderr: {output.text.strip()[:100]}"
            if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", ()):
                yield f"{cell.id} ends in {output.ename}"


def shows_something(source: str) -> bool:
    """True if code of this text leaves an output: it calls something that prints, or ends in a value."""
    body = ast.parse(TransformerManager().transform_cell(source)).body  # magics are no Python
    if SPEAKING.intersection(called(body)):
        return True
    if source.rstrip().endswith(";") or not body or not isinstance(body[-1], ast.Expr):
        return False
    last = body[-1].value
    if isinstance(last, ast.Call):  # a method may well return nothing
        return isinstance(last.func, ast.Name)
    return not (isinstance(last, ast.Constant) and last.value in (None, ...))


def called(statements: list[ast.stmt]) -> Iterator[str]:
    """The names of the functions that these statements call when they run; what they
    only define is left out.
    """
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def texts(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """(cell id, text) for everything in the notebook that can be read."""
    for cell in notebook.cells:
        yield cell.get("id", ""), cell.source
        for output in cell.get("outputs", ()):
            yield cell.get("id", ""), str(output.get("text", ""))
            yield cell.get("id", ""), "\n".join(output.get("traceback", ()))
            for kind, content in output.get("data", {}).items():
                if not kind.startswith("image/") or kind == "image/svg+xml":
                    yield cell.get("id", ""), str(content)


def private_things(notebook: NotebookNode) -> Iterator[str]:
    """No path of the machine that built it, no address in memory."""
    for name, text in texts(notebook):
        for pattern, what in ((MACHINE_PATH, "a machine's path"), (MEMORY_ADDRESS, "an address in memory")):
            match = pattern.search(text)
            if match:
                yield f"{name} holds {what}: {match[0]}"


def pictures(notebook: NotebookNode) -> Iterator[str]:
    """Every picture described by a sentence: those drawn by code and those shown by text."""
    for cell in notebook.cells:
        alts = (
            [match["alt"] for match in MARKDOWN_IMAGE.finditer(cell.source)]
            if cell.cell_type == "markdown"
            else []
        )
        if cell.cell_type == "markdown":
            alts += [html_alt(match[0]) for match in HTML_IMAGE.finditer(cell.source)]
        for output in cell.get("outputs", ()):
            alts += output_alts(output)
        for alt in alts:
            if not SENTENCE.fullmatch(alt.strip()):
                yield (
                    f"{cell.get('id')} shows a picture whose description is no sentence: {alt.strip()[:80]!r}"
                )


def output_alts(output: NotebookNode) -> list[str]:
    """The description of each picture in one output; empty for a picture without any."""
    data = output.get("data", {})
    # a script holds the narrow layout of the image before it
    html = SCRIPT.sub("", str(data.get("text/html", "")))
    alts = [html_alt(match[0]) for match in HTML_IMAGE.finditer(html)]
    if any(kind.startswith("image/") for kind in data):
        alts.append(str(data.get("text/plain", "")))
    if "image/svg+xml" in data:
        root = HTML_IMAGE.search(str(data["image/svg+xml"]))
        alts.append(html_alt(root[0]) if root else "")
    return alts


def html_alt(tag: str) -> str:
    """The text of a tag's `alt` or `aria-label`; empty where it has none."""
    match = HTML_ALT.search(tag)
    return (match["double"] or match["single"] or "") if match else ""


def tables(notebook: NotebookNode) -> Iterator[str]:
    """Tables in text whose rows have as many cells as their headers."""
    for cell in markdown_cells(notebook):
        lines = cell.source.splitlines()
        for rule, line in enumerate(lines):
            if not TABLE_RULE.fullmatch(line):
                continue
            rows = [lines[rule - 1], *takewhile(str.strip, lines[rule + 1 :])]
            if any(not row.startswith("|") or row.count("|") != line.count("|") for row in rows):
                yield f"{cell.get('id')} holds a table whose rows and header differ in length"


def bullets(notebook: NotebookNode) -> Iterator[str]:
    """Lists apart from the text above them: a line that wraps just before "+ S" becomes
    a bullet by accident.
    """
    for cell in markdown_cells(notebook):
        for line in lists_without_a_gap(cell.source):
            yield (
                f"{cell.get('id')} has text that Markdown makes a bullet; wrap elsewhere or leave a gap:"
                f" {line}"
            )


def lists_without_a_gap(text: str) -> Iterator[str]:
    """The first line of each list in Markdown that follows a paragraph's last line; lists in lists are left
    out.
    """
    depth, paragraph_end = 0, -1
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        if is_list and depth == 0 and token.map and token.map[0] == paragraph_end:
            yield text.splitlines()[paragraph_end].strip()
        depth += is_list - (token.type in ("bullet_list_close", "ordered_list_close"))
        if token.type == "paragraph_open" and token.map:
            paragraph_end = token.map[1]


def opening(notebook: NotebookNode) -> Iterator[str]:
    """A first cell of text that says how long it takes and what one should know."""
    first = notebook.cells[0]
    match = MINUTES.search(first.source)
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "does not begin with a title"
    for cell in markdown_cells(notebook)[1:]:
        if re.search(r"^# ", re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE):
            yield f"{cell.get('id')} holds a second title"
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
        yield (
            f"leaves the outputs of {len(ignored)} of {len(cells)} code cells uncompared:"
            f" {', '.join(ignored)}"
        )
    for cell in cells:
        if {"nbval-skip", "raises-exception"}.intersection(cell.metadata.get("tags", ())):
            yield f"{cell.id} is not tested at all: nbval skips it, or passes whatever it raises"


def rhythm(notebook: NotebookNode, stem: str) -> Iterator[str]:
    """Guess, then look; and a link to the exercise."""
    code = [cell.source for cell in code_cells(notebook)]
    guesses = [number for number, source in enumerate(code) if "predict(" in source]
    answers = [number for number, source in enumerate(code) if "reveal(" in source]
    if not guesses or not answers or answers[0] <= guesses[0]:
        yield "does not ask for a guess with predict() before it answers with reveal()"
    number = EXERCISES_WITH.get(stem[:2], stem[:2])
    exercises = rf"\.\./exercises/{number}_\w+\.ipynb"
    if not any(re.search(exercises, cell.source) for cell in markdown_cells(notebook)):
        yield f"has no link to ../exercises/{number}_….ipynb"
