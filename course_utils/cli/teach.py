"""Commands for teachers: rehearse demos, hand out the course, grade what comes back."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from ..interactive.command_line import Parser
from .command import HERE, Command


def read_rehearse(arguments: Sequence[str]) -> Namespace:
    parser = Parser("rehearse", "Run every demo as it will run on this machine.", HERE)
    parser.add_argument("--gpu", default="", help="run nothing: estimate what would happen on this GPU")
    return parser.parse_args(arguments)


def rehearse(options: Namespace) -> int:
    """Run every demo, or estimate it with `--gpu`; 1 if anything differs from what the demos say."""
    from ..demos import rehearse as rehearse_demos

    return 1 if rehearse_demos(gpu_name=options.gpu, say=print).problems else 0


def passed_on(summary: str, module: str, purpose: str = "") -> Command:
    """The command that another module's `main` reads and runs, or the function named after a colon."""

    def run(arguments: list[str]) -> int:
        name, _, function = module.partition(":")
        return getattr(import_module(f"course_utils.{name}"), function or "main")(arguments)

    def read(arguments: list[str]) -> list[str]:
        words = [word for word in arguments if word != "--here"]
        if {"-h", "--help"} & set(words):
            with suppress(ImportError):  # a module that itself needs the environment
                run(words)
        return words

    return Command(summary, read, run, purpose)


COMMANDS = {
    "rehearse": Command("run every demo beforehand (--gpu NAME: by estimate)", read_rehearse, rehearse, "lab"),
    "release": passed_on("copy the course without solutions: release FOLDER", "classroom.release"),
    "grade": passed_on("grade a folder or a .zip of notebooks: grade FOLDER --out grades", "classroom.grading", "lab"),
    "nbgrader": passed_on("write the exercises as nbgrader's source: nbgrader FOLDER", "classroom.elsewhere:nbgrader"),
    "colab": passed_on(
        "copy the notebooks for Google Colab: colab FOLDER [--repository URL]", "classroom.elsewhere:colab"
    ),
    "links": passed_on(
        "print links that open the lessons on JupyterHub, Binder, Colab: links --repository URL",
        "classroom.elsewhere:links",
    ),
    "slides": passed_on(
        "make slides of lessons, with speaker notes: slides 05 --out slides", "authoring.slides", "test"
    ),
}
