"""The side of the ranks: torchrun's own launcher, in a process of its own, and the program on each rank.

torchrun starts a Python for each rank, which takes seconds to load torch. Its launcher can also fork ranks,
which have loaded what it has: so do we on Linux, where no GPU is in use.
"""

import __future__

import faulthandler
import importlib
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Environment variable with the folder in which each rank leaves its result
RESULTS = "COURSE_RANK_RESULTS"
HOST = "127.0.0.1"  # since some laptops cannot look up their own name


def report(result: Any) -> None:
    """Hand back this rank's result, anything that JSON can hold. RuntimeError outside of `run_ranks`."""
    folder = os.environ.get(RESULTS)
    if folder is None:
        raise RuntimeError(
            "nobody waits for this report: start this program with course_utils.ranks.launch.run_ranks"
        )
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result), encoding="utf-8")


def report_on_gloo(program: Callable[[], Any], timeout_seconds: float = 1800.0) -> None:
    """Be a rank of gloo on one thread that finds no GPU, and hand back the result of `program`.

    No exchange waits for longer than `timeout_seconds`.
    """
    import torch
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or optimizers and meshes would start CUDA
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    report(program())
    dist.destroy_process_group()


def load(task: dict[str, Any]) -> None:
    """Load what the launcher and the ranks of a task need, but use none of it."""
    importlib.import_module("torch.distributed.launcher.api")
    if _trains(task):
        importlib.import_module("torch._dynamo")  # optimizers load it, and each rank would do so by itself


def launch(task: dict[str, Any]) -> None:
    """Start the ranks of a task and wait for their end; leave failure.json if one of them fails."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    forks = sys.platform == "linux" and not torch.cuda.is_available()
    folder = Path(os.environ[RESULTS])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=task["ranks"],
        run_id="course",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HOST}:0",
        local_addr=HOST,
        max_restarts=0,
        start_method="fork" if forks else "spawn",
        logs_specs=DefaultLogsSpecs(str(folder / "logs"), Std.ALL),
    )
    try:
        elastic_launch(config, be_a_rank)(task)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told: Any = failure.message  # words alone for a rank that left no error
        traceback = told["extraInfo"]["py_callstack"] if isinstance(told, dict) else ""
        said = {"rank": rank, "code": failure.exitcode, "traceback": traceback}
        (folder / "failure.json").write_text(json.dumps(said), encoding="utf-8")
        sys.exit(1)


def _trains(task: dict[str, Any]) -> bool:
    """True unless the source of a function shows that it has no optimizer."""
    if task["kind"] != "function" or not task["function"]["file"]:
        return True
    source = Path(task["function"]["file"]).read_text(encoding="utf-8")
    return re.search("optim|Parallel|fully_shard", source) is not None


def _end_with_caller() -> None:
    """End the launcher and its ranks, one process group, when the caller has ended and closes the pipe."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def be_a_rank(task: dict[str, Any]) -> None:
    """Run the program of a task as one rank. Before its time is up, write down in which line it is."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's own would wait for an exchange to end
    faulthandler.dump_traceback_later(max(0.1, task["until"] - time.time() - 1.0))
    _wait_for_the_others(task["ranks"])
    _keep_destroyed_groups()
    sys.argv = [task["name"], *task["arguments"]]
    if task["kind"] == "file":
        sys.path.insert(0, str(Path(task["name"]).resolve().parent))  # as `python FILE` has it
        runpy.run_path(task["name"], run_name="__main__")
    elif task["kind"] == "module":
        runpy.run_module(task["name"], run_name="__main__", alter_sys=True)
    else:
        report(_function(task["function"])(**task["function"]["keywords"]))
    faulthandler.cancel_dump_traceback_later()


def _wait_for_the_others(ranks: int) -> None:
    """Wait until all ranks have been forked.

    A rank that connects earlier makes a thread of the launcher look up an address, for which the C library
    holds a lock. A rank that is forked in that moment inherits the lock, which nobody will open: it hangs as
    soon as it connects.
    """
    started = Path(os.environ[RESULTS], "started")
    with started.open("ab") as file:
        file.write(b".")
    while started.stat().st_size < ranks:
        time.sleep(0.005)


def _keep_destroyed_groups() -> None:
    """Let a destroyed process group live on until this rank ends.

    A DDP model often outlives `destroy_process_group()`. Its reducer then frees the group, and waits for
    gloo's threads while it holds Python's lock. One of them may need that lock, to let go of a communication
    hook: the rank hangs (torch 2.13). Remove this when the reducer frees its group without the lock.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    kept: list[Any] = []
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        kept.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group


def _function(function: dict[str, Any]) -> Callable[..., Any]:
    if not function["file"]:
        return getattr(importlib.import_module(function["module"]), function["name"])
    found: dict[str, Any] = {"__name__": "rank_function"}
    source = Path(function["file"]).read_text(encoding="utf-8")
    flags = __future__.annotations.compiler_flag  # types in its signature are left as text
    exec(compile(source, function["file"], "exec", flags=flags), found)
    return found[function["name"]]
