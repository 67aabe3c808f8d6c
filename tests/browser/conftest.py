"""One JupyterLab and one Chromium for all browser tests of a test process."""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import chromium
import pytest
from lab import Lab
from playwright.sync_api import expect, sync_playwright
from view import View

# What a busy machine may take; a test that waits so long fails.
WAIT_MS = 20_000
expect.set_options(timeout=WAIT_MS)
STAND_IN = Path(__file__).parents[1] / "stand_in" / "nvml.c"


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab that runs. Its machine has two GPUs."""
    folder = tmp_path_factory.mktemp("lab")
    library = folder / "driver" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, STAND_IN]
    subprocess.run(command, check=True)
    made = Lab(folder, library)
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

    def close(self):
        self.browser.close()
        self._playwright.stop()


running: list[Chromium] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    if running and (nextitem is None or Path(__file__).parent not in nextitem.path.parents):
        running.pop().close()


@pytest.fixture(scope="module")
def shared_chromium():
    if not running:
        running.append(Chromium())
    return running[0]


@pytest.fixture(scope="module")
def browser(shared_chromium):
    return shared_chromium.browser


@pytest.fixture(scope="module")
def context(shared_chromium):
    return shared_chromium.context


@contextmanager
def open_view(lab, context, name):
    """A page of the lab in a workspace of its own, with the panel open."""
    page = context.new_page()
    made = View(page, lab, re.sub(r"\W+", "-", name))
    made.load()
    made.open_panel()
    yield made
    page.evaluate("localStorage.clear()")
    page.close()
    lab.forget()
    lab.machine()


@contextmanager
def nothing_wrong(lab, view):
    """Afterwards: no error of ours in the page's console, no traceback in the server's log."""
    said = len(lab.said())
    view.errors.clear()
    yield
    assert view.errors == []
    assert "Traceback" not in lab.said()[said:]


@pytest.fixture
def view(lab, context, request):
    """The panel in a page of the test's own; at the end nothing may have gone wrong."""
    with open_view(lab, context, request.node.name) as made, nothing_wrong(lab, made):
        yield made


@pytest.fixture(scope="module")
def shared_page(lab, context, request):
    """A page for all tests of a module."""
    with open_view(lab, context, request.node.name) as made:
        yield made


@pytest.fixture
def shared_view(lab, shared_page):
    """The module's page; at the end of each test nothing may have gone wrong."""
    with nothing_wrong(lab, shared_page):
        yield shared_page
