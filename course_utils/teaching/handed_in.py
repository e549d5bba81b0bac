"""The files that were handed in, in a folder or a .zip, and the learner whom each name suggests.

Every file is a submission of its own, known by its path: learners may share a name, and an archive may hold
any name. So a name decides nothing but the guess of a learner.
"""

import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, NoReturn
from unicodedata import category

from ..units import MB

MOODLE = re.compile(r"(?P<learner>.+?)_\d+_assignsubmission_\w+?_?")
CANVAS = re.compile(r"(?P<learner>[^\W_]+)_(?:LATE_)?\d+_\d+_.+")
LESSON = re.compile(r"(lesson|assignment)?[ _-]*\d\d?([ _-].*)?", re.IGNORECASE)
"""A folder or file that is called after a lesson is nobody's."""

LARGEST = 20 * MB
MOST_UNPACKED = 2_000 * MB
MOST_FILES = 10_000


class Submission(NamedTuple):
    """One file: its path as it was handed in, where it lies, and why it is not read ("" if it can be)."""

    file: str
    path: Path
    problem: str


def handed_in(place: Path, scratch: Path) -> list[Submission]:
    """Every file in a folder or a .zip, by name; an archive's notebooks are unpacked in `scratch`.

    Raises ValueError if `place` is neither, or has no file, or far too many; OSError if it cannot be read.
    """
    if place.is_dir():
        found = list(_in_folder(place))
    elif zipfile.is_zipfile(place):
        try:
            found = list(_in_archive(place, scratch))
        except (zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise ValueError(f"{place} cannot be unpacked ({error}): download it again") from error
    else:
        raise ValueError(f"{place} is neither a folder nor a .zip: give one that holds notebooks")
    if not 0 < len(found) <= MOST_FILES:
        raise ValueError(f"{place} has {len(found):,} files: give one with 1 to {MOST_FILES:,} submissions")
    return sorted(found, key=lambda one: one.file)


def _in_folder(folder: Path) -> Iterator[Submission]:
    def unread(error: OSError) -> NoReturn:
        raise error

    for place, folders, names in os.walk(folder, onerror=unread):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if not _is_nobodys(name)]
        for path in [Path(place, name) for name in (*names, *links) if not _is_nobodys(name)]:
            file = path.relative_to(folder).as_posix()
            held = path.lstat()
            yield Submission(file, path, _problem(file, held.st_mode, held.st_size))


def _in_archive(archive: Path, scratch: Path) -> Iterator[Submission]:
    """Unpack notebooks under numbers, so that no name in the archive decides where a file goes."""
    left = min(MOST_UNPACKED, shutil.disk_usage(scratch).free // 2)
    with zipfile.ZipFile(archive) as opened:
        for number, entry in enumerate(opened.infolist()[: MOST_FILES + 1]):
            file = entry.filename.replace("\\", "/")
            parts = file.split("/")
            path = scratch / str(number)
            problem = _problem(file, entry.external_attr >> 16, entry.file_size)
            if parts[0] == "" or parts[0].endswith(":") or ".." in parts:
                problem = "not read: its name leads out of the archive"
            elif entry.is_dir() or any(map(_is_nobodys, parts)):
                continue
            elif entry.file_size > left:
                problem = problem or "not read: there is no room to unpack it"
            elif not problem:
                problem = _unpacked(opened, entry, path)
                left -= entry.file_size
            yield Submission(file, path, problem)


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> str:
    """Write an entry to `path`; returns what is wrong with it. zipfile's decompressors raise anything."""
    try:
        with archive.open(entry) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    except Exception as error:
        return f"cannot be unpacked: {error}"
    return ""


def _is_nobodys(name: str) -> bool:
    """True for hidden files, checkpoints, and what macOS adds."""
    return name.startswith(".") or name == "__MACOSX"


def _problem(file: str, mode: int, size: int) -> str:
    """The reason why a file is not read. A link may lead to solutions or to another learner's work."""
    kind = stat.S_IFMT(mode) or stat.S_IFREG  # 0 in archives of programs that know no modes
    if kind != stat.S_IFREG:
        return "not read: it is a link" if kind == stat.S_IFLNK else "not read: it is not a file"
    suffix = PurePosixPath(file).suffix.lower()
    if suffix == ".zip":
        return "not read: unpack this archive into a folder, and grade again"
    if suffix != ".ipynb":
        return "is not a notebook: its name does not end in .ipynb"
    return "" if size <= LARGEST else f"not read: it is larger than {LARGEST // MB} MB"


def learners(files: Sequence[str]) -> list[str]:
    """The learner whom each path suggests, by the layouts in docs/classroom.md; "" for none."""
    paths = [PurePosixPath(file) for file in files]
    around = 0
    if len(paths) > 1:
        around = len(PurePosixPath(os.path.commonpath([path.parent for path in paths])).parts)
    return [_learner(path.parts[around:]) for path in paths]


def _learner(parts: tuple[str, ...]) -> str:
    *folders, name = parts
    stem = PurePosixPath(name).stem
    layouts = [*map(MOODLE.fullmatch, folders), CANVAS.fullmatch(stem)]
    named = [found["learner"] for found in layouts if found]
    others = [name for name in (*folders, stem) if not LESSON.fullmatch(name)]
    return printable(next(iter([*named, *others]), ""))


def printable(text: str) -> str:
    """Text as one line for any file and terminal: no control characters, no lone surrogates, not too long."""
    cleaned = "".join(" " if category(letter) in ("Cc", "Cs", "Zl", "Zp") else letter for letter in text)
    return " ".join(cleaned.split())[:300]
