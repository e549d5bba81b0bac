"""Find each notebook's learner, in folders and archives as a class, Moodle, Canvas or nbgrader leave them.

docs/classroom.md has a table of these layouts. Each may be an archive (.zip), and a learner's folder may hold
one. An archive in a learner's archive is not opened.
"""

import os
import re
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..units import MB
from .grading_results import printable

MOODLE = re.compile(r"(?P<learner>.+?)_\d+_assignsubmission_\w+?_?")
CANVAS = re.compile(r"(?P<learner>[^\W_]+)_(?:LATE_)?\d+_\d+_.+")
LESSON = re.compile(r"(lesson|assignment)?[ _-]*\d\d?([ _-].*)?", re.IGNORECASE)
"""A folder that is called after a lesson is nobody's."""

LARGEST = 50 * MB  # of a notebook, or of a learner's archive: one that is larger is not read
MOST_FILES = 10_000
MOST_BYTES = 200 * MB
"""Limits of an archive that one learner made: the files that it may list, and the bytes unpacked from it."""

NOBODYS = frozenset({".ipynb_checkpoints", "__MACOSX"})
MOST_NOTEBOOKS = 60
BLOCK = 4096


class Submission(NamedTuple):
    """One notebook that was handed in.

    `learner` is a path to find the learner by, if not `file`, until all notebooks are found. `file` is its
    name where it was handed in, `path` where it lies, `time` its time in seconds, and `problem` why it cannot
    be read, if so.
    """

    learner: str
    file: str
    path: Path
    time: float
    problem: str = ""


def collected(place: Path, scratch: Path) -> list[Submission]:
    """Every notebook in a folder or an archive, by name; archives are unpacked below `scratch`.

    What cannot be read has a `problem`. ValueError if `place` is no folder nor archive that opens, or has no
    notebook.
    """
    if place.is_dir():
        found = list(_in_folder(place, scratch))
    elif not zipfile.is_zipfile(place):
        raise ValueError(f"{place} is neither a folder nor a .zip: give one that holds notebooks")
    else:
        try:
            found = list(_in_archive(place, PurePosixPath(), scratch / "0", False, levels=1))
        except Exception as error:  # of any kind: zipfile and its decompressors promise none
            problem = problem_of(error)
            raise ValueError(f"{place} cannot be unpacked: {problem}. Download it again.") from error
    if not found:
        raise ValueError(f"there is no notebook in {place}")
    return _few_each(_named(sorted(found, key=lambda one: one.file)))


def _named(found: Sequence[Submission]) -> list[Submission]:
    """The submissions with their learners, below a folder that holds all and is no learner's, if any."""
    parts = [PurePosixPath(one.learner or one.file).parts for one in found]
    if _is_around(parts):
        parts = [one[1:] for one in parts]
    names = [PurePosixPath(*one) for one in parts]
    return [one._replace(learner=learner_of(name)) for one, name in zip(found, names, strict=True)]


def _is_around(parts: Sequence[tuple[str, ...]]) -> bool:
    """Tell whether the first folder holds the learners': it is the only one, with several learners below."""
    if len({one[0] for one in parts}) != 1 or not all(len(one) > 2 for one in parts):
        return False
    learners = {one[1] for one in parts if not LESSON.fullmatch(one[1])}
    return len(learners) > 1


def _few_each(found: Sequence[Submission]) -> list[Submission]:
    """The same, but only the newest of a learner with too many are graded: each takes its minutes."""
    kept: list[Submission] = []
    counted: Counter[str] = Counter()
    for one in sorted(found, key=lambda one: (one.time, one.file), reverse=True):
        counted[one.learner] += 1
        if not one.problem and counted[one.learner] > MOST_NOTEBOOKS:
            one = one._replace(problem=f"not graded: {MOST_NOTEBOOKS} newer ones are")
        kept.append(one)
    return sorted(kept, key=lambda one: one.file)


def _in_folder(folder: Path, scratch: Path) -> Iterator[Submission]:
    unread: list[OSError] = []
    walked = os.walk(folder, onerror=unread.append)
    # folders, too: one that is called like a notebook, or a link to one, is refused below
    paths = sorted(Path(place, name) for place, *names in walked for name in chain(*names))
    for count, path in enumerate(paths):
        name = PurePosixPath(path.relative_to(folder).as_posix())
        kind = _kind(name)
        if not kind:
            continue
        try:
            held = path.lstat()
            _refuse(held.st_mode, held.st_size if kind == ".ipynb" else 0)
        except (OSError, ValueError) as error:
            yield _unread(name, path, error)
        else:
            yield from _found(name, path, held.st_mtime, scratch / str(count), levels=2)
    for error in unread:
        name = PurePosixPath(Path(error.filename).relative_to(folder).as_posix())
        yield _unread(name, folder, error)._replace(learner=f"{name}/x")


def _unread(name: PurePosixPath, path: Path, error: Exception, time: float = 0.0) -> Submission:
    return Submission("", printable(str(name)), path, time, f"cannot be read: {problem_of(error)}")


def _refuse(mode: int, size: int) -> None:
    """Raise ValueError for what is not read: a link may lead to solutions or to another learner's work."""
    if stat.S_ISLNK(mode):
        raise ValueError("it is a link")
    if not stat.S_ISREG(mode):
        raise ValueError("it is not a file")
    if size > LARGEST:
        raise ValueError(f"it is larger than {LARGEST // MB} MB")


def _found(name: PurePosixPath, path: Path, time: float, scratch: Path, levels: int) -> Iterator[Submission]:
    """A notebook, or those of an archive that was handed in, or of a lesson's whole download.

    All in an archive in a learner's folder is that learner's, whatever the folders in it are called.
    """
    if _kind(name) == ".ipynb":
        yield Submission("", printable(str(name)), path, time)
        return
    inside = name.with_suffix("")
    of_canvas = CANVAS.fullmatch(name.stem)
    is_learners = bool(of_canvas) or any(not LESSON.fullmatch(folder) for folder in name.parts[:-1])
    try:
        if not levels:
            raise ValueError("it is an archive in an archive")
        _refuse(stat.S_IFREG, path.stat().st_size if is_learners else 0)
        found = list(_in_archive(path, inside, scratch, is_learners, 0 if is_learners else levels - 1))
        if not found:
            raise ValueError("there is no notebook in it")
    except Exception as error:  # of any kind: zipfile and its decompressors promise none
        found = [_unread(name, path, error)]
    if is_learners:
        theirs = name if of_canvas else inside / "x"
        found = [one._replace(learner=str(theirs)) for one in found]
    yield from found


def _in_archive(
    archive: Path, inside: PurePosixPath, scratch: Path, is_learners: bool, levels: int
) -> Iterator[Submission]:
    """The notebooks of an archive, unpacked under numbers: no name in it decides where a file goes.

    Archives in it are opened if `levels` is not 0. May raise anything if the archive's list of files is
    damaged.
    """
    scratch.mkdir(parents=True)
    left = shutil.disk_usage(scratch).free // 2
    with zipfile.ZipFile(archive) as opened:
        if is_learners and len(opened.infolist()) > MOST_FILES:
            raise ValueError(f"it holds more than {MOST_FILES} files")
        if is_learners:
            left = min(left, MOST_BYTES)
        for count, entry in enumerate(opened.infolist()):
            name = inside / entry.filename.replace("\\", "/").lstrip("/")
            if entry.is_dir() or not _kind(name):
                continue
            path = scratch / f"{count}{name.suffix}"
            try:
                _unpack(opened, entry, path, left)
            except Exception as error:  # of any kind, as above: a password, a broken entry
                yield _unread(name, path, error, _time(entry))
            else:
                yield from _found(name, path, _time(entry), scratch / str(count), levels)
            if path.exists():
                left -= path.stat().st_size


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, left: int) -> None:
    """Write an entry to `path`, of at most `left` bytes."""
    mode = entry.external_attr >> 16  # 0 from programs that know no modes
    _refuse(mode if stat.S_IFMT(mode) else stat.S_IFREG, entry.file_size)
    if entry.file_size > left:
        raise ValueError("the notebooks in its archive are too large in total")
    with archive.open(entry) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK)  # in small pieces: bz2 makes 80 MB of four kilobytes


def problem_of(error: Exception) -> str:
    """The remark on an error while a submission is read. Decompressors raise errors of many kinds."""
    if isinstance(error, RuntimeError) and "password" in str(error):
        return "it is protected by a password"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error) is ValueError:  # a refusal in our own words; its subclasses are of damaged files
        return printable(str(error))
    return printable(f"it is damaged ({type(error).__name__}: {error})")


def _time(entry: zipfile.ZipInfo) -> float:
    """The time at which the entry was written, in seconds; 0 if it names none, or a day that there is not."""
    try:
        return datetime(*entry.date_time).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _kind(name: PurePosixPath) -> str:
    """ ".ipynb" or ".zip" for a file that was handed in; "" for others, checkpoints, and what macOS adds."""
    suffix = name.suffix.lower()
    if suffix not in (".ipynb", ".zip") or NOBODYS & set(name.parts):
        return ""
    return suffix


def learner_of(name: PurePosixPath) -> str:
    """The learner who handed in the file of this name, by the layouts of this module."""
    *folders, _ = name.parts
    for folder in folders:
        if moodle := MOODLE.fullmatch(folder):
            return printable(moodle["learner"])
    for folder in folders:
        if not LESSON.fullmatch(folder):
            return printable(folder)
    if canvas := CANVAS.fullmatch(name.stem):
        return printable(canvas["learner"])
    return printable(name.stem)
