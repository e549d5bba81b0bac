"""The explorer in small, for the website's first page: the peak of what is chosen, as a picture that fits its page."""

import json
from typing import Any

from course_utils.interactive.explorer import DEFAULTS, dashboard
from course_utils.interactive.explorer_page import link, texts, values


def draw(chosen: str) -> str:
    """Whether a run fits, its picture and the link to it in the explorer; `refused` says why a choice makes no run."""
    try:
        drawn = dashboard(values(json.loads(chosen)))
    except ValueError as problem:
        return json.dumps({"refused": str(problem)}, ensure_ascii=False)
    found: dict[str, Any] = {"verdict": drawn.verdict, "title": drawn.title, "fits": drawn.fits}
    return json.dumps(found | {"picture": drawn.stack.inline, "link": link(chosen)}, ensure_ascii=False)


def first() -> str:
    """The choices to begin with."""
    return json.dumps(texts(DEFAULTS))
