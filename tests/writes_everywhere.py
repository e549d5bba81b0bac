"""A script that trains, and before that tries in many ways to change the files of a folder that it is given.

Each function is one way, and gets a file of its own name. test_watch_fence.py executes it twice: plainly,
where each way works, and watched, where none may.
"""

import atexit
import ctypes
import io
import logging
import mmap
import os
import posix
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn

C = ctypes.CDLL(None)
FOLDER = Path(sys.argv[1])
WRITTEN = b"changed"


def c_open(path: Path) -> None:
    file = C.open(bytes(path), os.O_WRONLY | os.O_TRUNC)
    C.write(file, WRITTEN, len(WRITTEN))


def c_fopen(path: Path) -> None:
    C.fopen.restype = ctypes.c_void_p
    C.fputs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    file = C.fopen(bytes(path), b"w")
    if file:
        C.fputs(WRITTEN, file)
        C.fflush(None)


def c_creates(path: Path) -> None:
    C.creat(bytes(path.with_suffix(".new")), 0o600)


def c_truncate(path: Path) -> None:
    C.truncate(bytes(path), 1)


def c_unlink(path: Path) -> None:
    C.unlink(bytes(path))


def c_rename(path: Path) -> None:
    C.rename(bytes(path), bytes(path.with_suffix(".new")))


def c_mkdir(path: Path) -> None:
    C.mkdir(bytes(path.with_suffix(".new")), 0o700)


def c_symlink(path: Path) -> None:
    C.symlink(b"anywhere", bytes(path.with_suffix(".new")))


def c_mkfifo(path: Path) -> None:
    C.mkfifo(bytes(path.with_suffix(".new")), 0o600)


def c_system(path: Path) -> None:
    C.system(f"echo changed > '{path}'".encode())


def c_fork(path: Path) -> None:
    child = C.fork()
    if child == 0:
        c_open(path)
        C._exit(0)
    C.waitpid(child, None, 0)


def c_hard_link(path: Path) -> None:
    """Write to the file by another name, which is in the temporary folder."""
    other = Path(tempfile.gettempdir(), f"other-{os.getpid()}")
    C.link(bytes(path), bytes(other))
    if other.exists():
        c_open(other)
        C.unlink(bytes(other))


def c_symbolic_link(path: Path) -> None:
    link = Path(tempfile.gettempdir(), f"link-{os.getpid()}")
    C.symlink(bytes(path.parent), bytes(link))
    try:
        (link / path.name).write_bytes(WRITTEN)
    finally:
        C.unlink(bytes(link))


def c_remove_folder(path: Path) -> None:
    C.unlink(bytes(path.with_suffix(".folder") / "file"))
    C.rmdir(bytes(path.with_suffix(".folder")))


def by_proc(path: Path) -> None:
    Path(f"/proc/self/root{path}").write_bytes(WRITTEN)


def by_open_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    os.write(os.open(path.name, os.O_WRONLY | os.O_TRUNC, dir_fd=folder), WRITTEN)


def removed_in_open_folder(path: Path) -> None:
    os.unlink(path.name, dir_fd=os.open(path.parent, os.O_RDONLY))


def renamed_in_open_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    os.rename(path.name, f"{path.name}.new", src_dir_fd=folder, dst_dir_fd=folder)


def by_posix(path: Path) -> None:
    os.write(posix.open(path, os.O_WRONLY | os.O_TRUNC), WRITTEN)


def removed_by_posix(path: Path) -> None:
    posix.unlink(path)


def by_file_io(path: Path) -> None:
    io.FileIO(path, "w").write(WRITTEN)


def by_memory_map(path: Path) -> None:
    with mmap.mmap(os.open(path, os.O_RDWR), 0) as shared:
        shared[:2] = WRITTEN[:2]


def by_numpy_memory_map(path: Path) -> None:
    np.memmap(path, np.uint8, "r+")[:] = 7


def by_numpy(path: Path) -> None:
    np.arange(3).tofile(path)


def moved(path: Path) -> None:
    shutil.move(path, path.with_suffix(".new"))


def removed_as_a_tree(path: Path) -> None:
    shutil.rmtree(path.with_suffix(".folder"))


def by_log(path: Path) -> None:
    logging.FileHandler(path).emit(logging.makeLogRecord({"msg": "changed"}))


def by_process(path: Path) -> None:
    subprocess.run(["sh", "-c", f"echo changed > '{path}'"], check=True)


def by_system(path: Path) -> None:
    os.system(f"echo changed > '{path}'")


def by_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path.with_suffix(".new")))


def by_database(path: Path) -> None:
    with sqlite3.connect(path.with_suffix(".new")) as database:
        database.execute("create table of_mine (number)")


def by_database_at_an_address(path: Path) -> None:
    with sqlite3.connect(f"file:{path.with_suffix('.new')}", uri=True) as database:
        database.execute("create table of_mine (number)")


def by_readline(path: Path) -> None:
    import readline

    readline.write_history_file(path)


def by_dbm(path: Path) -> None:
    import dbm.gnu

    dbm.gnu.open(str(path.with_suffix(".new")), "n").close()


def by_torch(path: Path) -> None:
    torch.save({}, path)


def by_torch_in_a_thread(path: Path) -> None:
    thread = threading.Thread(target=torch.save, args=[{}, path])
    thread.start()
    thread.join()


def by_torch_in_c(path: Path) -> None:
    torch._C.PyTorchFileWriter(str(path)).write_end_of_file()


def by_torch_jit(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def by_torch_jit_module(path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(path))


def by_torch_export(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path.with_suffix(".pt2"))


def by_torch_s_shared_file(path: Path) -> None:
    torch.from_file(str(path), shared=True, size=4, dtype=torch.uint8).fill_(7)


def by_torch_s_storage(path: Path) -> None:
    torch.FloatStorage.from_file(str(path), True, 1).fill_(7)


def by_torch_s_profiler(path: Path) -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(2).sum()
    profiler.export_chrome_trace(str(path.with_suffix(".json")))


def by_a_thread_that_goes_on(path: Path) -> None:
    begun = threading.Event()

    def write() -> None:
        while True:
            c_open(path)
            begun.set()

    threading.Thread(target=write, daemon=True).start()
    begun.wait()


def at_exit(path: Path) -> None:
    atexit.register(path.write_bytes, WRITTEN)


def at_exit_in_c(path: Path) -> None:
    atexit.register(c_open, path)


def main() -> None:
    own = [value for value in globals().values() if getattr(value, "__module__", "") == __name__]
    for way in own:
        if way is main:
            continue
        try:
            way(FOLDER / way.__name__)
        except ImportError as missing:
            print(f"not tried: {way.__name__}, {missing}")
        except Exception as error:
            print(f"{way.__name__}: {type(error).__name__}: {error}")
    if torch.cuda.is_available():
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
