"""The field for a guess in a notebook, with its button. Only notebooks import this module."""

from html import escape
from pathlib import Path
from threading import RLock
from typing import Any

import ipywidgets

NOT_TOLD = "not told yet"
"""What the page's answer holds until it comes. Nobody types it as a guess."""


class GuessForm(ipywidgets.VBox):
    """A field and a button that stores its text. Inherits because only a widget can be shown as one.

    The kernel may know less of a text than the page. ipywidgets sends one change of a field, then waits until
    the kernel has handled it before it sends the rest. The Enter key and clicks do not wait, so they overtake
    the rest. Both therefore ask the page for the text, and only the page's answer is stored: it holds the
    request and the text.

    The field and its button are never disabled: else the keyboard would drop out of the cell.

    JupyterLab has a widget's first message handled in the kernel's main thread and later ones in another, so
    two can be handled at once. They take turns: words from before a guess was stored would else replace those
    from after.
    """

    def __init__(self, ask: Any, text: str = "") -> None:
        self.ask = ask
        asked = ask.placeholder
        label = ask.asks or "Guess"
        width_em = max(18, 10 + (len(asked) + len(label)) // 2)
        look = {"layout": {"width": f"{width_em}em"}, "style": {"description_width": "initial"}}
        self.text = text
        self.turn = RLock()
        self.field = ipywidgets.Text(text, placeholder=asked, description=label, **look)
        self.button = ipywidgets.Button()
        self.answer = ipywidgets.HTML()
        self.told = ipywidgets.Text(value=NOT_TOLD)
        self.link: Any = None
        self.field.observe(lambda change: self.show(change.new), names="value")
        self.field.on_msg(self._key)
        self.button.on_click(self.ask_page)
        self.told.observe(self._page_answers, names="value")
        row = ipywidgets.HBox([self.field, self.button], layout={"flex_flow": "row wrap"})
        script = Path(__file__).with_name("guess_form.js").read_text(encoding="utf-8")
        style = ipywidgets.HTML(f'<style onload="{escape(script)}"></style>', layout={"display": "none"})
        super().__init__([style, row, self.answer])
        self.add_class("course-guess-form")
        self.show()

    def _key(self, _: object, content: dict[str, Any], buffers: object) -> None:
        if content.get("event") == "submit":  # the Enter key
            self.ask_page()

    def ask_page(self, _: object = None) -> None:
        """Ask the page for the text of the field: a new link makes it send that text at once."""
        with self.turn:
            self._unlink()  # a page that was closed has not answered
            self.told.value = NOT_TOLD
            self.link = ipywidgets.jsdlink((self.field, "value"), (self.told, "value"))

    def _page_answers(self, change: Any) -> None:
        with self.turn:
            if self.link is None or change.new == NOT_TOLD:
                return  # the page had not yet heard that the link was closed
            self._unlink()
            self.store(change.new)

    def _unlink(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    def store(self, text: str) -> None:
        try:
            self.ask.store(text)
        except ValueError as problem:
            self.show(text, str(problem))
        else:
            self.show(text)

    def show(self, text: str | None = None, problem: str = "") -> None:
        """Say what is stored, and what is wrong."""
        with self.turn:
            if text is not None:
                self.text = text
            said = self.ask.about(self.text)
            self.button.description = said.button
            problem = problem or said.problem
            alert = f"<div role='alert'>{escape(problem)}</div>" if problem else ""
            self.answer.value = said.locked + alert

    def __repr__(self) -> str:
        return repr(self.ask)
