"""The pictures of the first page: for each of their choices one, drawn when the site is made.

A choice is a radio button, and a rule of the style sheet shows its picture. So it answers without a script.
"""

import html
import re
from collections.abc import Mapping

from course_utils import TrainingRun, estimate
from course_utils.authoring.pages import five_recipes
from course_utils.gpus import gpu
from course_utils.interactive.guesses import Revelation, asked_on_a_page
from course_utils.interactive.html_bars import stacked_bars
from course_utils.units import GB, format_bytes

CARD = gpu("RTX5090-32GB")
XL = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16")
MASTER = XL.replace(precision="bf16-master")
MOST = estimate(XL).total
ESTIMATED = "estimated from formulas"
GUESS = "start.step"

SLIDES = {
    "parameters": 3 * GB,
    "gradients": 3 * GB,
    "optimizer_states": 18 * GB,
    "activations": 8 * GB,
    "temporaries": 6 * GB,
    "cached": 3 * GB,
}
"""The parts that the slides list: "Large models training" (Optimization for ML, HSE University)."""

Bars = Mapping[str, Mapping[str, int]]
"""What each choice shows: bytes by kind."""


def weights() -> Bars:
    size = estimate(MASTER)["parameters"]
    return {"in 16 bits": {"parameters": size}, "in 32 bits": {"parameters": 2 * size}}


def states() -> Bars:
    whole = estimate(MASTER)
    two = {kind: whole[kind] for kind in ("parameters", "gradients")}
    return {
        "weights": {"parameters": whole["parameters"]},
        "and gradients": two,
        "and Adam's states": {**two, "optimizer_states": whole["optimizer_states"]},
    }


def batch() -> Bars:
    return {str(b): estimate(XL.replace(micro_batch=b)) for b in (1, 2, 4, 8, 16, 32)}


def recipe() -> Bars:
    return {label: estimate(run) for label, run in five_recipes().items()}


def right() -> Bars:
    at_once, in_chunks, in_pieces = list(five_recipes().values())[2:]
    return {
        "the slides' list": SLIDES,
        "all 32 at once": estimate(at_once),
        "loss in 8 chunks": estimate(in_chunks),
        "8 times 4": estimate(in_pieces),
    }


SCENES = {
    "weights": ("How are the weights stored?", weights, "The weights of GPT-2 XL take {total}"),
    "states": ("What does training add?", states, "Without any data, training holds {total}"),
    "batch": ("How many sequences at once?", batch, "With so many sequences, a step peaks at {total}"),
    "recipe": ("What is done about it?", recipe, "The step peaks at {total}"),
    "right": ("Who counts, and what?", right, "This adds up to {total}"),
}
"""Each scene: its question, its bars, and their title."""


def scene(name: str) -> str:
    """The HTML of a scene: a radio button for each choice, and its picture."""
    question, bars, title = SCENES[name]
    buttons, panels = [], []
    drawn = bars()
    most = max(sum(sizes.values()) for sizes in drawn.values())
    for index, (label, sizes) in enumerate(drawn.items()):
        checked = " checked" if index == 0 else ""
        key = f"scene-{name}-{index}"
        buttons.append(
            f'<input type="radio" name="scene-{name}" id="{key}"{checked}>'
            f'<label for="{key}">{html.escape(label)}</label>'
        )
        panels.append(f"<div>{picture(sizes, title, most)}</div>")
    inside = f"{''.join(buttons)}<div class='course-panels'>{''.join(panels)}</div>"
    return f"<fieldset class='course-scene'><legend>{html.escape(question)}</legend>{inside}</fieldset>"


def picture(sizes: Mapping[str, int], title: str, scale: int) -> str:
    """A bar by kind next to the card's line, as wide as its part of `scale` bytes."""
    total = format_bytes(sum(size for size in sizes.values()), "GB", 1)
    name = f"{CARD.name}: a program gets {format_bytes(CARD.room, 'GB', 1)}"
    note = "as the slides list it" if sizes is SLIDES else ESTIMATED
    parts = {kind: size for kind, size in sizes.items() if size}
    drawn = stacked_bars(
        {"": parts}, title.format(total=total), limit=CARD.room, limit_name=name, note=note, scale=scale
    )
    return drawn.html


def told(source: str) -> str:
    """The page's text with its scenes, its guess and the numbers that it names."""
    totals = {
        name: [sum(sizes.values()) for sizes in bars().values()] for name, (_, bars, _) in SCENES.items()
    }
    source = re.sub(r"<!-- scene: (\w+) -->", lambda match: scene(match[1]), source)
    source = re.sub(
        r"<!-- total: (\w+) (\d) -->",
        lambda match: format_bytes(totals[match[1]][int(match[2])], "GB", 1),
        source,
    )
    source = source.replace("<!-- the guess -->", asked_on_a_page(GUESS, "GB", "Your guess, in GB"))
    return source.replace("<!-- the answer -->", Revelation(MOST, None, "GB", GUESS)._repr_html_())
