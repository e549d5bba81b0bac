"""Commands for teachers: show demos, hand out the course, grade what comes back."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..interactive.course_files import ROOT
from .command import Command, later
from .learn import lab


def demos_options(parser: ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="try every demo here, in a fresh kernel")


def demos(chosen: Namespace) -> int:
    """Open the notebook of the demos in JupyterLab. With `--check` execute it; 1 if a demo fails."""
    if chosen.check:
        from ..authoring.demos import check

        return check(ROOT / "notebooks" / "demos.ipynb")
    return lab(Namespace(others=["--LabApp.default_url=/doc/tree/notebooks/demos.ipynb"]))


def folder_option(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a new folder for the results")


def grade_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="the learners' files: a folder, or a .zip as Moodle or Canvas makes it")
    add("--out", type=Path, default=Path("grades"), help="folder for grades.csv (default: grades)")
    add("--minutes", type=float, default=10.0, help="minutes that one notebook may take (default: 10)")
    add("--memory", type=float, default=12.0, help="GB of memory for each of its processes (default: 12)")
    add("--jobs", type=int, default=2, help="notebooks to grade at the same time (default: 2)")
    add("--unfenced", action="store_true", help="grade even where nothing keeps notebooks from your files")


def colab_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    folder_option(parser)
    add("--repository", metavar="URL", help="what git clones; without it, course.zip to upload")
    add("--branch", default="main", help="the branch to fetch (default: main)")


def links_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--repository", metavar="URL", required=True, help="the address that git clones (required)")
    add("--branch", default="main", help="its branch, without solutions (default: main)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--hub", metavar="URL", help="your JupyterHub; without it, links are for Binder")
    place.add_argument("--colab", action="store_true", help="links for Colab, to copies that `colab` writes")


release = later("teaching.release")
grade = later("teaching.grade")
nbgrader = later("teaching.other_platforms", "nbgrader")
colab = later("teaching.other_platforms", "colab")
links = later("teaching.other_platforms", "links")

COMMANDS = {
    "demos": Command("open the demos for a lecture (--check: try them all)", demos, demos_options, "lab"),
    "release": Command("copy the course without solutions: release FOLDER", release, folder_option),
    "grade": Command("grade a folder or a .zip of notebooks: grade FOLDER", grade, grade_options, "lab"),
    "nbgrader": Command("write the exercises as nbgrader's source: nbgrader FOLDER", nbgrader, folder_option),
    "colab": Command("copy the notebooks for Google Colab: colab FOLDER", colab, colab_options),
    "links": Command("print links to JupyterHub, Binder or Colab", links, links_options),
}
