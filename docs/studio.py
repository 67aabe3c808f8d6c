"""What all pictures are taken with: a real JupyterLab in a real Chromium, in both of its themes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests" / "browser"))
import chromium  # noqa: E402  from the browser tests
from lab import Gateway, Lab  # noqa: E402
from view import View  # noqa: E402

T = TypeVar("T", Lab, Gateway)


@contextmanager
def driver(there: bool = True) -> Iterator[tuple[Path, Path]]:
    """A folder, and the stand-in for NVIDIA's library, which is missing where not `there`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = folder / "driver" / "libnvidia-ml.so.1"
        library.parent.mkdir()
        if there:
            source = ROOT / "tests" / "stand_in" / "nvml.c"
            command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, source]
            subprocess.run(command, check=True)
        yield folder, library


@contextmanager
def laboratory(machine: dict[str, object] | None, *options: str, host: str = "") -> Iterator[Lab]:
    """A JupyterLab on such a machine, which the stand-in plays; None: one with no GPU."""
    with (
        driver(machine is not None) as (folder, library),
        running(Lab(folder, library, *options, host=host), machine or {}) as lab,
    ):
        yield lab


@contextmanager
def running(server: T, machine: Mapping[str, object]) -> Iterator[T]:
    """A server while it runs, on such a machine."""
    server.machine(machine)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def opened(lab: Lab, browser: Browser, width: int, height: int, name: str) -> Iterator[View]:
    context = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=2
    )
    page = context.new_page()
    page.set_default_timeout(30_000)
    view = View(page, lab, name)
    view.load()
    yield view
    context.close()


def run_notebook(view: View, name: str, cells: int) -> None:
    """Run all cells of a notebook, and wait until the last of them has ended."""
    view.open_notebook(name)
    view.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    view.page.wait_for_function(
        """cells => [...window.jupyterapp.shell.currentWidget.content.widgets]
            .filter(cell => cell.model.executionCount !== null).length === cells""",
        arg=cells,
        timeout=120_000,
    )


def theme(page: Page, name: str) -> None:
    page.evaluate(
        "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
        f"JupyterLab {name.capitalize()}",
    )
    page.wait_for_selector(
        f'body[data-jp-theme-light="{str(name == "light").lower()}"]', state="attached"
    )
    page.wait_for_timeout(700)


def in_both_themes(page: Page, name: str, shoot: Callable[[Path], object]) -> None:
    for look in ("light", "dark"):
        theme(page, look)
        path = IMAGES / f"{name}-{look}.png"
        shoot(path)
        print(path.relative_to(ROOT))


def run(scenes: Mapping[str, Callable[[Browser], None]]) -> None:
    """Take the pictures of the scenes that the command line names, or of all."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.find(), args=list(chromium.ARGS)
        )
        for name in sys.argv[1:] or scenes:
            scenes[name](browser)
        browser.close()
