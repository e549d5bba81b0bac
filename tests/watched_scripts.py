"""Training scripts in the style of well-known libraries, run as they are under `watch`: one row each.

`python tests/watched_scripts.py` prints the table: three minutes, with the libraries. COURSE_SCRIPTS_PYTHON
names the Python that has them.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run alone

from course_utils.allocator.replay import replay  # noqa: E402
from course_utils.evidence.tables import Table  # noqa: E402
from course_utils.measuring.measurement_file import read_measurement  # noqa: E402
from course_utils.units import GB  # noqa: E402

SCRIPTS = ROOT / "tests" / "scripts"
MODELS = (
    "gpt2",
    "llama",
    "qwen3",
    "mistral",
    "phi3",
    "gpt-neox",
    "opt",
    "gemma2",
    "bloom",
    "mamba 32",
    "t5",
    "vit",
    "whisper",
    "mixtral",
)
"""Arguments of hugging_face.py: a model, and tokens if not 512. Mamba's reference code is a loop over tokens.
"""

LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "timm", "peft", "diffusers", "torchvision")
VERSIONS = """import importlib.metadata as m, sys
found = {d.metadata["Name"].lower(): d.version for d in m.distributions()}
print(", ".join(f"{name} {found.get(name, '(not installed)')}" for name in sys.argv[1:]))"""
PYTHON = "COURSE_SCRIPTS_PYTHON"
LIMIT = 180  # seconds for one script


def scripts_table(report: Callable[[str], None]) -> Table:
    """What `watch` says of each script.

    The Python that has the libraries is named by COURSE_SCRIPTS_PYTHON; without it, this one runs them.
    """
    python = os.environ.get(PYTHON, sys.executable)
    wanted = [(path, "") for path in sorted(SCRIPTS.glob("*.py")) if path.stem != "hugging_face"]
    wanted += [(SCRIPTS / "hugging_face.py", model) for model in MODELS]
    rows = []
    for path, arguments in wanted:
        report(f"{path.name} {arguments}")
        rows.append(watched(python, path, arguments))
    asked = [python, "-c", VERSIONS, *LIBRARIES]
    versions = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    headings = ("script", "tensors, GB", "allocated, GB", "reserved, GB", "seconds", "what `watch` said")
    notes = (f"Libraries: {versions}. Another Python that has them is named by {PYTHON}.",)
    return Table(
        "scripts", "Training scripts as they are, two steps each", headings, tuple(rows), notes, "simulated"
    )


def watched(python: str, path: Path, arguments: str = "") -> tuple[str, str, str, str, float, str]:
    """A script's row: three peaks and the seconds of the whole command, or the sentence that says why not."""
    name = f"{path.name} {arguments}".strip()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "measured.json.gz"
        command = [python, "-m", "course_utils", "watch", "--save", str(kept), str(path), *arguments.split()]
        began = time.monotonic()
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            said = f"stopped: it had not taken two steps after {LIMIT} seconds"
            return name, "-", "-", "-", float(LIMIT), said
        seconds = time.monotonic() - began
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if line.startswith(path.name)] or [
                ended.stderr.strip()
            ]
            return name, "-", "-", "-", seconds, said[-1]
        measured = read_measurement(kept)
    replayed = replay(measured)
    tensors, allocated, reserved = (
        f"{size / GB:.3f}" for size in (measured.peak, replayed.peak_allocated, replayed.peak_reserved)
    )
    return name, tensors, allocated, reserved, seconds, measured.provenance.note


if __name__ == "__main__":
    print(scripts_table(lambda name: print(name, file=sys.stderr)).markdown())
