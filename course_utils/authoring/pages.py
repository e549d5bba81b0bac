"""Pages of docs/ and the front page's picture, made from lessons, recordings and estimates by `build`."""

import json
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from .. import TrainingRun, estimate, format_bytes, gpu
from ..evidence.gpu import GPU_TABLES
from ..figures import CourseFigure, stack
from ..interactive.course_files import number_of, numbered
from ..interactive.explorer import NOT_COUNTED
from ..interactive.learner_folder import write_whole
from ..interactive.notebook_runs import BuildError
from ..lessons.calculators import errata
from ..lessons.shared.cheat_sheet import cheat_sheet
from ..teaching import syllabi

HEAD = """# On real GPUs

What this course claims, next to what GPUs counted and how long they took. The tables are made from the
recordings in `course_utils/measuring/recordings` whenever the course is built.
[How they are recorded](gpu.md) takes a quarter of an hour on a large NVIDIA GPU.
"""

README = Path("README.md")
TABLE = ("<!-- lessons: `build` makes this table, but for its second column -->", "<!-- end of lessons -->")

RECIPES = """# Recipes

Plain PyTorch to paste into a training script of your own: the last piece of code of each lesson, without this
course's helpers. Each runs unchanged, and on the CPU as well unless it says that it needs CUDA. The tests run
them all.
"""

OWN_FIGURE = Path(__file__).with_name("own_figure.md")


def write_pages(root: Path) -> None:
    """Write every page and picture that has its folder below `root`."""
    for page, text in _pages(root).items():
        write_whole(root / page, text)


def check_pages(root: Path) -> list[str]:
    """A line for each of them that is missing, or not what it would be made now."""
    stored = {page: (root / page).read_text(encoding="utf-8") for page in PAGES if (root / page).exists()}
    stale = [page for page, text in _pages(root).items() if stored.get(page) != text]
    return [f"{page.as_posix()} is not what the {PAGES[page][0]} say now" for page in stale]


def _pages(root: Path) -> dict[Path, str]:
    """The text of each page. BuildError for a lesson that lacks what a page takes from it."""
    texts = {}
    try:
        for page, (_, made) in PAGES.items():
            # the README is made from the one that is there
            needed = root / page if made is readme else (root / page).parent
            if needed.exists():
                texts[page] = made(root)
    except ValueError as problem:
        raise BuildError(str(problem)) from problem
    return texts


def gpu_page() -> str:
    """Results of real GPUs as Markdown, the same whenever it is made from the same recordings."""
    tables = [table for made in GPU_TABLES.values() for table in made()]
    return "\n".join([HEAD, *(f"{table.page()}\n" for table in tables)])


def recipes(root: Path) -> str:
    """Each lesson's "In your own script": its text and the code after it; last, a figure of one's own."""
    parts = [RECIPES]
    for path in numbered(root / "notebooks"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"]).partition("\n")[0]
        for place, cell in enumerate(cells):
            _, heading, words = "".join(cell["source"]).partition("## In your own script\n")
            if heading:
                below = takewhile(lambda one: one["cell_type"] == "code", cells[place + 1 :])
                code = "\n\n".join("".join(one["source"]) for one in below)
                # links as they are from docs/
                words = words.strip().replace("](../docs/", "](")
                words = re.sub(r"\]\((?=\w+\.ipynb)", "](../notebooks/", words)
                more = f"From [lesson {number_of(path)}](../notebooks/{path.name})."
                parts.append(f"#{title}\n\n{words} {more}\n\n```python\n{code}\n```\n")
    return "\n".join([*parts, OWN_FIGURE.read_text(encoding="utf-8")])


def readme(root: Path) -> str:
    """README with a new table of lessons, but for what one finds out. ValueError for a lesson with no row."""
    text = (root / README).read_text(encoding="utf-8")
    kept = dict(re.findall(r"^\| \[(\w+) [^|]+\| ([^|]+) \|", text, re.MULTILINE))
    rows = ["| lesson | you find out | minutes |", "|---|---|---|"]
    for number, lesson in syllabi.lessons(root).items():
        if number not in kept:
            row = f"| [{number} …](…) | what one finds out | |"
            raise ValueError(f"README.md needs a row `{row}` for {lesson.file}")
        file = f"notebooks/{lesson.file}"
        rows.append(f"| [{number} {lesson.title}]({file}) | {kept[number]} | {lesson.minutes} |")
    table = f"(?<={TABLE[0]}\n).*(?=\n{TABLE[1]})"
    made, count = re.subn(table, lambda _: "\n".join(rows), text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"README.md needs its table of lessons between {' and '.join(TABLE)}")
    return made


def five_recipes() -> dict[str, TrainingRun]:
    """Five ways to train GPT-2 XL on 32 sequences of 1,024 tokens, each with less memory."""
    run = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="amp-bf16")
    recomputed = run.replace(recompute="full")
    master = recomputed.replace(precision="bf16-master")
    return {
        "autocast, everything kept": run,
        "recomputed in backward": recomputed,
        "and 16-bit weights with a 32-bit master copy": master,
        "and the loss in 8 chunks": master.replace(loss_chunks=8),
        "or 8 micro-batches of 4 for 1 of 32": master.replace(micro_batch=4, accumulation_steps=8),
    }


def gpt2_xl_stack() -> CourseFigure:
    """GPT-2 XL's training step at its peak by those recipes, and a 32 GB card."""
    card = gpu("RTX5090-32GB")
    rows = {label: estimate(run) for label, run in five_recipes().items()}
    totals = [row.total for row in rows.values()]
    most = format_bytes(max(totals), "GB", 1)
    least = format_bytes(min(totals), "GB", 1)
    title = f"From {most} to {least}: the recipe decides whether GPT-2 XL trains on a 32 GB card"
    return stack(rows, title, capacity=card, provenance=f"estimated from formulas · {NOT_COUNTED}")


PAGES: dict[Path, tuple[str, Callable[[Path], str]]] = {
    README: ("lessons", readme),
    Path("docs", "cheat_sheet.md"): ("lessons", lambda root: cheat_sheet(root).markdown),
    Path("docs", "recipes.md"): ("lessons", recipes),
    syllabi.PAGE: ("lessons", syllabi.page),
    Path("docs", errata.PAGE.name): ("errata", lambda _: errata.page()),
    Path("docs", "gpu_results.md"): ("recordings", lambda _: gpu_page()),
    Path("docs", "images", "gpt2-xl-stack.svg"): ("estimates", lambda _: gpt2_xl_stack().svg),
}
"""The source of each page, and the function that makes it."""
