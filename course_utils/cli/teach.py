"""Commands for teachers: rehearse demos, hand out the course, grade what comes back."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..classroom.graded_process import Limits
from ..units import GB, MB
from .command import Command, later


def rehearse_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", default="", help="only estimate, for this GPU; without it, run on this machine"
    )


def rehearse(chosen: Namespace) -> int:
    """Run every demo, or estimate it with `--gpu`; 1 if anything differs from what the demos say."""
    from ..demos import rehearse as rehearse_demos

    rehearsal = rehearse_demos(gpu_name=chosen.gpu, say=print)
    return 1 if rehearsal.problems else 0


def folder_option(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a new folder for the results")


def grade_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    most = Limits()
    add(
        "folder",
        type=Path,
        help="holds the learners' notebooks: a folder, or a .zip as Moodle or Canvas makes it",
    )
    add("--out", type=Path, default=Path("grades"), help="folder for grades.csv and class.html")
    add(
        "--minutes",
        type=float,
        default=most.seconds / 60,
        help="minutes of processor time that one notebook may use",
    )
    add("--memory", type=float, default=most.memory / GB, help="GB of memory that one notebook may allocate")
    add("--disk", type=float, default=most.disk / MB, help="MB of files that one notebook may write")
    add("--jobs", type=int, default=2, help="notebooks to grade at the same time")


def colab_options(parser: ArgumentParser) -> None:
    folder_option(parser)
    parser.add_argument(
        "--repository", metavar="URL", help="what git clones; without it, course.zip to upload"
    )
    parser.add_argument("--branch", default="main", help="the branch to fetch")


def links_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repository", metavar="URL", required=True, help="required, the address that git clones"
    )
    parser.add_argument("--branch", default="main", help="its branch, without solutions")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--hub", metavar="URL", help="address of your JupyterHub; without it, links are for Binder"
    )
    place.add_argument(
        "--colab", action="store_true", help="links for Colab, to the copies that `colab` writes"
    )


release = later("classroom.release")
grade = later("classroom.grading")
nbgrader = later("classroom.other_platforms", "nbgrader")
colab = later("classroom.other_platforms", "colab")
links = later("classroom.other_platforms", "links")

COMMANDS = {
    "rehearse": Command(
        "try all demos before class (--gpu NAME: by estimate)", rehearse_options, rehearse, "torch"
    ),
    "release": Command("copy the course without solutions: release FOLDER", folder_option, release),
    "grade": Command(
        "grade a folder or a .zip of notebooks: grade FOLDER --out grades", grade_options, grade, "lab"
    ),
    "nbgrader": Command("write the exercises as nbgrader's source: nbgrader FOLDER", folder_option, nbgrader),
    "colab": Command(
        "copy the notebooks for Google Colab: colab FOLDER [--repository URL]", colab_options, colab
    ),
    "links": Command(
        "print links to JupyterHub, Binder or Colab: links --repository URL", links_options, links
    ),
}
