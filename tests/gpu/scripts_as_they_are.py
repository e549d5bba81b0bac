"""Training scripts as they are: what `watch` predicts, and what this GPU counts. One JSON line per script, as
it comes.

    python tests/gpu/scripts_as_they_are.py OUT.jsonl [HISTORIES_FOLDER] [--only TEXT] [--seconds 240]
    python tests/gpu/scripts_as_they_are.py tests/gpu/recorded/predictions.jsonl --predict-only --jobs 1

The second command predicts again what was counted already. A script is predicted before the GPU executes it.
Both run in processes of their own: predictions on the CPU with no GPU visible, counts next to each other as
far as the GPU's memory allows. Each process has its own counters.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

from room import Room

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "timm", "peft", "diffusers", "torchvision")

HUGGING_FACE = {  # the model, and the GB that it needs for weights, gradients and states
    "llama": 78, "phi3": 45, "gemma2": 35, "bloom": 10, "opt": 4, "gpt2": 4, "mamba 32": 4, "t5": 4, "vit": 3,
    "whisper": 3,
}  # fmt: skip
NEEDS = {
    "litgpt": 25,
    "peft_lora": 15,
    "unet": 25,
    "diffusers_text_to_image": 30,
    "nanogpt": 15,
    "detection": 15,
}
COMMON = 8  # GB for a script that is not named above

PREDICT = """
import json, sys
from course_utils.gpus import gpu
from course_utils.watching.report import report
from course_utils.watching.script import watch_script
card, script, *arguments = sys.argv[1:]
measured = watch_script(script, arguments, card=card)
found = report(measured, gpu(card))
found = {"tensors": measured.peak, "allocated": found.allocated, "reserved": found.reserved,
         "phase": measured.peak_phase, "note": measured.provenance.note,
         "not_predicted": dict(measured.not_predicted)}
sys.__stdout__.write(json.dumps(found) + "\\n"); sys.__stdout__.flush()
import os; os._exit(0)
"""


def cases() -> list[tuple[Path, list[str], dict[str, str], float]]:
    """Script, arguments, environment, GB; the large ones first, so that none of them is the last to start."""
    found = [(path, [], {}, NEEDS.get(path.stem, COMMON)) for path in sorted(SCRIPTS.glob("*.py"))]
    found = [case for case in found if case[0].stem != "hugging_face" and "ranks_" not in case[0].stem]
    found += [(SCRIPTS / "nanogpt.py", [], {"TORCHDYNAMO_DISABLE": "1"}, NEEDS["nanogpt"])]
    found += [(SCRIPTS / "hugging_face.py", name.split(), {}, need) for name, need in HUGGING_FACE.items()]
    return sorted(found, key=lambda case: -case[3])


def last_json(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def executed(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[list[dict], str, float]:
    """The JSON lines that a command prints, why it failed ("" if it did not), and its seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment}
        try:
            done = subprocess.run(
                command, cwd=folder, env=told, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode(errors="replace")
            return last_json(printed), f"stopped after {seconds:.0f} s", time.monotonic() - began
    rows = last_json(done.stdout)
    return rows, "" if rows and not done.returncode else reason(done), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("histories", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--gigabytes", type=float, default=70, help="of the GPU, for all counts together")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--card", default="H200-141GB", help="the card that is predicted")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    about = {"date": date.today().isoformat(), "versions": versions(), "card": options.card}
    about |= device(options.predict_only)
    if options.histories:
        options.histories.mkdir(parents=True, exist_ok=True)
    room = Room(options.gigabytes)
    writing = Lock()

    def one(case: tuple[Path, list[str], dict[str, str], float]) -> None:
        path, arguments, environment, needed = case
        name = " ".join([path.name, *arguments, *(f"{key}={value}" for key, value in environment.items())])
        row: dict[str, Any] = {
            "script": name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            **about,
        }
        hidden = {"CUDA_VISIBLE_DEVICES": "", **environment}
        left = end - time.monotonic()
        found, failed, took = executed(
            [sys.executable, "-c", PREDICT, options.card, str(path), *arguments], hidden, min(300, left)
        )
        row |= {
            "predicted": found[-1] if found else None,
            "not_predicted": failed,
            "predicted_in": round(took, 1),
        }
        if not options.predict_only:
            needed = room.take(needed)
            history = "-"
            if options.histories:
                history = str(
                    options.histories.resolve() / (name.replace(" ", "_").replace("=", "_") + ".json.xz")
                )
            counter = [
                sys.executable,
                str(Path(__file__).with_name("count_script.py")),
                history,
                str(path),
                *arguments,
            ]
            left = max(5.0, end - time.monotonic())
            rows, failed, took = executed(counter, environment, min(300, left))
            room.give(needed)
            row |= {"steps": rows, "not_counted": failed, "counted_in": round(took, 1)}
        with writing, options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, (row["predicted"] or {}).get("allocated"), failed or "ok", flush=True)

    chosen = [case for case in cases() if options.only in " ".join([case[0].name, *case[1]])]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = [pool.submit(one, case) for case in chosen]
    for each in done:
        each.result()


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device(absent: bool) -> dict[str, object]:
    if absent:
        return {}
    ask = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, sep='|')"
    name, memory = (
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip().split("|")
    )
    return {"device": name, "memory": int(memory)}


if __name__ == "__main__":
    main()
