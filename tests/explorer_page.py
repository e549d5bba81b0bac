"""The explorer's page in a real browser: serve it, open it, time it."""

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import processor_milliseconds
from playwright.sync_api import Page

READY = "document.getElementById('suggested')?.inert === false"
"""What is true of a page that has drawn, and has said what to change next."""

REDRAWN = """() => { window.redrawn = new Promise((done) => {
    let pressed = null;
    addEventListener('keydown', (event) => { pressed = event.timeStamp; }, {capture: true, once: true});
    const watcher = new MutationObserver(() => {
        watcher.disconnect();
        requestAnimationFrame(() => {
            const channel = new MessageChannel();  // answers after the frame is painted
            channel.port1.onmessage = () => done(performance.now() - pressed);
            channel.port2.postMessage(null);
        });
    });
    watcher.observe(document.getElementById('timeline'), {childList: true});
}); }"""


def pyodide_module() -> Any:
    """`docs/pyodide.py`, which is no part of a package."""
    path = Path(__file__).resolve().parent.parent / "docs" / "pyodide.py"
    spec = importlib.util.spec_from_file_location("course_pyodide", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need_pyodide() -> None:
    """Skip where Pyodide cannot be fetched, unless COURSE_REQUIRE_BROWSER asks for all; a wrong checksum
    fails.
    """
    pyodide = pyodide_module()
    try:
        pyodide.files()
    except pyodide.NotBrought as problem:
        if os.environ.get("COURSE_REQUIRE_BROWSER") == "1":
            raise
        pytest.skip(str(problem))


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are counted in the browser."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a plain static host, of this machine alone, that serves `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def opened(page: Page, address: str, seconds: float = 120) -> Page:
    """The page once it has drawn and has said what to change next."""
    page.goto(address)
    page.wait_for_function(READY, timeout=1000 * seconds)
    return page


def key_times(page: Page, control: str, key: str) -> tuple[float, float]:
    """From `key` on a control to the painted picture: milliseconds of the clock, and of the page's processor
    time.
    """
    page.locator(f"#choice-{control}").focus()
    with processor_milliseconds(page) as spent:
        page.evaluate(REDRAWN)
        page.keyboard.press(key)
        return page.evaluate("window.redrawn"), spent()
