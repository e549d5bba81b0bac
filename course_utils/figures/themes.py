"""The figures' dark theme: the same meaning in colors for a dark page, and what a page needs to show one.

A figure is drawn in the light colors. A style sheet that it carries replaces each of them where the
`color-scheme` of its page is dark: JupyterLab and the website set that, and browsers hand it on to an image.
"""

import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from urllib.parse import quote

# a folder, or a part of the archive that the explorer's page imports from
HERE = files(__name__.rpartition(".")[0])

# Inks of words on a color: white and near-black, with a last digit that tells a dark theme what to do.
ON_DARK = "#FFFFFE"
ON_LIGHT = "#111110"
ON_DARKENED = "#111112"  # on a light color that the dark theme darkens
ON_LIGHTENED = "#FFFFFC"  # on a dark color that it lightens

DARK: dict[str, str] = json.loads(HERE.joinpath("dark.json").read_text(encoding="utf-8"))
"""The dark theme's color for each light one that differs there; all others stay."""

THIN = {"#0072B2": "#56B4E9"}
"""The same for the lines and texts of `lines`, as thin things need more contrast than areas."""

UNREAD = re.compile(
    r' data-(?!kind|phase|peak|knots|one|unit|digits|scale|top|high)[a-z-]+="[^"]*"|<text [^>]*></text>\n'
    r'| stroke-width="1"(?=[ />])|(?<=role="img") aria-label="[^"]*"'
)
"""What a notebook does without: what tests read, empty texts, a line's usual width, what the `alt` says."""

PLAIN = " !$'()*+,-./:;=?@[]^_`{|}~"
"""What stays as it is in the address of an image."""

COLOR = re.compile(r'(fill|stroke)(="|: )(#[0-9A-Fa-f]{6})')


@cache
def part(name: str, attribute: bool = False) -> str:
    """A file of this folder on one line, without its comments, which have lines of their own."""
    lines = map(str.strip, HERE.joinpath(name).read_text(encoding="utf-8").splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("//"))
    return escape(text) if attribute else text


READING = f"<script>{part('reading.js')}</script>"
"""It works once in a page: `build` leaves it to the first figure of a notebook."""


def themed(svg: str, layout: str = "", colored: str | None = None) -> str:
    """The SVG with a dark page's style sheet for the colors in `colored`; its label alone describes it."""
    rules = dict[str, None]()  # a set that keeps its order
    for name, sign, color in sorted(set(COLOR.findall(svg if colored is None else colored))):
        is_attribute = sign == '="'  # else it is in a style, as matplotlib writes
        rule = _dark_rule(name, color, is_attribute)
        if rule:
            rules[rule] = None
    style = ""
    if rules:
        style = f"<style>svg.course-figure:root{{color-scheme:light dark}}{''.join(rules)}</style>"
    kind = f"course-figure course-{layout}" if layout else "course-figure"
    head, end, rest = re.sub("<desc>.*?</desc>", "", svg).partition(">")
    return f'{head} class="{kind}"{end}{style}{rest}'


def _dark_rule(name: str, color: str, is_attribute: bool) -> str:
    """The rule of a style sheet for a `fill` or `stroke` of one color; "" where the dark theme keeps it."""
    light = color.upper()
    dark = DARK.get(light)
    if not is_attribute:
        dark = THIN.get(light, dark)
    if dark is None or dark == light:
        return ""
    if is_attribute:
        return f'.course-figure [{name}="{color}"]{{{name}:light-dark({light},{dark})}}'
    return f'.course-figure [style*="{name}: {color}"]{{{name}:light-dark({light},{dark})!important}}'


def stored(svg: str, layout: str, colored: str) -> str:
    """The SVG as a notebook holds it: themed, without what is unread, on one line, without double quotes."""
    drawn = themed(UNREAD.sub("", svg), layout, colored).replace("'", "&#39;")
    return drawn.replace('"', "'").replace("\n", " ")


def image(svg: str, alt: str, narrow: str = "") -> str:
    """An HTML `<img>`, which every viewer of notebooks shows; its colors serve the `narrow` layout, too."""
    data = quote(stored(svg, "wide", svg + narrow), safe=PLAIN)
    return (
        f'<img alt="{escape(alt)}" class="course-figure" style="max-width:100%"'
        f' src="data:image/svg+xml,{data}">'
    )


def as_image(svg: str, narrow: str, alt: str) -> str:
    """HTML for a notebook: the image, and scripts that put `in_page`'s picture there and read it out."""
    other = ""
    if narrow:
        other = f'<script type="image/svg+xml">{stored(narrow, "narrow", "")}</script>'
    dress = f"<style>{part('figure.css')}</style><script>{part('figure.js')}</script>"
    return f"{image(svg, alt, narrow)}{other}{dress}{READING}"


def in_page(svg: str, narrow: str) -> str:
    """HTML for a page or widget: the layout that fits is shown, and the script comes with the first touch."""
    layouts = themed(svg, "wide")
    kind = "course-picture"
    if narrow:
        layouts += themed(narrow, "narrow")
        kind += " course-reflows"
    wake = part("reading.js", attribute=True)
    said = '<div class="course-said" role="status"></div>'
    label = 'role="group" aria-label="Figure: arrow keys read out its parts"'
    scripts = f'onpointerenter="{wake}" onfocus="this.onpointerenter()"'
    begin = f'<div class="{kind}" tabindex="0" {label} {scripts}>'
    return f"<style>{part('figure.css')}</style>{begin}{layouts}{said}</div>"
