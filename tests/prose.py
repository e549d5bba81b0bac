"""Check the English that readers see: `python3 tests/prose.py`, also part of `lint`. Exit status 1 if it
finds some.

`--count` prints the findings by rule and the words of each lesson's text. Only what a machine can judge with
few false alarms is a rule here: words with a plainer synonym, sentences over 35 words, and how docstrings
begin.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 35
PREPOSITIONS = "of|in|into|from|with|by|for|on|at|to|through|under|within"
COUNTED = (
    "bytes|bits|numbers|tokens|words|steps|operations|messages|sequences|batches|"
    "(?:milli)?seconds|minutes|ms|entry"
)
PER = (
    "parameter|number|element|token|step|rank|row|head|block|layer|second|sequence|minute|cell|weight|"
    "GPU|card|lesson"
)
DEGREES = "longer|more|less|fewer|better|worse|faster|slower|larger|smaller|different|good"

RULES = {
    r"\bbeside\b": "next to, plus, in addition to",
    r"\baloud\b": "openly, or say who sees it",
    r"\bin words\b": "as a clear message",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\b(hence|thereby|thereof|till|therein|thrice)\b": "so, until, three times",
    r"\ban? [A-Z]-th\b": "1/D of",
    r"\blets? go\b": "free",
    r"\bat work\b": "running, in use",
    r"\bsome \d": "about",
    r"\bwhat there is\b": "the thing itself",
    r"\b(but|save) for\b": "except",
    r"\b(and|or) the like\b": "and so on, or the thing itself",
    r"\b(makes?|needs?|asks?) of\b": "need from, ask for",
    r"\b(is|are) to be\b": "must be, should be",
    r"\b(stands?|stood)\b(?! (for|out|in for|still|alone|up)\b)": "is, persists, exists",
    rf"\b({COUNTED}) an? ({PER})\b": "per",
    rf"\b({PREPOSITIONS}) (which|whom)\b(?! X is free)[^?]*$": "two sentences",
    rf"(?<![Tt]here )\b(is|are) no (?!({DEGREES})\b)\w+": "is not a",
}
"""A pattern for a sentence, and what to write instead."""

OPENING = re.compile(r"(What|Whether|How|Where|Which|When|Why|That|Of|Not|No|With|For|As|In|At|On|Into|By)\b")
CODE = re.compile(r"[<>{}\\=]|://|^\s*$|^--|\w\(|;\s*$|\brgb\b|\dpx")
"""Strings with these are markup, styles, patterns or code, not sentences."""


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and cells of tables with their lines; code, formulas and quotations count as one
    word.
    """
    text = re.sub(
        r"^(```|~~~|\$\$).*?^\1|<!--.*?-->|^---\n.*?^---$",
        lambda m: "\n" * m[0].count("\n"),
        text,
        flags=re.M | re.S,
    )
    text = re.sub(r"``.+?``|`[^`]+`|\$\$.+?\$\$|\$[^$\n]+\$", "X", text, flags=re.S)
    text = re.sub(r"!?\[([^]]*)\](\([^)]*\)|\[[^]]*\])?", r"\1", text)
    block: list[str] = []
    start = 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        new = re.match(r"\s*([-*+]|\d+\.|#+|>|\|)\s|\s*\||\s*$", line)
        if new and block:
            yield start, " ".join(block)
            block = []
        if line.lstrip().startswith("|"):
            yield from ((number, cell) for cell in line.split("|"))
        elif line.strip():
            start = start if block else number
            block.append(re.sub(r"^\s*([-*+]|\d+\.|#+|>)\s+", "", line).strip())


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph, what is quoted left out."""
    text = re.sub(
        r"[\"“][^\"”]*[\"”]|(?<!\w)'[A-Z][^']{20,}'",
        "X",
        re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text),
    )
    yield from (each.strip() for each in re.split(r"(?<=[.?!:])[)\"”]?\s+(?=\S)|\s·\s", text) if each.strip())


def texts_of_toml(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            yield from texts_of_toml(each)


def literal(node: ast.AST) -> str:
    """A string literal's text, with X for each value in it; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return ""


def strings_of_code(tree: ast.AST, docstrings: bool) -> Iterator[tuple[int, str]]:
    """Messages of four words or more: string literals, docstrings only if readers see them."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.expr)):
        text = "" if id(node) in inner or (id(node) in notes and not docstrings) else literal(node)
        if len(re.findall(r"[A-Za-z]{2,}", text)) > 3 and not CODE.search(text):
            yield node.lineno, text


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (
            said := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, said


def markdown_cells(source: str) -> str:
    """The text of a notebook's source, code left out; each line stays where it is."""
    lines = []
    text = False
    for line in source.splitlines():
        text = "[markdown]" in line if line.startswith("# %%") else text
        lines.append(re.sub("^# ?", "", line) if text and line.startswith("#") and line[:4] != "# %%" else "")
    return "\n".join(lines)


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Everything in a file that a reader of the course sees, with its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        yield from (
            (0, said)
            for whole in texts_of_toml(tomllib.loads(text))
            if " " in whole and not CODE.search(whole)
            for _, said in prose_of_markdown(whole)
        )
    elif path.suffix == ".py":
        is_lesson = path.parent.name == "src"
        if is_lesson:
            yield from prose_of_markdown(markdown_cells(text))
        for line, said in strings_of_code(ast.parse(text), is_lesson):
            yield from ((line, part) for _, part in prose_of_markdown(said))
    else:
        yield from prose_of_markdown(text)


def problems(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, rule and finding for everything that a file's English should not have."""
    for line, text in paragraphs(path):
        for sentence in sentences(text):
            for pattern, better in RULES.items():
                if found := re.search(pattern, sentence):
                    yield line, pattern, f"'{found[0][:40]}' (better: {better}) in: {sentence[:110]}"
            if (words := len(sentence.split())) > LONGEST:
                yield line, "long", f"a sentence of {words} words: {sentence[:110]}"
    if path.suffix == ".py" and path.parent.name != "src":
        for line, said in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            if OPENING.match(said):
                yield (
                    line,
                    "docstring",
                    f"a docstring should begin with a verb or what is returned: {said[:60]}",
                )


def files() -> list[Path]:
    """Everything with text for readers, in order."""
    patterns = ("*.md", "docs/*.md", "solutions/*.md", "notebooks/src/*.py", "solutions/src/*.py",
                "course_utils/**/*.toml", "course_utils/**/*.py", "docs/skeletons/*")  # fmt: skip
    return sorted(
        {
            path
            for pattern in patterns
            for path in ROOT.glob(pattern)
            if path.suffix in (".md", ".py", ".toml")
        }
    )


def main() -> int:
    """Print what was found, or with --count how often each rule and how many words each lesson has."""
    found = {path: list(problems(path)) for path in files()}
    if "--count" in sys.argv:
        for rule, times in Counter(rule for each in found.values() for _, rule, _ in each).most_common():
            print(f"{times:5d}  {rule}")
        for path in sorted((ROOT / "notebooks" / "src").glob("*.py")):
            text = markdown_cells(path.read_text(encoding="utf-8"))
            print(f"{len(text.split()):6,d} words  {path.stem}")
    else:
        for path, each in found.items():
            for line, _, said in each:
                print(f"{path.relative_to(ROOT)}:{line}: {said}")
    total = sum(map(len, found.values()))
    print(f"{total} findings in {len(found)} files")
    return 1 if total else 0


if __name__ == "__main__":
    raise SystemExit(main())
