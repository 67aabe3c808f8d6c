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


@pytest.fixture(scope="package")
def browser():
    """A Chromium without a window.

    Not for the whole session: while Playwright runs, no other test of this process can use asyncio.
    """
    path = chromium.find()
    if path is None:
        pytest.fail(chromium.HOW)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=list(chromium.ARGS))
        yield made
        made.close()


@pytest.fixture(scope="package")
def context(browser):
    """One for all pages: one that finds JupyterLab compiled loads in a fifth of the time."""
    made = browser.new_context(viewport={"width": 1200, "height": 900})
    made.set_default_timeout(WAIT_MS)
    yield made
    made.close()


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
