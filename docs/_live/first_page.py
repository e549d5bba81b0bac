"""Draw the small explorer of the website's first page: the peak of the chosen run, as a picture."""

import json
from typing import Any

from course_utils.interactive.explorer import DEFAULTS, dashboard
from course_utils.interactive.explorer_page import link, texts, values


def draw(chosen: str) -> str:
    """The verdict on a run, its picture and its link to the explorer; in `refused` why it is not a run."""
    try:
        drawn = dashboard(values(json.loads(chosen)))
    except ValueError as problem:
        return json.dumps({"refused": str(problem)}, ensure_ascii=False)
    found: dict[str, Any] = {
        "verdict": drawn.verdict,
        "title": drawn.title,
        "fits": drawn.fits,
        "picture": drawn.stack.html,
        "link": link(chosen),
    }
    return json.dumps(found, ensure_ascii=False)


def first() -> str:
    """The choices to begin with."""
    return json.dumps(texts(DEFAULTS))
