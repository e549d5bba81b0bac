"""JupyterLab in a real headless browser: start it, open a notebook, run every cell, look at what a learner sees.

From a terminal: `python tests/browser.py NOTEBOOK OUT.png [--height PIXELS]` runs a copy of the notebook from top to
bottom and writes what the page shows, as one picture or, with `--height`, as several of that height.
"""

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, TimeoutError, sync_playwright


ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
IDLE = "(ipykernel) | Idle"
IN_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"
CODE_CELLS = f"{IN_FRONT} .jp-CodeCell"
SCROLLER = f"{IN_FRONT} .jp-WindowedPanel-outer"
SLIDER = '.jp-OutputArea [role="slider"], .jp-OutputArea input[type="range"]'

MEASURE = f"""() => {{
    const scroller = document.querySelector('{SCROLLER}');
    const last = [...scroller.querySelectorAll('.jp-Cell')].pop().getBoundingClientRect().bottom;
    const content = last - scroller.getBoundingClientRect().top + scroller.scrollTop + 20;
    return [Math.ceil(content), Math.ceil(window.innerHeight - scroller.clientHeight)];
}}"""
"""Pixels: from the top of a notebook to the end of its last cell, and of everything around the notebook."""

OPEN = """async ([path, ownKernel]) => {
    const {commands, shell} = jupyterapp, {id, name} = shell.currentWidget.sessionContext.session.kernel;
    const notebook = await commands.execute('docmanager:open', ownKernel ? {path} : {path, kernel: {id, name}});
    await Promise.all([notebook.revealed, notebook.sessionContext.ready]);
}"""
CLOSE = "() => [...jupyterapp.shell.widgets('main')].slice(1).forEach((opened) => opened.dispose())"
LIST = "(path) => jupyterapp.commands.execute('filebrowser:open-path', {path})"
RUN = """() => {
    window.courseRan = null;
    jupyterapp.commands.execute('notebook:run-all-cells').catch(String).then((all) => { window.courseRan = [all]; });
}"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
LISTED = ".jp-DirListing-item"
WATCH_OPENING = """(count) => { window.courseOpening = new Promise((done) => {
    const before = new Set(document.querySelectorAll('.jp-NotebookPanel'));
    let began = null, first = null;
    document.addEventListener('dblclick', (event) => { began = event.timeStamp; }, {capture: true, once: true});
    const look = setInterval(() => {
        const panel = [...document.querySelectorAll('.jp-NotebookPanel')].find((one) => !before.has(one));
        const drawn = [...(panel?.querySelectorAll('.jp-Cell') ?? [])].filter((cell) => cell.innerText.trim());
        if (drawn.length && first === null) first = performance.now() - began;
        if (drawn.length >= count) { clearInterval(look); done([first, performance.now() - began]); }
    }, 20);
    setTimeout(() => { clearInterval(look); done(null); }, 60000);
}); }"""
"""Waits for a double click, and then for a notebook that was not there before and shows text in `count` cells."""


TALLEST = 16_000
"""Pixels: Chromium draws no picture taller than 16,384."""


class BrowserProblem(Exception):
    """JupyterLab or the browser did not do what was asked; the message says which and shows the log."""


@dataclass(frozen=True)
class Server:
    """A JupyterLab that is running: its address, the token that opens it, the folder that it shows."""

    address: str
    token: str
    folder: Path

    def url(self, notebook: str) -> str:
        """The address that opens `notebook` (a path inside the folder) alone on the page."""
        return f"{self.address}/doc/tree/{notebook}?token={self.token}"


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[Server]:
    """JupyterLab over `folder` with fresh settings, stopped at the end. Raises BrowserProblem if it does not start."""
    with tempfile.TemporaryDirectory(prefix="course-lab-", ignore_cleanup_errors=True) as scratch:
        server = Server(f"http://127.0.0.1:{_free_port()}", secrets.token_hex(16), folder)
        log = Path(scratch, "jupyter.log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                _lab_command(server), cwd=folder, env=_lab_environment(Path(scratch)), stdout=stream, stderr=stream
            )
        try:
            _wait_until_answering(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lab_command(server: Server) -> list[str]:
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    port = server.address.rpartition(":")[2]
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={server.token}"),
        *("--LabApp.expose_app_in_browser=True", "--KernelManager.shutdown_wait_time=0.1"),
        *(f"--ServerApp.root_dir={server.folder}", *root),
    ]


def _lab_environment(scratch: Path) -> dict[str, str]:
    """Environment of a fresh learner's machine: no settings, no guesses, the simulated GPU."""
    for name, settings in SETTINGS.items():
        file = scratch / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {
        "JUPYTER_CONFIG_DIR": scratch / "config",
        "JUPYTER_RUNTIME_DIR": scratch / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": scratch / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": scratch / "workspaces",
        "IPYTHONDIR": scratch / "ipython",
        "COURSE_HOME": scratch / "course",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "COURSE_SOURCE": "simulated", "PYTHONPATH": path, **{k: str(v) for k, v in own.items()}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_answering(server: Server, process: subprocess.Popen, log: Path, seconds: float = 300) -> None:
    request = urllib.request.Request(f"{server.address}/api/status?token={server.token}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(request, timeout=300):
                return
        except (urllib.error.URLError, OSError):  # nobody listens yet
            time.sleep(0.2)
    raise BrowserProblem(f"JupyterLab did not start within {seconds:.0f} s:\n{log.read_text()[-2000:]}")


@contextmanager
def browser_page(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """An empty page of a headless browser. Raises BrowserProblem where no browser is installed."""
    executable = find_browser()
    if executable is None:
        raise BrowserProblem(f"no browser found; install Chromium or Chrome (looked for {', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--no-proxy-server", "--disable-gpu"]
        )
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.set_default_timeout(300_000)  # against hanging alone: a busy machine is slow
        page.context.set_default_timeout(300_000)
        try:
            yield page
        finally:
            browser.close()


def open_notebook(page: Page, server: Server, notebook: str, seconds: float = 300) -> None:
    """Open `notebook` and wait until its kernel is connected and idle: a run asked for earlier is silently lost."""
    page.goto(server.url(notebook), timeout=seconds * 1000)
    page.locator(CODE_CELLS).first.wait_for(timeout=seconds * 1000)
    page.locator(".jp-StatusBar-Widget, #jp-main-statusbar").get_by_text(IDLE).first.wait_for(timeout=seconds * 1000)


@dataclass(frozen=True)
class Opening:
    """Milliseconds from the double click: to the first cell, to the last, and the page's processor time meanwhile."""

    first: float
    last: float
    processor: float


@contextmanager
def opened(page: Page, notebook: str | None = None, own_kernel: bool = False) -> Iterator[None]:
    """`notebook`, or what is opened meanwhile, in front of the first one and in its page, which took seconds to start.

    A named one shares the first one's kernel or starts its own. At the end all but the first are closed, saved or not.
    """
    try:
        if notebook:
            page.evaluate(OPEN, [notebook, own_kernel])
        yield
    finally:
        page.evaluate(CLOSE)


def opening(page: Page, notebook: Path) -> Opening:
    """How long a double click on a notebook, listed in its folder, takes to show its cells, all of them drawn."""
    cells = len(json.loads(notebook.read_text(encoding="utf-8"))["cells"])
    page.evaluate(LIST, notebook.parent.name)
    page.locator(LISTED, has_text=notebook.name).wait_for()
    with processor_milliseconds(page) as spent:
        page.evaluate(WATCH_OPENING, cells)
        page.locator(LISTED, has_text=notebook.name).dblclick()
        shown = page.evaluate("window.courseOpening")
        if shown is None:
            raise BrowserProblem(f"{notebook.name} did not show its {cells} cells within a minute")
        first, last = shown
        return Opening(first, last, spent())


@contextmanager
def processor_milliseconds(page: Page) -> Iterator[Callable[[], float]]:
    """A function that says how much processor time the page's own thread has taken since: other work is not in it."""

    def seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    began = seconds()  # within one session: each counts from its own beginning
    yield lambda: 1000 * (seconds() - began)
    session.detach()


def run_all(page: Page, seconds: float = 900) -> None:
    """Run every cell and wait until all have finished or one has failed. Raises BrowserProblem after `seconds`."""
    page.evaluate(RUN)
    try:
        [ran] = page.wait_for_function("window.courseRan", polling=50, timeout=seconds * 1000).json_value()
    except TimeoutError as problem:
        waiting = page.locator(CODE_CELLS, has_text="[*]:").all_inner_texts()
        raise BrowserProblem(f"cells still waiting after {seconds:.0f} s: {waiting}") from problem
    if ran is not True and not cell_errors(page):
        raise BrowserProblem(f"the cells did not run: {ran}")


def cell_errors(page: Page) -> list[str]:
    """The text of every error and every line on stderr that the notebook shows."""
    kinds = "application/vnd.jupyter.error", "application/vnd.jupyter.stderr"
    selector = ", ".join(f'{CODE_CELLS} [data-mime-type="{kind}"]' for kind in kinds)
    return page.locator(selector).all_inner_texts()


def cell_of(locator: Locator) -> Locator:
    """The code cell that `locator` is part of."""
    return locator.locator("xpath=ancestor::*[contains(concat(' ', @class, ' '), ' jp-CodeCell ')][1]")


def picture(cell: Locator) -> str:
    """What a cell draws: the markup of all its SVGs and the text of its HTML outputs."""
    drawn = cell.locator(".jp-OutputArea-output svg, .jp-OutputArea-output .widget-html-content")
    return "\n".join(drawn.evaluate_all("elements => elements.map(element => element.outerHTML)"))


def redraw_milliseconds(page: Page, slider: Locator, key: str) -> float:
    """Milliseconds from `key` on the focused `slider` to the first change of the picture in its cell.

    The page's own clock is read, from the key event to the change of the document, so that the driver's overhead does
    not count. Raises BrowserProblem when nothing changes within a minute.
    """
    area = cell_of(slider).locator(".jp-OutputArea").first
    slider.focus()
    area.evaluate("""area => { window.courseRedraw = new Promise(done => {
        let pressed = null;
        document.addEventListener('keydown', () => { pressed = performance.now(); }, {capture: true, once: true});
        const watcher = new MutationObserver(changes => {
            const drawn = changes.some(change => change.target.closest?.('.widget-html-content, svg'));
            if (pressed !== null && drawn) { watcher.disconnect(); done(performance.now() - pressed); }
        });
        watcher.observe(area, {subtree: true, childList: true, attributes: true});
        setTimeout(() => { watcher.disconnect(); done(null); }, 60000);
    }); }""")
    page.keyboard.press(key)
    elapsed = page.evaluate("window.courseRedraw")
    if elapsed is None:
        raise BrowserProblem(f"the picture did not change within a minute of {key}")
    return elapsed


def screenshot(page: Page, path: Path, height: int | None = None) -> list[Path]:
    """Pictures of the whole notebook: one at `path`, or several of `height` pixels at `path` with -1, -2 … added."""
    width = page.viewport_size["width"] if page.viewport_size else 1280
    page.locator(SCROLLER).first.wait_for()
    content, frame = page.evaluate(MEASURE)
    tall = min(content, height or TALLEST, TALLEST)
    page.set_viewport_size({"width": width, "height": tall + frame})
    starts = range(0, content, tall)
    paths = [path if len(starts) == 1 else path.with_stem(f"{path.stem}-{i + 1}") for i in range(len(starts))]
    for start, target in zip(starts, paths, strict=True):
        page.evaluate(f"() => {{ document.querySelector('{SCROLLER}').scrollTop = {start}; }}")
        page.evaluate(DRAWN)
        target.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target)
    return paths


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """The rules of WCAG 2 A and AA that the page breaks, as axe-core finds them, and where."""
    options = {"runOnly": ["wcag2a", "wcag2aa"], "resultTypes": ["violations"]}  # what holds is counted, not listed
    found = Axe().run(page, options=options).response["violations"]
    return [(rule["id"], [node["html"][:200] for node in rule["nodes"][:3]]) for rule in found]


def copy_course(target: Path) -> None:
    """Copy the notebooks, exercises, solutions and docs of this repository to `target`, where they may be changed."""
    for folder in ("notebooks", "exercises", "solutions", "docs"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))


def main(argv: list[str] | None = None) -> int:
    """Run a copy of one notebook in the browser and write pictures of it. Returns 1 when a cell failed, else 0."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--height", type=int, help="pixels of each picture; without it one picture shows everything")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--seconds", type=float, default=180, help="how long its cells may take together")
    parser.add_argument("--as-stored", action="store_true", help="do not run it: show the outputs that it holds")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="course-notebook-") as folder, browser_page(options.width) as page:
        shutil.copy(options.notebook, folder)
        with jupyter_lab(Path(folder)) as server:
            open_notebook(page, server, options.notebook.name)
            if not options.as_stored:
                run_all(page, options.seconds)
            failures = cell_errors(page)
            paths = screenshot(page, options.out, options.height)
    print("\n".join([*map(str, paths), *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
