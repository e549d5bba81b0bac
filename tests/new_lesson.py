"""Make every file that a new lesson needs:
`python3 -m course_utils new-lesson 15 my_lesson --title "My lesson"`.

The files are the skeletons of `docs/skeletons`, which build and pass their tests as they stand. What has to
be written is marked YOURS in them; `tests/test_skeletons.py` lists the marks that are left. Standard library
alone.
"""

import keyword
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from course_utils.cli.environment import SetupError
from course_utils.interactive.course_files import number_of
from course_utils.interactive.keeping import write_whole

ROOT = Path(__file__).resolve().parent.parent

SKELETONS = Path("docs", "skeletons")
MARK = "YOURS"
"""The word in each place of a skeleton where a lesson has to say something of its own."""


class WrongLesson(SetupError):
    """A lesson that cannot be made; the message is one sentence that says what would be right."""


@dataclass(frozen=True)
class Lesson:
    """A new lesson: its number, "15", its name as in 15_my_lesson.py, and its title."""

    number: str
    name: str
    title: str

    @property
    def stem(self) -> str:
        return f"{self.number}_{self.name}"

    def filled(self, skeleton: str) -> str:
        """The text of a skeleton with this lesson's number, name and title in place of its own."""
        text = skeleton.replace("my_lesson", self.name).replace("My lesson", self.title)
        return re.sub(r"(?<!\d)15(?!\d)", self.number, text)

    def files(self) -> dict[Path, str]:
        """The new files, by their place below the root, and the skeleton of each; "" for the folder's own
        line.
        """
        folder = Path("course_utils", "lessons", self.name)
        return {
            Path("notebooks", "src", f"{self.stem}.py"): "15_my_lesson.py",
            Path("solutions", "src", f"{self.stem}.py"): "15_my_exercises.py",
            folder / "__init__.py": "",
            folder / "checks.py": "15_my_checks.py",
            folder / "quiz.py": "15_my_quiz.py",
            folder / "quiz.toml": "15_my_quiz.toml",
            Path("tests", f"test_lesson_{self.number}_checks.py"): "15_my_answers.py",
        }


def lesson(root: Path, number: str, name: str, title: str = "") -> Lesson:
    """The lesson that is asked for. Raises WrongLesson for a number, name or title that is taken or
    malformed.
    """
    sources = sorted(root.glob("notebooks/src/[0-9]*.py"))
    following = f"{max(int(number_of(path)[:2]) for path in sources) + 1:02d}"
    if number.zfill(2) != following:
        taken = [path.name for path in sources if number_of(path)[:2] == number.zfill(2)]
        why = f"is taken by {taken[0]}" if taken else "is not the next one"
        raise WrongLesson(f"Number {number} {why}: the next lesson is {following}.")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise WrongLesson(
            f"{name!r} cannot name a lesson's folder: use small letters and underscores, as in my_lesson."
        )
    taken = [name] if (root / "course_utils" / "lessons" / name).exists() else []
    taken += [path.name for path in sources if path.stem.partition("_")[2] == name]
    if taken:
        raise WrongLesson(f"The name {name!r} is taken by {taken[0]}: choose another one.")
    title = title.strip() or name.replace("_", " ").capitalize()
    if set(title) & set('|[]"\\\n') or len(title) > 60:
        raise WrongLesson(
            f'The title {title!r} has to be one line of up to 60 characters without | [ ] " or \\.'
        )
    return Lesson(following, name, title)


def make(root: Path, new: Lesson) -> list[Path]:
    """Write the lesson's files and its places in README.md and instructor.md; returns them, below the root.

    Nothing is written if a file is there already or a place is not found: raises WrongLesson.
    """
    there = [str(path) for path in new.files() if (root / path).exists()]
    if there:
        raise WrongLesson(
            f"{there[0]} is there already, and nothing is overwritten: move it away or choose another name."
        )
    shared: dict[Path, Callable[[str, Lesson], str]] = {
        Path("README.md"): with_row,
        Path("solutions", "instructor.md"): with_notes,
    }
    changed = {path: change(read(root / path), new) for path, change in shared.items()}
    notes = new.filled(read(root / SKELETONS / "15_my_notes.txt"))
    changed[Path("solutions", "instructor.md")] += notes
    for path, skeleton in new.files().items():
        text = read(root / SKELETONS / skeleton) if skeleton else '"""Lesson 15: its checks and quiz."""\n'
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with (root / path).open("x", encoding="utf-8") as file:
            file.write(new.filled(text))
    for path, text in changed.items():
        write_whole(root / path, text)
    return [*new.files(), *changed]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def with_row(readme: str, new: Lesson) -> str:
    """README with a row for the lesson: the row of the last one, with other words in it."""
    rows = re.findall(r"^\|.*\]\(notebooks/\d\d[a-z]?_\w+\.ipynb\).*\|$", readme, re.MULTILINE)
    if not rows:
        raise WrongLesson(
            "README.md has no table of lessons to add a row to: it needs rows that link notebooks/NN_name."
        )
    last = rows[-1]
    stem = re.findall(r"notebooks/(\w+)\.ipynb", last)[0]
    old = re.findall(r"\[(\d\d[a-z]? [^\]]+)\]", last)[0]
    cells = []
    for cell in last.strip("|").split("|"):
        if cell.strip().isdigit():
            cells.append(" 30 ")
        elif stem in cell:
            cells.append(cell.replace(stem, new.stem).replace(old, f"{new.number} {new.title}"))
        else:
            cells.append(f" {MARK}: what one finds out ")
    return readme.replace(last, f"{last}\n|{'|'.join(cells)}|")


def with_notes(notes: str, new: Lesson) -> str:
    """The instructor's notes, to which the lesson's part can be added: they end in a lesson's part."""
    headings = re.findall(r"^## (.+)$", notes, re.MULTILINE)
    if not headings or not headings[-1].startswith("Lesson "):
        raise WrongLesson(
            "solutions/instructor.md does not end in a lesson's notes: move its last section up."
        )
    return notes.rstrip("\n") + "\n"


def marks(root: Path = ROOT) -> list[str]:
    """Each place of a lesson that still has a skeleton's words: file, line, and what is to be said there."""
    patterns = ("notebooks/src/*.py", "solutions/src/*.py",
                "course_utils/lessons/*/*.py", "course_utils/lessons/*/*.toml",
                "tests/test_lesson_*.py")  # fmt: skip
    paths = [*(path for pattern in patterns for path in sorted(root.glob(pattern))), root / "README.md"]
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {line.partition(MARK)[2].lstrip(': ').strip()}"
        for path in [*paths, root / "solutions" / "instructor.md"]
        for number, line in enumerate(read(path).splitlines(), 1)
        if MARK in line
    ]


def run(chosen: Namespace, root: Path = ROOT) -> int:
    """Make the lesson and say what to do next. Raises WrongLesson with one sentence."""
    new = lesson(root, chosen.number, chosen.name, chosen.title)
    print(f"Lesson {new.number} · {new.title}")
    for path in make(root, new):
        print(f"  {'changed' if path.suffix == '.md' else 'made'} {path.as_posix()}")
    print(
        f"\nIt builds at once: python3 -m course_utils build {new.number}\n"
        f"Then replace every {MARK} by what the lesson says, and test it alone:\n"
        f"python3 -m course_utils test --lesson {new.number}"
    )
    return 0
