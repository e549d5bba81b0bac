"""The dark theme of the figures: the same meaning in colors for a dark page, and what a page needs to show a figure.

A figure is drawn in the light colors. A style sheet that it carries replaces each of them where the `color-scheme` of
its page is dark: JupyterLab and the website set that, and browsers hand it on to an image.
"""

import json
import re
from base64 import b64encode
from functools import cache
from html import escape
from importlib.resources import files

HERE = files(__name__.rpartition(".")[0])  # a folder, or a part of the archive that the explorer's page imports from
ON_DARK, ON_LIGHT, ON_DARKENED, ON_LIGHTENED = "#FFFFFE", "#111110", "#111112", "#FFFFFC"
"""Inks of words on a color: for dark and light ones, and for those that the dark theme darkens or lightens."""

DARK: dict[str, str] = json.loads(HERE.joinpath("dark.json").read_text(encoding="utf-8"))
"""The dark theme's color for each light one that differs there; all others stay."""

THIN = {"#0072B2": "#56B4E9"}
"""The same for the lines and texts of `lines`, as thin things need more contrast than areas."""

UNREAD = re.compile(r' data-(?!kind|phase|peak|knots|one|unit|digits|scale|top|high)[a-z-]+="[^"]*"')
"""What a notebook does without, as only tests read it."""

COLOR = re.compile(r'(fill|stroke)(="|: )(#[0-9A-Fa-f]{6})')


@cache
def part(name: str, attribute: bool = False) -> str:
    """A file of this folder, without its comments and indents."""
    lines = map(str.strip, HERE.joinpath(name).read_text(encoding="utf-8").splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("//"))
    return escape(text) if attribute else text


def themed(svg: str, layout: str = "") -> str:
    """The SVG with a style sheet for a dark page; its description is in its label alone."""
    rules, svg = {}, re.sub("<desc>.*?</desc>", "", svg)
    for name, sign, color in sorted(set(COLOR.findall(svg))):
        light, drawn = color.upper(), sign != '="'
        dark = (drawn and THIN.get(light)) or DARK.get(light)
        if dark and dark != light:
            where, force = (f'[style*="{name}: {color}"]', "!important") if drawn else (f'[{name}="{color}"]', "")
            rules[f".course-figure {where}{{{name}:light-dark({light},{dark}){force}}}"] = None
    style = f"<style>svg.course-figure:root{{color-scheme:light dark}}{''.join(rules)}</style>"
    head, end, rest = svg.partition(">")
    return f'{head} class="course-figure{layout and f" course-{layout}"}"{end}{style}{rest}'


def image(svg: str, alt: str) -> str:
    """An HTML `<img>`, which every viewer of notebooks shows."""
    head = f'<img alt="{escape(alt)}" class="course-figure" style="max-width:100%" src="data:image/svg+xml;base64,'
    return f'{head}{b64encode(themed(UNREAD.sub("", svg), "wide").encode()).decode()}">'


def as_image(svg: str, narrow: str, alt: str) -> str:
    """HTML for a notebook: the image, and a script that puts `in_page`'s picture in its place."""
    other = f'<script type="image/svg+xml">{themed(UNREAD.sub("", narrow), "narrow")}</script>' if narrow else ""
    return f"{image(svg, alt)}{other}<style>{part('figure.css')}</style><script>{part('figure.js')}</script>"


def in_page(svg: str, narrow: str) -> str:
    """HTML for a page or widget: the layout that fits is shown, and the script comes with the first touch."""
    layouts = themed(svg, "wide") + (themed(narrow, "narrow") if narrow else "")
    kind, wake = "course-picture" + (" course-reflows" if narrow else ""), part("figure.js", attribute=True)
    said = '<div class="course-said" role="status"></div>'
    begin = f'<div class="{kind}" tabindex="0" role="group" aria-label="Figure: arrow keys read out its parts"'
    scripts = f'onpointerenter="{wake}" onfocus="this.onpointerenter()"'
    return f"<style>{part('figure.css')}</style>{begin} {scripts}>{layouts}{said}</div>"
