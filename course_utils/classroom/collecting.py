"""Whose notebooks are these? Folders and archives of notebooks as a class, Moodle, Canvas or nbgrader leave them.

| layout | example | the learner |
|---|---|---|
| a folder for each learner, nbgrader's too | `ada/06_recomputation.ipynb` | the first folder that no lesson names |
| Moodle, "download all submissions" | `Ada Lovelace_271828_assignsubmission_file_/06.ipynb` | up to the number |
| Canvas, "download submissions" | `lovelaceada_LATE_1815_1852_06_recomputation-1.ipynb` | up to the first number |
| side by side | `ada.ipynb` | the file's name |

Each of them may be an archive (.zip), and a learner's folder may hold one.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath

MOODLE = re.compile(r"(?P<learner>.+?)_\d+_assignsubmission_\w+?_?")
CANVAS = re.compile(r"(?P<learner>[^\W_]+)_(?:LATE_)?\d+_\d+_.+")
LESSON = re.compile(r"(lesson|assignment)?[ _-]*\d\d?([ _-].*)?", re.IGNORECASE)
"""A folder that is called after a lesson is nobody's."""

LARGEST = 50_000_000
"""Bytes of a notebook: one that is larger is not read."""


@dataclass(frozen=True)
class Submission:
    """One notebook: its learner, what it was called where it was handed in, where it lies, its time in seconds, and
    why it cannot be read, if so.
    """

    learner: str
    file: str
    path: Path
    time: float
    problem: str = ""


def collected(place: Path, scratch: Path) -> list[Submission]:
    """Every notebook in a folder or an archive, by name; archives are unpacked below `scratch`.

    Raises ValueError if `place` is neither, or if no notebook is in it.
    """
    if not place.is_dir() and not zipfile.is_zipfile(place):
        raise ValueError(f"{place} is no folder and no .zip: name what holds the learners' notebooks")
    if place.is_dir():
        found = list(_in_folder(place, scratch))
    else:
        found = list(_in_archive(place, PurePosixPath(), scratch / "0"))
    if not found:
        raise ValueError(f"there is no notebook in {place}")
    return _named(sorted(found, key=lambda one: one.file))


def _named(found: Sequence[Submission]) -> list[Submission]:
    """The submissions with their learners, looked for below a folder that holds all of them and is no learner's."""
    parts = [PurePosixPath(one.file).parts for one in found]
    around = len({one[0] for one in parts}) == 1 and all(len(one) > 2 for one in parts)
    below = around and len({one[1] for one in parts if not LESSON.fullmatch(one[1])}) > 1
    names = [PurePosixPath(*one[1:] if below else one) for one in parts]
    return [replace(one, learner=learner_of(name)) for one, name in zip(found, names, strict=True)]


def _in_folder(folder: Path, scratch: Path) -> Iterator[Submission]:
    for count, path in enumerate(sorted(folder.rglob("*"))):
        name = PurePosixPath(path.relative_to(folder).as_posix())
        if _is_notebook(name) and path.is_file():
            yield Submission("", _printable(name), path, path.stat().st_mtime, _too_large(path.stat().st_size))
        elif name.suffix == ".zip" and zipfile.is_zipfile(path):
            yield from _in_archive(path, name.with_suffix(""), scratch / str(count))


def _in_archive(archive: Path, inside: PurePosixPath, scratch: Path) -> Iterator[Submission]:
    """The notebooks of an archive, unpacked under numbers: a name in it decides nothing about where a file goes."""
    scratch.mkdir(parents=True)
    with zipfile.ZipFile(archive) as opened:
        for count, entry in enumerate(opened.infolist()):
            name = inside / entry.filename.replace("\\", "/").lstrip("/")
            if entry.is_dir() or not _is_notebook(name):
                continue
            path = scratch / f"{count}.ipynb"
            problem = _unpack(opened, entry, path)
            yield Submission("", _printable(name), path, _time(entry), problem)


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> str:
    """Write an entry to `path`; returns why that could not be, in words, or ""."""
    if problem := _too_large(entry.file_size):
        return problem
    try:
        path.write_bytes(archive.read(entry))
    except (RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:  # a password, a broken entry
        return f"cannot be read: {error}"
    return ""


def _too_large(size: int) -> str:
    return f"cannot be read: it is larger than {LARGEST // 10**6} MB" if size > LARGEST else ""


def _printable(name: PurePosixPath) -> str:
    """A name that can be written in UTF-8, whatever bytes its file system made it of."""
    return str(name).encode("utf-8", "replace").decode("utf-8")


def _time(entry: zipfile.ZipInfo) -> float:
    """When the entry was written, in seconds; 0 for one that does not say: some programs put zeros for a date."""
    year, month, day, hour, minute, second = entry.date_time
    return datetime(year, month, day, hour, minute, second).timestamp() if month and day else 0.0


def _is_notebook(name: PurePosixPath) -> bool:
    """A notebook that somebody wrote, no checkpoint of JupyterLab's and no file that macOS adds to archives."""
    return name.suffix == ".ipynb" and not {".ipynb_checkpoints", "__MACOSX"} & set(name.parts)


def learner_of(name: PurePosixPath) -> str:
    """Who handed in the file of this name, by the layouts of this module."""
    *folders, _ = name.parts
    for folder in folders:
        if moodle := MOODLE.fullmatch(folder):
            return moodle["learner"]
    theirs = [folder for folder in folders if not LESSON.fullmatch(folder)]
    canvas = CANVAS.fullmatch(name.stem)
    return theirs[0] if theirs else canvas["learner"] if canvas else name.stem
