"""Make the pictures of `%%gputime`: `make screenshots`.

A real JupyterLab in a real Chromium, with two virtual GPUs, whose times are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser
from studio import View, in_both_themes, laboratory, opened, run, theme

START = (
    "%load_ext gpumagic\n%gpus --virtual 2\nimport torch\nfrom torch import nn\n"
    "net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))\n"
    "images = torch.randn(256, 784)"
)
LIVE = "m = %gpus --live"
CELLS = {
    "timing": "%%gputime cpu 0 0+1 --items 256 --max-time 3\nnet(images).argmax(1)",
    "timing-sweep": "%%gputime cpu 0 --sweep n=pow2:16..1024 --max-time 0.5\n"
    "a = torch.ones(n, n)\na @ a",
}
MONITOR = ".jp-OutputArea .gpumagic-monitor"


@contextmanager
def notebook(browser: Browser, *cells: str) -> Iterator[View]:
    """Its first cells have run; the last has not."""
    with laboratory(None) as lab, opened(lab, browser, 980, 1400, "timing") as view:
        view.open_notebook(lab.write("timing.ipynb", [START, *cells]))
        view.page.evaluate("window.jupyterapp.shell.collapseLeft()")
        for number in range(len(cells)):
            view.run_cell(number)
            view.wait_ran(number)
        yield view


def result(name: str) -> Callable[[Browser], None]:
    def scene(browser: Browser) -> None:
        with notebook(browser, CELLS[name]) as view:
            view.run_cell(1)
            view.wait_ran(1)
            cell = view.page.locator(".jp-Notebook .jp-CodeCell").nth(1)
            cell.locator("div.gpumagic").wait_for()

            def shoot(path: Path) -> None:
                cell.screenshot(path=path)

            in_both_themes(view.page, name, shoot)

    return scene


def live(browser: Browser) -> None:
    """While the last device is timed."""
    cell = CELLS["timing"].replace("0 0+1", "0 1").replace("time 3", "time 6")
    with notebook(browser, LIVE, cell) as view:
        view.page.locator(MONITOR).wait_for()

        def shoot(path: Path) -> None:
            theme(view.page, path.stem.rpartition("-")[2])
            view.run_cell(2)
            section = view.page.locator(MONITOR).locator(".results").first
            section.get_by_text("3 of 3").wait_for()
            view.page.wait_for_timeout(1500)
            view.page.locator(MONITOR).screenshot(path=path)
            view.page.wait_for_function(
                "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
                " === 'idle'"
            )

        in_both_themes(view.page, "timing-live", shoot)


if __name__ == "__main__":
    run({**{name: result(name) for name in CELLS}, "timing-live": live})
