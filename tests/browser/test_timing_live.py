"""`%%gputime` in a real JupyterLab: bars that grow while it runs, then the result."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

LIVE = ".jp-OutputArea .gpumagic-monitor .all"
BOARD = """\
import os, time
from gpumagic.telemetry.history import board
def bars(*shares):
    names = ("cpu", "cuda:0", "cuda:1", "cuda:0+cuda:1")
    return [{"where": w, "share": s, "text": f"{4 * s:.1f} ms" if s else "waiting"}
            for w, s in zip(names, shares)]
for shares in ((1, .25, 0, 0), (1, .25, .27, .5)):
    board.post({"line": f"a @ a · {sum(map(bool, shares))} of 4 devices", "bars": bars(*shares)})
    while not os.path.exists(f"posted-{sum(map(bool, shares))}"): time.sleep(0.02)
board.post(None)
board.keep("cuda:0 is 4 × faster", time.time(), "a @ a", bars(1, .25))
"""
START = (
    "%load_ext gpumagic\n%gpus --virtual 2 --memory 8GiB\nimport torch\n"
    "from gpumagic.widget import monitor\na = torch.randn(400, 400)"
)
WATCH = "m = monitor(0.25)\nm"
# It lasts as long on any machine.
TIMED = "%%gputime cpu 0 1 --max-time 2 -o result\na @ a; time.sleep(0.2)"
SWEEP = "%%gputime cpu 0 --sweep n=64,128,256 --max-time 0.1\nb = torch.ones(n, n)\nb @ b"


def opened(view, *cells):
    """A notebook whose second cell shows the monitor."""
    view.lab.write("timing.ipynb", [START, WATCH, *cells])
    view.open_notebook("timing.ipynb")
    for number in (0, 1):
        view.run_cell(number)
        view.wait_ran(number)
    live = view.page.locator(LIVE)
    expect(live).to_contain_text("cuda:1")
    return live


def filled(bars):
    """The share of each bar that is full, from 0 to 100."""
    return bars.evaluate_all(
        "nodes => nodes.map(node => parseFloat(node.querySelector('.bar')"
        ".style.gridTemplateColumns) || 0)"
    )


@pytest.mark.timeout(300)  # as two tests on one kernel
def test_it_is_live_then_a_result_in_the_notebook_the_section_and_the_file(view):
    live = opened(view, BOARD, TIMED, SWEEP)
    expect(live.locator(".results").first).to_be_hidden()
    bars_grow_while_a_cell_runs(view, live)
    the_real_thing_is_live_and_then_a_result(view, live)
    the_file_keeps_the_result_alone(view)


def bars_grow_while_a_cell_runs(view, live):
    section = live.locator(".results").first
    view.run_cell(2)
    expect(section).to_contain_text("2 of 4 devices")
    assert filled(section.locator("> .paces .pace")) == [100, 25, 0, 0]
    # Until then the cell waits.
    (view.lab.home / "posted-2").touch()
    expect(section).to_contain_text("4 of 4 devices")
    assert filled(section.locator("> .paces .pace")) == [100, 25, 27, 50]
    (view.lab.home / "posted-4").touch()
    view.wait_ran(2)
    expect(section).not_to_contain_text("devices")
    section.locator("ul > li > details > summary").press("Enter")
    expect(section.locator("details")).to_contain_text("4 × faster")
    assert filled(section.locator(".result .pace")) == [100, 25]
    # A monitor that is opened afterwards lists what was measured.
    view.run_cell(1)
    expect(view.page.locator(LIVE)).to_have_count(1)
    expect(view.page.locator(LIVE).locator(".results").first).to_contain_text("a @ a")


def the_real_thing_is_live_and_then_a_result(view, live):
    use_theme(view, "Dark")
    section = live.locator(".results").first
    view.run_cell(3)
    expect(section.locator("> .paces .pace")).to_have_count(3)
    # The line below the cell, while it takes longer than two seconds.
    output = view.page.locator(".jp-Notebook .jp-CodeCell").nth(3).locator(".jp-OutputArea")
    expect(output).to_contain_text("of 3")
    view.wait_ran(3)
    expect(output.locator("div.gpumagic")).to_contain_text("cuda:0")
    expect(output.locator(".jp-OutputArea-output")).to_have_count(1)
    use_theme(view, "Light")
    view.run_cell(4)
    view.wait_ran(4)
    expect(section.locator("ul > li > details > summary")).to_have_count(3)
    expect(section.locator("ul > li > details > summary").first).to_contain_text("b")
    section.locator("ul > li > details > summary").first.click()
    expect(section.locator(".result pre").first).to_contain_text("cuda:0 (virtual)")


def the_file_keeps_the_result_alone(view):
    view.page.evaluate("window.jupyterapp.shell.currentWidget.context.save()")
    path = view.lab.home / "timing.ipynb"

    def outputs():
        return json.loads(path.read_text())["cells"][3]["outputs"]

    view.wait_until(outputs)
    (kept,) = outputs()
    assert "cuda:0" in "".join(kept["data"]["text/plain"])
    html = "".join(kept["data"]["text/html"])
    assert "<svg" in html or "gpumagic" in html


def use_theme(view, name):
    view.page.evaluate(
        "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
        f"JupyterLab {name}",
    )
