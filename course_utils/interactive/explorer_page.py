"""The dashboard for a web page: JSON in, JSON out. The page's script has no rule and no figure of its own.

Runs under Pyodide, with closed forms alone. Choices are passed as text, by control: `{"seq_len": "1024"}`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..palette import words
from ..units import format_bytes
from .explorer import CONTROL, CONTROLS, DEFAULTS, Suggestion, best_plan, complete, dashboard, next_changes


def controls() -> str:
    """The controls in order: name, label, kind, group, options as pairs of text and words, first choice."""
    first = texts(DEFAULTS)
    found = []
    for control in CONTROLS:
        options = [[str(value), shown] for shown, value in control.options]
        found.append(asdict(control) | {"options": options, "first": first[control.name]})
    return json.dumps(found)


def draw(chosen: str) -> str:
    """The dashboard of what is chosen, or `{"refused": words}` for choices that make no run."""
    try:
        drawn = dashboard(values(json.loads(chosen)))
    except ValueError as problem:
        return json.dumps({"refused": str(problem)}, ensure_ascii=False)
    total = drawn.breakdown.total
    sizes = [(kind, size) for kind, size in [*drawn.breakdown.items(), ("total", total)] if size]
    content = {
        "title": drawn.title,
        "verdict": drawn.verdict,
        "fits": drawn.fits,
        "phase": drawn.peak_phase,
        "code": drawn.code,
        "stack": drawn.stack.html,
        "timeline": drawn.timeline.html,
        "total": total,
        "rows": [[words(kind), f"{size:,}", format_bytes(size, "GB", 2)] for kind, size in sizes],
    }
    return json.dumps(content, ensure_ascii=False)


def changes(chosen: str) -> str:
    """The changes to try next: words, effect, and choices after each; none for choices that make no run."""
    try:
        found = next_changes(values(json.loads(chosen)))
    except ValueError:  # `draw` has said why
        return "[]"
    return json.dumps([_change(change) for change in found], ensure_ascii=False)


def plan(chosen: str) -> str:
    """The arrangement that fits and loses least time, as one of `changes`, else null. Takes seconds."""
    try:
        best = best_plan(values(json.loads(chosen)))
    except ValueError:  # the card can run none of them
        best = None
    return json.dumps(_change(best) if best else None, ensure_ascii=False)


def link(chosen: str) -> str:
    """The part of a link to these choices after its #: those that differ from the first ones."""
    first = texts(DEFAULTS)
    return urlencode({name: text for name, text in json.loads(chosen).items() if text != first[name]})


def linked(fragment: str) -> str:
    """The choices that a link asks for, and in `refused` a sentence for each that the page does not offer."""
    chosen = texts(DEFAULTS)
    refused = []
    for name, text in parse_qsl(fragment.removeprefix("#"), keep_blank_values=True):
        try:
            complete(values({name: text}))
            chosen[name] = text
        except ValueError as problem:
            refused.append(str(problem))
    return json.dumps({"chosen": chosen, "refused": refused}, ensure_ascii=False)


def texts(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Choices as text, in the order of the controls."""
    return {name: str(chosen[name]) for name in CONTROL}


def values(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Choices as `dashboard` takes them; it refuses what no control offers, which stays as it is."""
    found: dict[str, Any] = {}
    for name, text in chosen.items():
        offered = CONTROL[name].values if name in CONTROL else ()
        by_text = {str(value): value for value in offered}
        found[name] = by_text.get(text, text)
    return found


def _change(change: Suggestion) -> dict[str, Any]:
    return {"words": change.words, "effect": change.effect, "chosen": texts(change.chosen)}
