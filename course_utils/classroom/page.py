"""The page of a class: who passed which exercise, and the commonest messages of the checks."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from .graded import Graded

MARKS = {
    "passed": ("✓", "passed"),
    "not solved": ("·", "not solved"),
    "not right": ("✗", "not right"),
    "error": ("!", "error"),
    "not checked": ("?", "the check said nothing"),
    "not reached": ("–", "not reached"),
}
"""A sign and words for each state: never a color alone."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #111;
  background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border: 1px solid #999; padding: 0.3em 0.6em; text-align: left }
.wide { overflow-x: auto }
td.passed { background: #d8f0e6 } td.wrong { background: #f9e3d3 }
"""


def class_page(graded: Sequence[Graded], isolation: str = "") -> str:
    """A page of HTML that needs no network: a table for each lesson, the commonest messages of each exercise's check,
    and what kept the notebooks apart.
    """
    counting = [one for one in graded if one.counts]
    parts = [
        _lesson(lesson, [one for one in counting if one.lesson == lesson])
        for lesson in sorted({one.lesson for one in counting if one.lesson})
    ]
    older = [f"{one.file}: {one.passed} of {len(one.outcomes)}" for one in graded if not one.counts]
    unread = [f"{one.file or one.learner}: {one.problem}" for one in graded if not one.lesson]
    for title, items in (("Not counted: their learners handed in newer ones", older), ("Not graded", unread)):
        if items:
            parts.append(f"<h2>{title}</h2>{_list(items)}")
    if isolation:
        parts.append(f"<h2>What kept the notebooks apart</h2><p>{escape(isolation)}</p>")
    key = ", ".join(f"{sign} {words}" for sign, words in MARKS.values())
    head = "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>The class</title>"
    head += "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    return f"{head}<style>{STYLE}</style></head><body><h1>The class</h1><p>{key}</p>{''.join(parts)}</body></html>"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _lesson(lesson: str, graded: Sequence[Graded]) -> str:
    """One lesson's table, and below it the commonest messages of its checks: what to talk about in class."""
    exercises = list(dict.fromkeys(name for one in graded for name in one.outcomes))
    head = "".join(f"<th scope='col'>{name}</th>" for name in ["learner", *exercises, "passed", "remarks"])
    rows = "".join(_row(one, exercises) for one in sorted(graded, key=lambda one: (-one.passed, one.learner)))
    share, said = "", []
    for name in exercises:
        outcomes = [one.outcomes[name] for one in graded]
        share += f"<td>{sum(one.state == 'passed' for one in outcomes)} of {len(graded)}</td>"
        common = Counter(one.said for one in outcomes if one.state in ("not right", "error")).most_common(3)
        said += [f"{name}, {count} ×: {words}" for words, count in common]
    foot = f"<tr><th scope='row'>passed by</th>{share}<td></td><td></td></tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table>"
    wide = f"<div class='wide' role='region' aria-label='Lesson {lesson}' tabindex='0'>{table}</div>"
    words = f"<h3>What the checks said most often</h3>{_list(said)}" if said else ""
    return f"<h2>Lesson {lesson}</h2>{wide}{words}"


def _row(one: Graded, exercises: Sequence[str]) -> str:
    cells = []
    for name in exercises:
        outcome = one.outcomes[name]
        sign, words = MARKS[outcome.state]
        look = LOOKS.get(outcome.state, "")
        cells.append(f"<td{look} title='{escape(outcome.said or words)}' aria-label='{words}'>{sign}</td>")
    end = f"<td>{one.passed} of {len(one.outcomes)}</td><td>{escape(one.problem)}</td>"
    return f"<tr><th scope='row'>{escape(one.learner)}</th>{''.join(cells)}{end}</tr>"


LOOKS = {"passed": " class='passed'", "not right": " class='wrong'", "error": " class='wrong'"}
