"""Answer the website's script: draw and change a lesson's widgets, and judge guesses.

Text in, JSON out. The rules are the course's own: `parse_guess` and `Revelation` of its guesses, its lessons'
widgets.
"""

import ast
import io
import json
from contextlib import redirect_stdout
from datetime import date
from typing import Any

import ipywidgets

from course_utils.interactive.guesses import Guess, Revelation, parse_guess

SHOWN = (
    "value",
    "description",
    "disabled",
    "tooltip",
    "placeholder",
    "continuous_update",
    "min",
    "max",
    "step",
    "interval",
)


def show(code: str) -> str:
    """Execute a cell's code and return the widget that its last line makes, with all that is in it."""
    tree = ast.parse(code)
    assert isinstance(tree.body[-1], ast.Expr), "the last line shows a widget"
    names: dict[str, Any] = {"__name__": "cell"}
    with redirect_stdout(io.StringIO()):
        exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
        widget = eval(compile(ast.Expression(tree.body[-1].value), "cell", "eval"), names)
    ipywidgets.CHANGED.clear()
    return json.dumps(state(widget), ensure_ascii=False)


def state(widget: Any) -> dict[str, Any]:
    """The traits that the page draws, of a widget and of the widgets in it."""
    found = {name: vars(widget)[name] for name in SHOWN if name in widget.all_traits}
    found |= {"number": widget.number, "kind": kind(widget), "classes": widget.classes}
    found["layout"] = {name: value for name, value in vars(widget.layout).items() if name != "owner"}
    found["color"] = widget.style.button_color
    if hasattr(widget, "options"):
        labels = tuple(label for label, _ in widget.options)
        values = [value for _, value in widget.options]
        found |= {"options": labels, "value": values.index(widget.value) if widget.value in values else 0}
    if hasattr(widget, "children"):
        found["children"] = [state(child) for child in widget.children]
    return found


def kind(widget: Any) -> str:
    """The name of the `ipywidgets` class here that a widget is, or inherits from."""
    return next(one.__name__ for one in type(widget).__mro__ if one.__module__ == "ipywidgets")


def set_value(number: int, value: str) -> None:
    """Set a widget's value, given as JSON: for a selection, the place of the option."""
    widget = ipywidgets.WIDGETS[number]
    given = json.loads(value)
    if hasattr(widget, "options"):
        given = widget.options[given][1]
    widget.value = given


def press(number: int) -> None:
    widget = ipywidgets.WIDGETS[number]
    for called in list(widget.pressed):
        called(widget)


def changes() -> str:
    """The states of all widgets that changed since this was asked last."""
    changed = sorted(ipywidgets.CHANGED)
    ipywidgets.CHANGED.clear()
    return json.dumps([state(ipywidgets.WIDGETS[number]) for number in changed], ensure_ascii=False)


def tell(called: Any) -> None:
    """Set the function to call when a widget is out of date."""
    ipywidgets.tell = called


def lock(text: str, unit: str) -> str:
    """A guess to keep, or in `problem` the reason why the text is not a guess."""
    try:
        guess = Guess(parse_guess(text, unit), unit, date.today().isoformat())
    except ValueError as refused:
        return json.dumps({"problem": str(refused)}, ensure_ascii=False)
    kept = {"value": guess.value, "unit": guess.unit, "day": guess.day, "said": str(guess)}
    return json.dumps(kept, ensure_ascii=False)


def compare(kept: str, actual: str) -> str:
    """The picture of a guess next to the answer."""
    known = json.loads(kept)
    guess = Guess(known["value"], known["unit"], known["day"])
    return Revelation(float(actual), guess, guess.unit)._repr_html_()
