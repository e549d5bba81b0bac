"""What the website adds to Sphinx: script-free formulas, live lessons, the first page, cards to share."""

import ast
import builtins
import html
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("COURSE_ROOT", HERE.parent))
LIVE = ROOT / "docs" / "_live"
"""Python for the browser: a stand-in for ipywidgets, and what the pages' script asks."""

LONG_AGO = (1980, 1, 1, 0, 0, 0)
MODULES = (
    "*.py",
    "*.toml",
    "estimating/**/*.py",
    "planning/*.py",
    "interactive/*.*",
    "lessons/__init__.py",
    "lessons/*/*.py",
    "lessons/*/*.toml",
)
LEFT_OUT = re.compile(
    r"/(figures|checks|check_ranks|judging|on_ranks|language_model|texts|ddp_training|quiz_form|meter)\.py$"
)
"""Files of those folders that need torch, matplotlib or a notebook."""


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.connect("builder-inited", find_live_cells)
    app.connect("source-read", prepare)
    app.connect("html-page-context", describe)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# Formulas: MathML, which browsers set themselves


def inline_formula(translator: Any, node: Any) -> None:
    _formula(translator, node, "inline")


def block_formula(translator: Any, node: Any) -> None:
    _formula(translator, node, "block")


def _formula(translator: Any, node: Any, display: str) -> None:
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert

    made = convert(node.astext(), display=display)
    if display == "block":
        made = f'<div class="course-formula" tabindex="0">{made}</div>'
    translator.body.append(made)
    raise SkipNode


# Cells that are live: each with the code that it needs from the cells above it


def find_live_cells(app: Any) -> None:
    """Try every cell with a widget in a Python without torch and matplotlib, as the browser's has neither."""
    cells: dict[str, str] = {}
    for path in sorted((Path(app.srcdir) / "notebooks").glob("*.ipynb")):
        cells |= slices(json.loads(path.read_text(encoding="utf-8")))
    running = runnable(cells)
    app.course_live = {name: code for name, code in cells.items() if name in running}


def has_widget(cell: dict[str, Any]) -> bool:
    return any(shows_widget(output) for output in cell.get("outputs", ()))


def shows_widget(output: dict[str, Any]) -> bool:
    """True for what a widget leaves in a notebook: words that ask to run the cell, and a picture."""
    said = "".join(output.get("data", {}).get("text/plain", ""))
    asks = re.search(r"run this cell to (use|play|step|tick|diagnose)", said)
    return bool(asks) and "text/html" in output["data"]


def slices(notebook: dict[str, Any]) -> dict[str, str]:
    """By cell, for cells that show a widget: the statements that it needs, from the notebook's top on."""
    before: list[ast.stmt] = []
    found = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        try:
            body = ast.parse("".join(cell["source"])).body
        except SyntaxError:  # a command of IPython
            continue
        if has_widget(cell) and body and isinstance(body[-1], ast.Expr):
            statements = needed([*before, *body[:-1]], body[-1])
            found[cell["id"]] = ast.unparse(ast.Module(statements, []))
        before += body
    return found


def needed(before: list[ast.stmt], shown: ast.stmt) -> list[ast.stmt]:
    """The statement with those before it that bind a name that it, or one of them, reads."""
    kept = [shown]
    wanted = read_by(shown)
    for statement in reversed(before):
        if bound := bound_by(statement) & wanted:
            kept.insert(0, statement)
            wanted = (wanted - bound) | read_by(statement)
    return kept


def read_by(statement: ast.stmt) -> set[str]:
    """The names that a statement asks of those before it.

    `x += 1` reads x; a comprehension's own names are its own.
    """
    read = {node.id for node in names(statement) if isinstance(node.ctx, ast.Load)}
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
    return read - set(dir(builtins)) - inner(statement)


def bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {node.id for node in names(statement) if isinstance(node.ctx, ast.Store)} - inner(statement)


def names(tree: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]


def inner(statement: ast.stmt) -> set[str]:
    """The names that comprehensions within a statement bind for themselves."""
    bound = set[str]()
    for node in ast.walk(statement):
        if isinstance(node, ast.comprehension):
            bound |= {name.id for name in names(node.target)}
    return bound


TRIED = """
import sys, json
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "matplotlib", "IPython", "torch"}:
            raise ImportError("no " + name + " in a browser")
sys.meta_path.insert(0, Refused())
sys.path.insert(0, sys.argv[1])
import course_page
made = {}
for name, code in json.load(sys.stdin).items():
    try:
        made[name] = len(course_page.show(code))
    except Exception as problem:
        print(name, problem, file=sys.stderr)
print(json.dumps(made), file=sys.__stdout__)
"""


def runnable(cells: dict[str, str]) -> dict[str, int]:
    """Those cells whose code runs from the archive alone, with how much each of them draws."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="course-live-") as folder:
        with zipfile.ZipFile(io.BytesIO(archive())) as packed:
            packed.extractall(folder)
        command = [sys.executable, "-I", "-c", TRIED, folder]
        done = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def archive() -> bytes:
    """The zip that pages unpack: the package's modules that need no torch, and what is for browsers alone."""
    package = ROOT / "course_utils"
    found = {path for part in MODULES for path in package.glob(part)}
    modules = sorted(path for path in found if not LEFT_OUT.search(path.as_posix()))
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as target:
        for path in [*modules, *sorted(LIVE.glob("*.py"))]:
            name = path.name if path.parent == LIVE else path.relative_to(ROOT).as_posix()
            target.writestr(zipfile.ZipInfo(name, LONG_AGO), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return kept.getvalue()


# Pages: what a notebook's outputs become


def prepare(app: Any, name: str, source: list[str]) -> None:
    if name.startswith(("notebooks/", "exercises/")):
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            for output in cell.get("outputs", ()):
                if "text/html" in output.get("data", {}):
                    output["data"]["text/html"] = dressed(output, app.course_live.get(cell["id"]))
        source[0] = json.dumps(notebook)
    elif name == app.config.root_doc:
        from story import told

        source[0] = told(source[0]).replace("<!-- the explorer -->", first_picture())


def dressed(output: dict[str, Any], code: str | None) -> str:
    """An output's HTML with what the pages' script finds it by."""
    stored = "".join(output["data"]["text/html"])
    said = "".join(output["data"].get("text/plain", ""))
    if re.match(r"Quiz of lesson \d+", said):
        return f"<div class='course-quiz'>{stored}</div>"
    if not shows_widget(output):
        return stored
    if code is None:
        needs = "This is a picture: its controls move in JupyterLab."
        return f"<div>{stored}<p class='course-static'>{needs}</p></div>"
    still = f"<div class='course-still'>{stored}</div>"
    return f"<div class='course-live' data-code='{html.escape(code)}'>{still}</div>"


# The first page


HERO = ("model", "gpu", "micro_batch")


def first_picture() -> str:
    """The explorer's first picture and its first three controls, which answer once Python is there."""
    from course_utils.interactive.explorer_page import controls

    page = first_page()
    offered = {control["name"]: control for control in json.loads(controls())}
    drawn = json.loads(page.draw(page.first()))
    picture = drawn["picture"]
    look = "fits" if drawn["fits"] else "over"
    fields = "".join(_field(offered[name]) for name in HERO)
    return (
        f'<div class="course-hero" data-first="{html.escape(page.first())}">'
        f'<form class="course-fields" aria-label="A training run">{fields}</form>'
        f'<p class="course-verdict" role="status" data-state="{look}">'
        f"<strong>{html.escape(drawn['verdict'])}</strong> {html.escape(drawn['title'])}.</p>"
        f'<div class="course-hero-picture">{picture}</div>'
        '<p class="course-more">'
        '<a class="course-all" href="../explorer/index.html">All sixteen controls: the explorer</a>'
        '<span class="course-loading" role="status"></span></p></div>'
    )


def first_page() -> Any:
    """docs/_live/first_page.py, which the browser runs too."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("first_page", LIVE / "first_page.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _field(control: dict[str, Any]) -> str:
    options = ""
    for text, shown in control["options"]:
        selected = " selected" if text == control["first"] else ""
        options += f'<option value="{html.escape(text)}"{selected}>{html.escape(shown)}</option>'
    select = f'<select name="{control["name"]}">{options}</select>'
    return f"<label>{html.escape(control['label'])}{select}</label>"


# Cards for sharing, and the files that no page is made of

QUESTIONS = {
    "00": "Where does the memory of one step go, and what can this machine do?",
    "01": "GPT-2 XL's weights take 6 GB. Why does a 32 GB card run out?",
    "02": "Why does the optimizer outweigh the model?",
    "03": "What do 16 bits save, and what do they not?",
    "04": "How many parameters does an architecture have, to the unit?",
    "05": "What does each operation keep for backward?",
    "06": "How much memory does recomputation save, and how much time does it cost?",
    "08": "How does a large batch fit into a small memory?",
    "09": "How large should a batch be, and which learning rate does it need?",
    "10": "What do replicas cost, and what do they send one another?",
    "11": "What happens when nothing is kept twice?",
    "12": "How can memory run out with a third of it free?",
    "14": "How is a model cut between layers, and what waits for what?",
    "15": "Tensor, sequence, experts, pipeline: which cut when?",
    "16": "What does a fine-tuning cost if only thin factors learn?",
    "17": "How do you train a model that you could not even store?",
    "18": "Nine calculators answer one question. Who is right?",
    "19": "Will it fit? Can you predict the peak, and then be right?",
}
COURSE = (
    "A course that accounts for every byte of a training step: guess, estimate, measure, explain the gap."
)


CARD_BAR = ((0.06, "#0072B2"), (0.03, "#56B4E9"), (0.12, "#E69F00"), (0.7, "#009E73"), (0.09, "#BBBBBB"))
"""Shares of the bar on a card, and the colors of their kinds of memory."""


def describe(app: Any, page: str, _: str, context: dict[str, Any], __: Any) -> None:
    """Add what other sites show of a link: a title, a sentence, and a picture if the address is known."""
    found = re.match(r"(?:notebooks|exercises)/(\d\d)_", page)
    number = found[1] if found else ""
    title = html.escape(re.sub(r"<[^>]+>", "", context.get("title", "")), quote=True)
    said = html.escape(QUESTIONS.get(number, COURSE))
    tags = {
        "og:type": "article",
        "og:site_name": app.config.project,
        "og:title": title,
        "og:description": said,
    }
    base = app.config.html_baseurl.rstrip("/")
    if base:
        card = number if number in QUESTIONS else "course"
        tags |= {"og:image": f"{base}/_static/cards/{card}.png", "og:url": f"{base}/{page}.html"}
        tags |= {"og:image:width": "1200", "og:image:height": "630", "og:image:alt": f"{title}. {said}"}
    look = "summary_large_image" if base else "summary"
    lines = ['<link rel="icon" href="data:,">']  # or each page asks for one that is not there
    lines += [f'<meta property="{name}" content="{value}">' for name, value in tags.items()]
    lines.append(f'<meta name="twitter:card" content="{look}">')
    lines.append(f'<meta name="description" content="{said}">')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def finish(app: Any, problem: Exception | None) -> None:
    if problem or app.builder.name != "html":
        return
    static = Path(app.outdir) / "_static"
    (static / "lessons.zip").write_bytes(archive())
    (static / "cards").mkdir(exist_ok=True)
    draw_card(static / "cards" / "course.png", app.config.project, COURSE)
    for number, question in QUESTIONS.items():
        for path in (Path(app.srcdir) / "notebooks").glob(f"{number}_*.ipynb"):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            heading = "".join(cells[0]["source"]).partition("\n")[0]
            draw_card(static / "cards" / f"{number}.png", heading.removeprefix("# "), question)
    for page in Path(app.outdir).rglob("*.html"):
        if page.relative_to(app.outdir).parts[0] != "explorer":
            page.write_text(reachable(page.read_text(encoding="utf-8")), encoding="utf-8")


def reachable(page: str) -> str:
    """The page with what Sphinx and its theme omit: headings' levels, keys that scroll code and tables."""
    heading = '<p class="caption" role="heading"'
    page = page.replace(f"{heading}>", f'{heading} aria-level="2">')
    return page.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def draw_card(target: Path, title: str, question: str) -> None:
    """A picture of 1200 × 630 pixels with a title, a question, and the colors of the kinds of memory."""
    from textwrap import fill

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="#14161A")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1200), ylim=(0, 630))
    axes.set_axis_off()
    axes.text(70, 520, fill(title, 34), color="#B3BAC6", fontsize=24, va="top")
    large = {"fontsize": 32, "linespacing": 1.3, "weight": "bold"}
    axes.text(70, 420, fill(question, 35), color="#FFFFFF", va="top", **large)
    left = 70
    for share, color in CARD_BAR:
        axes.barh(95, 1060 * share - 4, left=left, height=42, color=color)
        left += 1060 * share
    axes.text(70, 40, "Where Did the GPU Memory Go?", color="#B3BAC6", fontsize=16, va="center")
    FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})
