"""The side of a rank: run one program, leave word of how it went, and never outlive the one who asked for it.

Run by torchrun as `python -m course_utils.ranks.worker (file|module|function) NAME [ARGUMENTS]`; with
`torchrun …` it is torchrun itself. In the folder that `RESULTS` names, a rank leaves RANK.pid when it starts,
RANK.done when its program has ended well, RANK.error with the traceback when it has not, and, asked by
SIGUSR1, RANK.where.
"""

import __future__

import faulthandler
import gc
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# Environment variable with the folder in which each rank leaves its result
RESULTS = "COURSE_RANK_RESULTS"
# Environment variable with the process id of the caller, who waits for the results
CALLER = "COURSE_RANK_CALLER"
WATCH_SECONDS = 0.5


def report(result: Any) -> None:
    """Hand back this rank's result, anything that JSON can hold. RuntimeError outside of `run_ranks`."""
    folder = os.environ.get(RESULTS)
    if folder is None:
        raise RuntimeError(
            "nobody waits for this report: start this program with course_utils.ranks.launch.run_ranks"
        )
    leave(Path(folder, f"{os.environ['RANK']}.json"), json.dumps(result))


def report_on_gloo(program: Callable[[], Any], timeout_seconds: float = 1800.0) -> None:
    """Be a rank of gloo on one thread that finds no GPU, and hand back the result of `program`.

    No exchange waits for longer than `timeout_seconds`.
    """
    import torch
    import torch.distributed as dist

    _hide_gpus()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    report(program())
    dist.destroy_process_group()


def _hide_gpus() -> None:
    """Let CUDA find no GPU.

    Optimizers and meshes start CUDA wherever there is a GPU, though all tensors are on the CPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def torchrun() -> None:
    """Be torchrun, but fork each rank (on Linux alone).

    A Python that it starts anew takes seconds to load torch.
    """
    gc.disable()
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    function = "".join(path.read_text(encoding="utf-8") for path in Path(os.environ[RESULTS]).glob("*.py"))
    if not function or re.search("optim|Parallel|fully_shard", function):
        import torch._dynamo  # or each rank would load it by itself
    # Otherwise Python searches all this for cycles, as it loads and again as it ends: more than a second.
    gc.freeze()
    gc.enable()
    SubprocessHandler._popen = _fork  # pyrefly: ignore [bad-assignment]
    # torchrun asks for GPUs, to bind ranks to the cores next to them. CUDA then refuses every call of a
    # forked rank.
    os.register_at_fork(after_in_child=partial(setattr, torch.cuda, "is_available", torch.cuda.is_available))
    torch.cuda.is_available = _no_gpu
    run.main(sys.argv[2:])


def _no_gpu() -> bool:
    return False


def _fork(handler: Any, words: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        words,
        env=environment,
        stdout=handler._stdout,
        stderr=handler._stderr,
        start_new_session=True,
        preexec_fn=lambda: _be_a_rank(list(words), environment),
    )


def _be_a_rank(words: list[str], environment: dict[str, str]) -> NoReturn:  # pyrefly: ignore [bad-return]
    """Do as a new Python would with these words, in a process that was forked from torchrun."""
    code = 1
    try:
        # These are torchrun's sockets, and the pipe by which it waits for `exec`.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun's own
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _keep_groups()
        sys.argv = words[words.index("course_utils.ranks.worker") :]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if not (thread.daemon or thread is threading.current_thread()):
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _keep_groups() -> None:
    """Let every process group live as long as this rank: in torch 2.13 the end of one may wait for ever."""
    import torch.distributed as dist

    groups: Any = dist.distributed_c10d
    destroy = dist.destroy_process_group
    kept = list[Any]()

    def destroying(group: Any = None) -> None:
        kept.extend(groups._world.pg_map)
        destroy(group)

    dist.destroy_process_group = groups.destroy_process_group = destroying


def main() -> None:
    folder = Path(os.environ[RESULTS])
    rank = os.environ["RANK"]
    leave(folder / f"{rank}.pid", str(os.getpid()))
    where = (folder / f"{rank}.where").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=where, all_threads=True)
    threading.Thread(target=_watch, args=(folder, os.getppid(), int(os.environ[CALLER])), daemon=True).start()
    try:
        _run(*sys.argv[1:3])
    except BaseException as error:
        ended_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if not ended_well:
            leave(folder / f"{rank}.error", _traceback(error))
            raise
    leave(folder / f"{rank}.done", "")


def leave(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def program_lines(where: str) -> str:
    """The lines of the program, innermost first, that a faulthandler's report of the main thread shows."""
    main_thread = where.rpartition("(most recent call first):")[2]
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main_thread)
    ours = [f"{Path(file).name}, line {line}, in {name}" for file, line, name in frames if _is_program(file)]
    return ", called from ".join(ours[:2])


def _is_program(file: str) -> bool:
    """True for a file that is neither Python's, nor a package's, nor this one."""
    if "site-packages" in file or file.startswith((sys.base_prefix, "<frozen")):
        return False
    return Path(file) != Path(__file__)


def _run(kind: str, name: str) -> None:
    sys.argv = sys.argv[2:]
    if kind == "file":
        sys.path[0] = str(Path(name).resolve().parent)  # as `python FILE` has it
        runpy.run_path(name, run_name="__main__")
    elif kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        _call(json.loads(Path(name).read_text(encoding="utf-8")))


def _call(function: dict[str, Any]) -> None:
    _hide_gpus()
    if function["file"]:
        found: dict[str, Any] = {"__name__": "rank_function"}
        source = Path(function["file"]).read_text(encoding="utf-8")
        flags = __future__.annotations.compiler_flag  # types in its signature are left as text
        exec(compile(source, function["file"], "exec", flags=flags), found)
    else:
        found = vars(importlib.import_module(function["module"]))
    report(found[function["name"]](**function["keywords"]))


def _traceback(error: BaseException) -> str:
    """An error as Python prints it, from the program's own first line on."""
    skipped = {str(Path(__file__)), "<frozen runpy>", runpy.__file__}
    first: TracebackType | None = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in skipped:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))


def _watch(folder: Path, launcher: int, caller: int) -> None:
    """End this rank, and all that it has started, once nobody is there who could use what it finds."""
    with suppress(ProcessLookupError):
        while os.getppid() == launcher and folder.is_dir():
            os.kill(caller, 0)
            time.sleep(WATCH_SECONDS)
    if os.getpgrp() == os.getpid():  # as torchrun starts it: the leader of its own group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        torchrun()
    else:
        main()
