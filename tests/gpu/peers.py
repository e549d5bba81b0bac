"""Other tools' predictions for ten training scripts whose peak an H200 has counted.

    python tests/gpu/peers.py tests/gpu/recorded/peers.jsonl

The scripts are the ten that allocated most, of those without convolutions, an LSTM or torch.compile. One JSON
line per script and tool says what was called, and what it predicts or why it does not. It needs torch 2.11's
CUDA build with the scripts' libraries, DeepSpeed, fitcheck-llm, and g++ for the GPU that does nothing
(tests/null_gpu.py): on it MemTracker follows each script as it is.
"""

import argparse
import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
STEPS = 2
COMPILED = "nanogpt.py"

MEMTRACKER = "MemTracker"
FITCHECK = "FitCheck"
ACCELERATE = "accelerate estimate-memory"
DEEPSPEED = "DeepSpeed's ZeRO-2 estimate"
SIXTEEN = "16 bytes per parameter"
TOOLS = (MEMTRACKER, FITCHECK, ACCELERATE, DEEPSPEED, SIXTEEN)
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "fitcheck-llm")

MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PURE = {"precision": "bf16", "optimizer_dtype": "bf16", "lora_rank": None, "flash_attn": True}
ADAPTERS = {"precision": "bf16", "lora_rank": 16, "lora_targets": MATRICES, "flash_attn": True}
FITCHECK_SETTINGS: dict[str, dict[str, Any]] = {
    "hugging_face.py llama": {**PURE, "batch_size": 2, "seq_len": 512},
    "hugging_face.py phi3": {**PURE, "batch_size": 2, "seq_len": 512},
    "hugging_face.py gemma2": {**PURE, "batch_size": 2, "seq_len": 512, "flash_attn": False},
    "hugging_face.py bloom": {**PURE, "batch_size": 2, "seq_len": 512, "flash_attn": False},
    "hf_trainer.py": {"precision": "fp16", "lora_rank": None, "batch_size": 8, "seq_len": 512},
    "peft_dora.py": {**ADAPTERS, "batch_size": 4, "seq_len": 1024},
    "peft_lora.py": {**ADAPTERS, "batch_size": 4, "seq_len": 1024, "grad_checkpoint": True},
}
"""What each script does, in FitCheck's choices. The others have models that are not of the Hub's kinds."""


@dataclass(frozen=True)
class Seen:
    """A script's model, its numbers of parameters, and what MemTracker saw at most, or its error."""

    script: str
    model: Any
    trained: int
    frozen: int
    peak: int
    error: str


# The scripts


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "recorded" / f"{name}.jsonl").read_text().splitlines()]


def chosen() -> dict[str, int]:
    """The bytes that the card counted to the end of step 2, by script; the largest first."""
    plain = {row["script"] for row in recorded("predictions") if not row["predicted"]["not_predicted"]}
    counted = {
        row["script"]: next(step["peak_allocated"] for step in row["steps"] if step["step"] == STEPS)
        for row in recorded("scripts")
        if row["script"] in plain - {COMPILED}
    }
    return dict(sorted(counted.items(), key=lambda item: -item[1])[:10])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--one", metavar="SCRIPT", help="this script alone, in this process, on its GPU")
    options = parser.parse_args()
    if options.one:
        found = predictions(options.one)
        options.out.write_text(json.dumps(found))
        os._exit(0)  # no handler of the script's may keep it alive
    sys.path.insert(0, str(ROOT / "tests"))
    from null_gpu import missing, standing_in

    site = Path(sysconfig.get_path("platlib"))
    if reason := missing(site):
        sys.exit(f"MemTracker has no GPU here: {reason}")
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as file:
        environment = standing_in(site, Path(folder))
        environment["PYTHONPATH"] += f":{os.environ.get('PYTHONPATH', '')}"
        environment["HF_HUB_OFFLINE"] = "1"
        for script, counted in chosen().items():
            for row in in_a_process(script, Path(folder), environment):
                line = {"script": script, "counted": counted, **about(), **row}
                file.write(json.dumps(line) + "\n")
            file.flush()
            print(script, flush=True)


def in_a_process(script: str, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    answer = folder / "answer.json"
    words = [word for word in script.split() if "=" in word]
    told = environment | dict(word.split("=") for word in words)
    command = [sys.executable, str(Path(__file__).resolve()), str(answer), "--one", script]
    subprocess.run(command, cwd=folder, env=told, stdout=subprocess.DEVNULL, check=True, timeout=1200)
    return json.loads(answer.read_text())


def about() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}
    return {"date": date.today().isoformat(), "versions": versions}


# The tools


def predictions(script: str) -> list[dict[str, Any]]:
    """What each tool says of a script: the call, and the bytes or the reason why there are none."""
    seen = followed(script)
    tools: dict[str, Callable[[Seen], tuple[str, int]]] = {
        MEMTRACKER: memtracker,
        FITCHECK: fitcheck,
        SIXTEEN: sixteen_bytes,
        DEEPSPEED: deepspeed,
        ACCELERATE: accelerate,  # the last, as it changes the model's dtype
    }
    rows: list[dict[str, Any]] = []
    for tool, ask in tools.items():
        try:
            call, predicted = ask(seen)
            rows.append({"tool": tool, "call": call, "predicted": predicted, "failed": ""})
        except (ValueError, NotImplementedError) as error:
            rows.append({"tool": tool, "call": "", "predicted": None, "failed": str(error)[:300]})
    return rows


class Finished(BaseException):
    """The script has taken its steps."""


def followed(script: str) -> Seen:
    """Run a script under MemTracker until its optimizer has stepped twice."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.optim.optimizer import register_optimizer_step_post_hook

    tracker = MemTracker()
    models: list[torch.nn.Module] = []
    taken: list[Any] = []

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        """MemTracker refuses a second forward of a model until its statistics by module are cleared."""
        models.append(module) if not models else None
        if module is models[0]:
            tracker.reset_mod_stats()

    def after_step(optimizer: Any, *_: Any) -> None:
        taken.append(optimizer)
        if len(taken) == STEPS:
            raise Finished

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    name, *words = script.split()
    sys.argv = [str(SCRIPTS / name), *(word for word in words if "=" not in word)]
    sys.path.insert(0, str(SCRIPTS))
    said = ""
    try:
        with tracker:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Finished:
        pass
    except RuntimeError as error:  # MemTracker's own: scripts that fail without it were not counted either
        said = str(error)
    weights = list(models[0].parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]["Total"]
    return Seen(script, models[0], trained, frozen, peak, said)


def memtracker(seen: Seen) -> tuple[str, int]:
    if seen.error:
        raise ValueError(seen.error)
    call = "with MemTracker() as tracker: the script; tracker.get_tracker_snapshot('peak')[cuda:0]['Total']"
    return call, seen.peak


def accelerate(seen: Seen) -> tuple[str, int]:
    """The row of a model that computes in 16 bits, as all ten do, of the column "Training using Adam"."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(seen.model.float())  # the command makes the model in fp32
    call = "max(estimate_training_usage(calculate_maximum_sizes(model)[0], 'float16').values())"
    return call, max(estimate_training_usage(size, "float16").values())


def deepspeed(seen: Seen) -> tuple[str, int]:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, predicted = estimate_zero2_model_states_mem_needs(seen.trained + seen.frozen, 1, 1, cpu_offload=False)
    return "estimate_zero2_model_states_mem_needs(parameters, 1, 1, cpu_offload=False)[1]", predicted


def sixteen_bytes(seen: Seen) -> tuple[str, int]:
    """Weights and gradients in 16 bits, and 12 bytes of Adam in fp32 (Rajbhandari et al. 2020, ZeRO)."""
    return "16 * trained + 2 * frozen", 16 * seen.trained + 2 * seen.frozen


def fitcheck(seen: Seen) -> tuple[str, int]:
    """The estimate without its overhead: CUDA's context and fragmentation are not allocated.

    The model's configuration comes from the script instead of the Hub, which is not asked.
    """
    from fitcheck import TrainingConfig, config_parser, estimate, get_gpu

    if seen.script not in FITCHECK_SETTINGS:
        raise ValueError("the model has no config.json, as models of the Hub do")
    settings = FITCHECK_SETTINGS[seen.script]
    path = Path("config.json").resolve()
    path.write_text(seen.model.config.to_json_string(use_diff=False))
    with mock.patch.object(config_parser, "hf_hub_download", lambda **_: str(path)):
        model = config_parser.fetch_model_config(seen.script)
    found = estimate(model, TrainingConfig(**settings), get_gpu("h200"))
    call = f"estimate(config, TrainingConfig(**{settings}), get_gpu('h200')): total_mib - overhead_mib"
    return call, round((found.total_mib - found.overhead_mib) * 2**20)


if __name__ == "__main__":
    main()
