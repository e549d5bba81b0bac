"""A GPU that is made up: what `record` would have left of it, and programs that take a task's place."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_utils.evidence.tasks import Task
from course_utils.measuring import recorded
from course_utils.measuring.files import append
from course_utils.measuring.recorded import read_folder
from course_utils.units import GB

DEVICE: dict[str, Any] = {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150 * GB, "driver": "580.1"}
H200: dict[str, Any] = {"device": DEVICE, "torch": "2.13.0+cu130", "free": 140 * GB}
"""What the recorder finds out about the GPU before its tasks."""


def line(task: str, kind: str, parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `record` would have left of a task on an H200, or on the GPU that `device` names."""
    content = {
        "task": task,
        "kind": kind,
        "status": "measured",
        "device": DEVICE | {"name": changes.pop("device", "NVIDIA H200")},
        "torch": "2.13.0+cu130",
        "date": "2026-11-21",
        "commit": "abc",
        "steps": 2,
        "detail": "",
        "parts": parts,
    }
    return content | changes


def ship(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any]) -> None:
    """Ship these lines, after those shipped before, and no others."""
    for content in lines:
        append(folder / "gpu.jsonl", content)
    monkeypatch.setattr(recorded, "_gpu_recordings", lambda: read_folder(folder))


def in_place_of_a_task(code: str) -> Callable[[Task, Path], list[str]]:
    """The command of a process that executes this code, which finds the path of its results in `results`."""
    send = "def send(**part):\n    open(results, 'a').write(json.dumps(part) + chr(10))\n"

    def command(task: Task, results: Path) -> list[str]:
        start = f"import json, os, sys, time\nresults, name = {json.dumps([str(results), task.name])}\n"
        return [sys.executable, "-c", f"{start}{send}{code}"]

    return command
