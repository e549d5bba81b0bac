"""Make every file that a new lesson needs:
`python3 -m course_utils new-lesson 20 my_lesson --title "My lesson"`.

The files are the skeletons of `docs/skeletons`, which build and pass their tests as they stand. What has to
be written is marked YOURS in them; `tests/test_skeletons.py` lists the marks that are left. Standard library
alone.
"""

import keyword
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from course_utils.cli.environment import SetupError
from course_utils.interactive.course_files import number_of
from course_utils.interactive.learner_folder import write_whole

ROOT = Path(__file__).resolve().parent.parent

SKELETONS = Path("docs", "skeletons")
MARK = "YOURS"
"""The word in each place of a skeleton where a lesson has to say something of its own."""


class WrongLesson(SetupError):
    """A lesson that cannot be made; the message is one sentence that says what would be right."""


@dataclass(frozen=True)
class Lesson:
    """A new lesson: its number, "20", its name as in 20_my_lesson.py, and its title."""

    number: str
    name: str
    title: str

    @property
    def stem(self) -> str:
        return f"{self.number}_{self.name}"

    def filled(self, skeleton: str) -> str:
        """The text of a skeleton with this lesson's number, name and title in place of its own."""
        text = skeleton.replace("my_lesson", self.name).replace("My lesson", self.title)
        return re.sub(r"(?<!\d)20(?!\d)", self.number, text)

    def files(self) -> dict[Path, str]:
        """The new files, by their place below the root, and the skeleton of each; "" for the folder's own
        line.
        """
        folder = Path("course_utils", "lessons", self.name)
        return {
            Path("notebooks", "src", f"{self.stem}.py"): "20_my_lesson.py",
            Path("solutions", "src", f"{self.stem}.py"): "20_my_exercises.py",
            folder / "__init__.py": "",
            folder / "checks.py": "20_my_checks.py",
            folder / "quiz.py": "20_my_quiz.py",
            folder / "quiz.toml": "20_my_quiz.toml",
            Path("tests", f"test_lesson_{self.number}.py"): "20_my_answers.py",
        }


def lesson(root: Path, number: str, name: str, title: str = "") -> Lesson:
    """The lesson that is asked for. Raises WrongLesson for a number, name or title that is taken or
    malformed.
    """
    sources = sorted(root.glob("notebooks/src/[0-9]*.py"))
    taken = {number_of(path): path.name for path in sources}
    free = [f"{one:02d}" for one in range(int(max(taken)) + 2) if f"{one:02d}" not in taken]
    if number.zfill(2) not in free:
        why = f"is taken by {taken[number.zfill(2)]}" if number.zfill(2) in taken else "is not free"
        raise WrongLesson(f"Number {number} {why}: free are {', '.join(free)}.")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise WrongLesson(
            f"{name!r} cannot name a lesson's folder: use small letters and underscores, as in my_lesson."
        )
    same = [name] if (root / "course_utils" / "lessons" / name).exists() else []
    same += [path.name for path in sources if path.stem.partition("_")[2] == name]
    if same:
        raise WrongLesson(f"The name {name!r} is taken by {same[0]}: choose another one.")
    title = title.strip() or name.replace("_", " ").capitalize()
    if set(title) & set('|[]"\\\n') or len(title) > 60:
        raise WrongLesson(
            f'The title {title!r} has to be one line of up to 60 characters without | [ ] " or \\.'
        )
    return Lesson(number.zfill(2), name, title)


def make(root: Path, new: Lesson) -> list[Path]:
    """Write the lesson's files and its places in README.md and instructor.md; returns them, below the root.

    Nothing is written if a file is there already or a place is not found: raises WrongLesson.
    """
    there = [str(path) for path in new.files() if (root / path).exists()]
    if there:
        raise WrongLesson(
            f"{there[0]} is there already, and nothing is overwritten: move it away or choose another name."
        )
    notes = Path("solutions", "instructor.md")
    part = new.filled(read(root / SKELETONS / "20_my_notes.txt"))
    changed = {
        Path("README.md"): with_row(read(root / "README.md"), new),
        notes: with_notes(read(root / notes), new, part),
    }
    for path, skeleton in new.files().items():
        text = read(root / SKELETONS / skeleton) if skeleton else '"""Lesson 20: its checks and quiz."""\n'
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with (root / path).open("x", encoding="utf-8") as file:
            file.write(new.filled(text))
    for path, text in changed.items():
        write_whole(root / path, text)
    return [*new.files(), *changed]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def with_row(readme: str, new: Lesson) -> str:
    """README with a row for the lesson: the row of the lesson before it, with other words in it."""
    rows = re.findall(r"^\|.*\]\(notebooks/(\d\d)_\w+\.ipynb\).*\|$", readme, re.MULTILINE)
    earlier = [number for number in rows if number < new.number]
    if not earlier:
        raise WrongLesson(
            "README.md has no table of lessons to add a row to: it needs rows that link notebooks/NN_name."
        )
    link = rf"\]\(notebooks/({max(earlier)}_\w+)\.ipynb\)"
    row = next(line for line in readme.splitlines() if line.startswith("|") and re.search(link, line))
    stem = re.findall(r"notebooks/(\w+)\.ipynb", row)[0]
    old = re.findall(r"\[(\d\d [^\]]+)\]", row)[0]
    cells = []
    for cell in row.strip("|").split("|"):
        if cell.strip().isdigit():
            cells.append(" 30 ")
        elif stem in cell:
            cells.append(cell.replace(stem, new.stem).replace(old, f"{new.number} {new.title}"))
        else:
            cells.append(f" {MARK}: what one finds out ")
    return readme.replace(row, f"{row}\n|{'|'.join(cells)}|")


def with_notes(notes: str, new: Lesson, part: str) -> str:
    """The instructor's notes with the lesson's part in its place, which is before the next lesson's."""
    numbers = re.findall(r"^## Lesson (\d\d) · ", notes, re.MULTILINE)
    if not numbers:
        raise WrongLesson(
            "solutions/instructor.md has no lesson's notes: it needs headings like `## Lesson 06 · Name`."
        )
    later = [number for number in numbers if number > new.number]
    if not later:
        return notes.rstrip("\n") + "\n" + part
    before, heading, after = notes.partition(f"## Lesson {min(later)} · ")
    return before.rstrip("\n") + "\n" + part + "\n" + heading + after


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
