"""One JupyterLab, one Chromium and one page of it for all browser tests of a test process.

To load a page of JupyterLab takes five seconds of a processor. So a test leaves the page as it
found it; after one that failed, the next gets a new page.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from pathlib import Path

import chromium
import pytest
from lab import Lab
from ours import OURS
from playwright.sync_api import expect, sync_playwright
from view import View

# What a busy machine may take; a test that waits so long fails.
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
STAND_IN = Path(__file__).parents[1] / "stand_in" / "nvml.c"


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The stand-in for NVIDIA's library."""
    library = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, STAND_IN]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="session")
def lab(tmp_path_factory, driver):
    """A JupyterLab that runs. Its machine has two GPUs."""
    soon = "--AsyncIOLoopKernelRestarter.time_to_dead=0.5"
    made = Lab(tmp_path_factory.mktemp("lab"), driver, soon)
    made.start()
    yield made
    made.stop()


class Chromium:
    """A Chromium without a window, and a context for all pages: code compiled for one is kept.

    It ends when the next test is none in a browser: while Playwright runs, no other test of this
    process can use asyncio.
    """

    def __init__(self):
        path = chromium.find()
        if path is None:
            pytest.fail(chromium.HOW)
        self._playwright = sync_playwright().start()
        launch = self._playwright.chromium.launch
        self.browser = launch(executable_path=path, args=list(chromium.ARGS))
        self.context = self.browser.new_context(viewport={"width": 1200, "height": 900})
        self.context.set_default_timeout(WAIT_MS)
        self._shared = None

    def new_view(self, lab, name):
        """A page that is not loaded yet, for a workspace of its own."""
        return View(self.context.new_page(), lab, name)

    def shared_view(self, lab):
        """The panel in the page that tests share."""
        if self._shared is None:
            self._shared = self.new_view(lab, "shared")
            self._shared.load()
            self._shared.open_panel()
        return self._shared

    def drop_page(self):
        if self._shared is not None:
            self._shared.page.close()
            self._shared = None

    def close(self):
        self.browser.close()
        self._playwright.stop()


running: list[Chromium] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    try:
        return (yield)
    finally:
        if running and (nextitem is None or Path(__file__).parent not in nextitem.path.parents):
            running.pop().close()


@pytest.fixture(scope="module")
def shared_chromium():
    if not running:
        running.append(Chromium())
    return running[0]


@pytest.fixture(scope="module")
def context(shared_chromium):
    return shared_chromium.context


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        item.stash[failed] = True
    return report


failed = pytest.StashKey[bool]()


@contextmanager
def nothing_wrong(lab, view):
    """Afterwards: no error of ours in the page's console, no traceback in the server's log."""
    said = len(lab.said())
    view.errors.clear()
    yield
    assert view.errors == []
    # Jupyter's own are no concern of ours: a socket of a kernel that was shut down, say.
    ours = [text for text in lab.said()[said:].split("\n[") if OURS in text]
    assert [text for text in ours if "Traceback" in text] == []


@pytest.fixture
def view(lab, shared_chromium, request):
    """The panel in the page that tests share; at the end nothing may have gone wrong."""
    made = shared_chromium.shared_view(lab)
    try:
        with nothing_wrong(lab, made):
            yield made
    finally:
        if made.spoiled or failed in request.node.stash:
            shared_chromium.drop_page()
            lab.forget()
            lab.machine()
        else:
            made.reset()


@pytest.fixture
def new_view(lab, shared_chromium):
    """A page of the test's own, which the test loads; at the end nothing may have gone wrong."""
    made = shared_chromium.new_view(lab, "new")
    with nothing_wrong(lab, made):
        yield made
    made.page.close()
    lab.machine()
