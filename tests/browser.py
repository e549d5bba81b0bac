"""JupyterLab in a real headless browser: start it, open a notebook, run every cell, look at what a learner
sees.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from needs import lacking
from servers import BrowserProblem, Server, running

from course_utils.cli.learn import JUPYTERLAB

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Locator, Page, sync_playwright
except ModuleNotFoundError as absent:
    lacking(absent.name)

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = os.environ.get("COURSE_REQUIRE_BROWSER") == "1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
IDLE = "(ipykernel) | Idle"
IN_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"
CODE_CELLS = f"{IN_FRONT} .jp-CodeCell"
SLIDER = '.jp-OutputArea [role="slider"], .jp-OutputArea input[type="range"]'

OPEN = """async ([path, ownKernel]) => {
    const {commands, shell} = jupyterapp, {id, name} = shell.currentWidget.sessionContext.session.kernel;
    const how = ownKernel ? {path} : {path, kernel: {id, name}};
    const notebook = await commands.execute('docmanager:open', how);
    await Promise.all([notebook.revealed, notebook.sessionContext.ready]);
}"""
CLOSE = "() => [...jupyterapp.shell.widgets('main')].slice(1).forEach((opened) => opened.dispose())"
RUN = """() => {
    window.courseRan = null;
    jupyterapp.commands.execute('notebook:run-all-cells').catch(String)
        .then((all) => { window.courseRan = [all]; });
}"""
RUN_CELL = """(index) => {
    const {content} = jupyterapp.shell.currentWidget;
    content.deselectAll();
    content.activeCellIndex = index;
    jupyterapp.commands.execute('notebook:run-cell');
}"""


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[Server]:
    """JupyterLab over `folder` with fresh settings, stopped at the end."""
    options = [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True", *JUPYTERLAB]
    options += ["--ip=127.0.0.1", "--KernelManager.shutdown_wait_time=0.1"]
    options += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="course-lab-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-m", "jupyterlab", *options]
        with running(command, folder, _lab_environment(Path(scratch))) as server:
            yield server


def _lab_environment(scratch: Path) -> dict[str, str]:
    """Environment of a fresh learner's machine: no settings, no guesses, the simulated GPU."""
    for name, settings in SETTINGS.items():
        file = scratch / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {"COURSE_HOME": "course", "IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config"}
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "open",
        "JUPYTER_RUNTIME_DIR": "run",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folders = {name: str(scratch / folder) for name, folder in own.items()}
    return {**os.environ, "COURSE_SOURCE": "simulated", "PYTHONPATH": path, **folders}


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome, or None. COURSE_BROWSER names one."""
    names = [os.environ["COURSE_BROWSER"]] if os.environ.get("COURSE_BROWSER") else BROWSERS
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def browser_page(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """An empty page of a headless browser. Without one the test is skipped, or fails where it is required."""
    executable = find_browser()
    if executable is None:
        (pytest.fail if REQUIRED else pytest.skip)(
            f"no Chromium or Chrome (looked for {', '.join(BROWSERS)})"
        )
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


def open_notebook(page: Page, server: Server, notebook: str) -> None:
    """Open `notebook` and wait until its kernel is connected and idle: a run asked for earlier is silently
    lost.
    """
    page.goto(f"{server.address}/doc/tree/{notebook}?token={server.token}")
    page.locator(CODE_CELLS).first.wait_for()
    page.locator(".jp-StatusBar-Widget, #jp-main-statusbar").get_by_text(IDLE).first.wait_for()


@contextmanager
def opened(page: Page, notebook: str | None = None, own_kernel: bool = False) -> Iterator[None]:
    """`notebook`, or what is opened meanwhile, in front of the first one and in its page, which took seconds
    to start.

    A named one shares the first one's kernel or starts its own. At the end all but the first are closed,
    saved or not.
    """
    try:
        if notebook:
            page.evaluate(OPEN, [notebook, own_kernel])
        yield
    finally:
        page.evaluate(CLOSE)


def start_cell(page: Page, index: int) -> None:
    """Run one cell of the notebook in front, by its place among all cells, and do not wait for it."""
    page.evaluate(RUN_CELL, index)


@contextmanager
def processor_milliseconds(page: Page) -> Iterator[Callable[[], float]]:
    """A function that says how much processor time the page's own thread has taken since: other work is not
    in it.
    """

    def seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    began = seconds()  # within one session: each counts from its own beginning
    yield lambda: 1000 * (seconds() - began)
    session.detach()


def run_all(page: Page) -> None:
    """Run every cell and wait until all have finished or one has failed."""
    page.evaluate(RUN)
    [ran] = page.wait_for_function("window.courseRan", polling=50, timeout=900_000).json_value()
    if ran is not True and not cell_errors(page):
        raise BrowserProblem(f"the cells did not run: {ran}")


def cell_errors(page: Page) -> list[str]:
    """The text of every error and every line on stderr that the notebook shows."""
    kinds = "application/vnd.jupyter.error", "application/vnd.jupyter.stderr"
    selector = ", ".join(f'{CODE_CELLS} [data-mime-type="{kind}"]' for kind in kinds)
    return page.locator(selector).all_inner_texts()


def picture(cell: Locator) -> str:
    """What a cell draws: the markup of its HTML outputs."""
    drawn = cell.locator(".jp-OutputArea-output .widget-html-content")
    return "\n".join(drawn.evaluate_all("elements => elements.map(element => element.outerHTML)"))


def redraw_milliseconds(page: Page, slider: Locator, key: str) -> float:
    """Milliseconds from `key` on the focused `slider` to the first change of the picture in its cell.

    The page's own clock is read, from the key event to the change of the document, so that the driver's
    overhead does not count. Raises BrowserProblem when nothing changes within a minute.
    """
    cell = slider.locator("xpath=ancestor::*[contains(concat(' ', @class, ' '), ' jp-CodeCell ')][1]")
    area = cell.locator(".jp-OutputArea").first
    slider.focus()
    area.evaluate("""area => { window.courseRedraw = new Promise(done => {
        let pressed = null;
        const press = () => { pressed = performance.now(); };
        document.addEventListener('keydown', press, {capture: true, once: true});
        const watcher = new MutationObserver(changes => {
            const drawn = changes.some(change => change.target.closest?.('.widget-html-content'));
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


THEME = """async (name) => {
    await jupyterapp.commands.execute('apputils:change-theme', {theme: `JupyterLab ${name}`});
}"""


@contextmanager
def theme(page: Page, name: str) -> Iterator[None]:
    """JupyterLab in its "Light" or "Dark" theme, and light again."""
    _set_theme(page, name)
    yield
    _set_theme(page, "Light")


def _set_theme(page: Page, name: str) -> None:
    page.evaluate(THEME, name)
    page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").wait_for(state="attached")


def violations(page: Page, within: str | None = None) -> list[tuple[str, list[str]]]:
    """The rules of WCAG 2 A and AA that the page, or a part of it, breaks, as axe-core
    finds them, and where.
    """
    # what holds is counted, not listed
    options = {"runOnly": ["wcag2a", "wcag2aa"], "resultTypes": ["violations"]}
    found = Axe().run(page, context=within, options=options).response["violations"]
    return [(rule["id"], [node["html"][:200] for node in rule["nodes"][:3]]) for rule in found]
