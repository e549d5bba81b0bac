"""A report on this machine: which parts of the course are live here, which simulated, and what is missing."""

import platform
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ..interactive.course_files import IS_CLONE
from ..pace import working
from ..units import format_bytes, html_table
from .environment import NAME, nvidia_driver

YES, NO, NOTE = "✓", "✗", "·"
INSTALL = "python3 -m course_utils lab" if IS_CLONE else f'pip install "{NAME}[lab]"'
PACKAGES = ("jupyterlab", "ipywidgets", "matplotlib", "numpy", "pytest", "nbval")


class Finding(NamedTuple):
    """One thing looked at: its name, `YES`, `NO`, or `NOTE` for neither, and what was found."""

    name: str
    verdict: str
    text: str


@dataclass(frozen=True)
class DoctorReport:
    """Findings about this machine, and from them, where each part of the course gets its numbers."""

    sections: dict[str, tuple[Finding, ...]]

    def __str__(self) -> str:
        width = max(len(finding.name) for part in self.sections.values() for finding in part)
        parts = []
        for title, part in self.sections.items():
            lines = [f"  {verdict} {name:<{width}}  {text}" for name, verdict, text in part]
            parts.append("\n".join([title, *lines]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        tables = []
        for title, part in self.sections.items():
            rows = [(verdict, name, text) for name, verdict, text in part]
            tables.append(html_table([("", title, ""), *rows], words=3))
        return "".join(tables)


def report() -> DoctorReport:
    """Look at this machine, from the Python that runs it. Takes as long as importing torch."""
    simulated = (False, "needs torch")
    with working("looking at this machine"):
        torch, problem = load_torch()
        if torch:
            from ..measuring.simulated import availability

            simulated = availability()
    gpus = gpu_findings(torch) if torch else ()
    has_gpu = any(finding.verdict == YES for finding in gpus)
    machine = (python_finding(), torch_finding(torch, problem), *gpus, packages_finding())
    course = course_findings(torch is not None, has_gpu, simulated)
    return DoctorReport({"This machine": machine, "The course on it": course})


# The machine


def load_torch() -> tuple[ModuleType | None, str]:
    """torch, or None and the reason why it cannot be loaded."""
    if util.find_spec("torch") is None:
        return None, f"not installed: `{INSTALL}` installs it"
    try:
        import torch
    except (ImportError, OSError) as problem:  # OSError: one of its libraries is missing on this system
        return None, f"installed, but does not load: {problem}"
    return torch, ""


def python_finding() -> Finding:
    own = Path(sys.prefix).name == ".venv" and (Path(sys.prefix) / "course-setup.json").exists()
    whose = "the course's own environment" if own else "not the environment that the course makes"
    machine = f"{platform.system()} {platform.machine()}"
    return Finding("Python", NOTE, f"{platform.python_version()} on {machine}, {whose}")


def torch_finding(torch: ModuleType | None, problem: str) -> Finding:
    if torch is None:
        return Finding("torch", NO, problem)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return Finding("torch", YES, f"{torch.__version__}, {build}")


def gpu_findings(torch: ModuleType) -> tuple[Finding, ...]:
    """One finding for each GPU that torch can use; one that says why there is none otherwise."""
    if torch.version.cuda and torch.cuda.is_available():
        return tuple(gpu_finding(torch, index) for index in range(torch.cuda.device_count()))
    return (Finding("GPU", NO, no_gpu(torch.version.cuda, nvidia_driver())),)


def no_gpu(cuda: str | None, driver: bool) -> str:
    """The reason that torch, built for that version of CUDA or for none, has no GPU, and what to do."""
    if driver and not cuda:
        remedy = f"set COURSE_TORCH=cuda and run `{INSTALL}`" if IS_CLONE else "install torch's CUDA build"
        return f"a driver, but torch is built for the CPU: {remedy}"
    if driver:
        return f"torch cannot use it: the driver is probably too old for CUDA {cuda}; update the driver"
    return "no NVIDIA GPU: nothing is measured live, everything else works"


def gpu_finding(torch: ModuleType, index: int) -> Finding:
    """Name, memory, compute capability and number formats of one GPU; memory as the driver has it now."""
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as problem:  # full, or held by another process alone
        return Finding(f"GPU {index}", NO, f"does not answer: {str(problem).splitlines()[0]}")
    major, minor = torch.cuda.get_device_capability(index)
    newer = major >= 8  # Ampere
    can = "bf16 and flash attention" if newer else "fp16 and efficient attention; no bf16, no flash attention"
    memory = f"{format_bytes(total, 'GiB', 1)}, {format_bytes(free, 'GiB', 1)} free"
    name = torch.cuda.get_device_name(index)
    return Finding(f"GPU {index}", YES, f"{name}, {memory}, compute capability {major}.{minor}: {can}")


def packages_finding() -> Finding:
    present = {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)}
    absent = [name for name in PACKAGES if name not in present]
    text = ", ".join(f"{name} {version}" for name, version in present.items()) or "none"
    if absent:
        text += f"; not here: {', '.join(absent)}"
    return Finding("packages", NOTE, text)


# The course


def course_findings(torch: bool, live: bool, simulated: tuple[bool, str]) -> tuple[Finding, ...]:
    """The source of each part's numbers on a machine with that much of what it needs."""
    estimates = Finding("estimates", YES, "computed from formulas, for any model and GPU")
    simulates, words = simulated
    of_simulated = Finding("simulated GPU", YES if simulates else NO, words)
    if torch:
        traced = Finding("traced on the CPU", YES, "small models, really trained")
    else:
        traced = Finding("traced on the CPU", NO, "needs torch")
    if live:
        on_gpu = Finding("live on a GPU", YES, "every run that fits its memory")
    else:
        on_gpu = Finding("live on a GPU", NO, "no GPU that torch can use")
    return estimates, of_simulated, traced, on_gpu, recorded_finding()


def recorded_finding() -> Finding:
    """The number of measurements that come with the course, and their devices."""
    from ..measuring.recorded import load, newest

    try:
        simulated = len(load())
        measured = newest("run")
    except (OSError, EOFError, ValueError) as problem:  # absent, cut short, or of another version
        return Finding("recorded", NO, f"cannot be read: {problem}")
    gpus = ", ".join(sorted({recording.device for recording in measured}))
    real = f"{len(measured)} on {gpus}" if gpus else "none on a real GPU yet"
    return Finding("recorded", YES, f"{simulated} runs on a simulated GPU, {real}")
