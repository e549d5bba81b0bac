"""The explorer's page in a real browser: serve it, open it, time it.

From a terminal: `python tests/explorer_page.py` prints how long it takes from a key to the picture.
"""

import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser import browser_page, processor_milliseconds
from playwright.sync_api import Page

from course_utils.authoring import site

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
    """From `key` on a control to the painted picture: milliseconds of the clock, and of the page's processor time."""
    page.locator(f"#choice-{control}").focus()
    with processor_milliseconds(page) as spent:
        page.evaluate(REDRAWN)
        page.keyboard.press(key)
        return page.evaluate("window.redrawn"), spent()


def main() -> int:
    """Prints the times of a dense run and of one under ZeRO-3, median and worst of 20 keys each."""
    runs = {"GPT-2 XL": "", "Llama-3 8B, ZeRO-3": "model=llama3-8b&world_size=64&zero_stage=3"}
    with (
        tempfile.TemporaryDirectory() as folder,
        served(site.make_explorer(Path(folder))) as address,
        browser_page() as page,
    ):
        for name, fragment in runs.items():
            page.goto("about:blank")
            opened(page, f"{address}#{fragment}")
            times = [key_times(page, "micro_batch", key) for key in 10 * ("ArrowLeft", "ArrowRight")]
            for what, which in (("key to picture", 0), ("of them the page's processor time", 1)):
                took = [one[which] for one in times]
                print(f"{name}, {what}: {statistics.median(took):.0f} ms, {min(took):.0f} to {max(took):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
