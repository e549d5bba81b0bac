"""Restore torch's default settings around each check. Import this only where torch is imported anyway."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """One setting: its name, torch's default, and how to read and set it."""

    name: str
    default: Any
    read: Callable[[], Any]
    set: Callable[[Any], object]


def restore_defaults() -> list[str]:
    """Set all that is not torch's default; returns what was restored: ["default dtype was torch.bfloat16"].

    Where a `with` around the check holds a setting, it stays, and is not among them.
    """
    restored = []
    for setting in SETTINGS:
        found = setting.read()
        if found != setting.default:
            setting.set(setting.default)
            if setting.read() == setting.default:
                restored.append(f"{setting.name} was {found}")
    return restored


def _default_device() -> str:
    try:
        return str(torch.get_default_device())
    except (AssertionError, RuntimeError):  # torch asks the device for its number
        return "one that this machine lacks"


_guards: list[Any] = []
"""What has ended inference mode. A guard brings the mode back when it is freed."""


def _set_inference_mode(_: bool) -> None:
    _guards.append(torch._C._InferenceMode(False))
    _guards[-1].__enter__()


SETTINGS = (
    Setting("default dtype", torch.float32, torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", "cpu", _default_device, lambda _: torch.set_default_device(None)),
    Setting("inference mode", False, torch.is_inference_mode_enabled, _set_inference_mode),
    # after inference mode, which sets it
    Setting("grad mode", True, torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "autocast on the CPU",
        False,
        partial(torch.is_autocast_enabled, "cpu"),
        partial(torch.set_autocast_enabled, "cpu"),
    ),
    Setting(
        "autocast on the GPU",
        False,
        partial(torch.is_autocast_enabled, "cuda"),
        partial(torch.set_autocast_enabled, "cuda"),
    ),
    Setting("anomaly detection", False, torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting("deterministic mode", 0, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    Setting(
        "float32 matmul precision",
        "highest",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
)
