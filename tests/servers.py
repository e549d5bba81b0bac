"""A JupyterLab that a test starts: on a free port, with a token, ended with the test."""

import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class BrowserProblem(Exception):
    """JupyterLab or the browser did not do what was asked; the message says which and shows the log."""


@dataclass(frozen=True)
class Server:
    """A JupyterLab that is running: its address, the token that opens it, the folder that it shows."""

    address: str
    token: str
    folder: Path


@contextmanager
def running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    """The JupyterLab that a command starts in a folder. Raises BrowserProblem if it does not answer in five
    minutes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", secrets.token_hex(16), folder)
    asked = [
        "--no-browser",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={server.token}",
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *asked], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            if not _answers(server, process):
                log.seek(0)
                raise BrowserProblem(f"JupyterLab did not start:\n{log.read()[-2000:]}")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=300)


def _answers(server: Server, process: subprocess.Popen) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(f"{server.address}/api/status?token={server.token}", timeout=300):
                return True
        except (urllib.error.URLError, OSError):  # nobody listens yet
            time.sleep(0.2)
    return False
