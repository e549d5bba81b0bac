"""The part of ipywidgets that lessons use, for the website: values, options and watchers without a kernel.

Lessons' widgets inherit from these classes in the browser and stay as they are. `CHANGED` has the numbers of
the widgets whose look is out of date, and `tell` is called when the first one comes in; `course_page` draws
them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

WIDGETS: "list[Widget]" = []
CHANGED: set[int] = set()


def tell() -> Any:
    """Do nothing: `course_page.tell` puts the page's function in this one's place."""


class Change(dict):
    """What a watcher is given: `change["new"]` or `change.new`."""

    __getattr__ = dict.__getitem__


class Bag:
    """A widget's layout or style: any names, and the widget is drawn again when one of them is set."""

    def __init__(self, owner: "Widget", given: Any) -> None:
        if isinstance(given, Mapping):
            vars(self).update(given)
        elif given:
            vars(self).update(vars(given))
        vars(self)["owner"] = owner

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        self.owner.outdated()

    def __getattr__(self, name: str) -> Any:
        return None  # what was never set


class Widget:
    """A value with watchers. `traits` are what it has, with first values; `order` those given by place."""

    traits: ClassVar[dict[str, Any]] = {}
    order: ClassVar[tuple[str, ...]] = ("value",)
    all_traits: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls.all_traits = {**cls.all_traits, **cls.traits}

    def __new__(cls, *_: Any, **__: Any) -> "Widget":
        self = super().__new__(cls)
        vars(self).update(number=len(WIDGETS), watchers=[], pressed=[], held=None, classes=[])
        vars(self).update(cls.all_traits, layout=Bag(self, None), style=Bag(self, None))
        WIDGETS.append(self)
        return self

    def __init__(self, *placed: Any, **named: Any) -> None:
        given = {**dict(zip(self.order, placed, strict=False)), **named}
        for name in ("layout", "style"):
            vars(self)[name] = Bag(self, given.pop(name, None))
        # last, as it depends on options and limits
        for name in sorted(given, key=lambda name: name == "value"):
            setattr(self, name, given[name])

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        value = self.valid(name, value)
        vars(self)[name] = value
        if name in self.all_traits and (type(before) is not type(value) or before != value):
            self.outdated()
            self.notify(name, before)

    def valid(self, name: str, value: Any) -> Any:
        return value

    def notify(self, name: str, before: Any) -> None:
        if self.held is not None:
            self.held.setdefault(name, before)
            return
        change = Change(name=name, old=before, new=vars(self)[name], owner=self, type="change")
        for watcher in [watcher for watcher, names in self.watchers if name in names]:
            watcher(change)

    def outdated(self) -> None:
        first = not CHANGED
        CHANGED.add(self.number)
        if first:
            tell()

    def observe(self, watcher: Callable[[Any], Any], names: Any = "value") -> None:
        self.watchers.append((watcher, (names,) if isinstance(names, str) else tuple(names)))

    @contextmanager
    def hold_trait_notifications(self) -> Iterator[None]:
        vars(self)["held"] = {}
        try:
            yield
        finally:
            held = vars(self)["held"]
            vars(self)["held"] = None
            for name, before in held.items():
                if before != vars(self)[name]:
                    self.notify(name, before)

    def set_trait(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def on_msg(self, _: Any) -> None:
        """Nothing: there is no kernel that messages come from."""

    def add_class(self, name: str) -> "Widget":
        if name not in self.classes:
            self.classes.append(name)
            self.outdated()
        return self

    def remove_class(self, name: str) -> "Widget":
        if name in self.classes:
            self.classes.remove(name)
            self.outdated()
        return self

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {}


DOMWidget = Widget


class Box(Widget):
    traits: ClassVar = {"children": ()}
    order: ClassVar = ("children",)

    def valid(self, name: str, value: Any) -> Any:
        return tuple(value) if name == "children" else value


class VBox(Box):
    pass


class HBox(Box):
    pass


class HTML(Widget):
    traits: ClassVar = {"value": ""}


class _Described(Widget):
    traits: ClassVar = {"description": "", "disabled": False, "tooltip": ""}


class Text(_Described):
    traits: ClassVar = {"value": "", "placeholder": "", "continuous_update": True}


class Checkbox(_Described):
    traits: ClassVar = {"value": False}


class ToggleButton(_Described):
    traits: ClassVar = {"value": False}


class Button(_Described):
    def focus(self) -> None:
        """Nothing: on a page the focus goes where the browser puts it."""

    def on_click(self, called: Callable[[Any], Any]) -> None:
        self.pressed.append(called)


class IntSlider(_Described):
    traits: ClassVar = {"value": 0, "min": 0, "max": 100, "step": 1}
    order: ClassVar = ("value", "min", "max", "step")

    def valid(self, name: str, value: Any) -> Any:
        return max(self.min, min(self.max, value)) if name == "value" else value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("min", "max"):
            self.value = vars(self)["value"]  # a limit moves the value that lies beyond it


class Play(IntSlider):
    traits: ClassVar = {"interval": 100}


class _Selection(_Described):
    traits: ClassVar = {"value": None, "options": ()}

    def valid(self, name: str, value: Any) -> Any:
        if name == "options":
            pairs = value.items() if isinstance(value, Mapping) else value
            return tuple(pair if isinstance(pair, tuple) else (str(pair), pair) for pair in pairs)
        if name == "value" and not any(known == value for _, known in self.options):
            raise ValueError(f"{value!r} is not among the options")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "options" and not any(known == self.value for _, known in self.options):
            vars(self)["value"] = self.options[0][1] if self.options else None


class Dropdown(_Selection):
    pass


class SelectionSlider(_Selection):
    pass
