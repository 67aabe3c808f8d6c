"""The widget in a real JupyterLab: live while a cell runs, a table when it ends."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

CELLS = [
    "%load_ext gpumagic\n%gpus --virtual 1 --memory 8GiB\nimport os, time, torch\n"
    "from gpumagic.widget import monitor",
    "m = monitor(0.25)\nm",
    "held = []\n"
    "for step in range(3):\n"
    "    held.append(torch.empty(2**30 // 4, device='cuda'))\n"
    "    while not os.path.exists(f'step-{step}'): time.sleep(0.02)\n",
    "m.show('1 ms', 'Timing')",
    "m.close()",
]
LIVE = ".jp-OutputArea .gpumagic-monitor .all"
SAVED = ".jp-OutputArea div.gpumagic"


@pytest.mark.timeout(300)  # as three tests on one kernel
def test_a_monitor_from_its_first_view_to_its_last_table(view):
    view.lab.write("widget.ipynb", CELLS)
    view.open_notebook("widget.ipynb")
    live = opened(view)
    draws_while_a_cell_runs(view, live)
    is_a_table_in_the_file(view)
    # Loaded again, the page shows the same monitor.
    view.load()
    view.open_notebook("widget.ipynb")
    expect(live).to_contain_text("3.0/8 GiB")
    view.run_cell(4)
    expect(live).to_have_count(0)
    expect(view.page.locator(SAVED).last).to_contain_text("3.0 / 8.0 GiB")
    # The kernel was restarted, which the page says within ten seconds anyway.
    opened(view)
    is_a_table_in_the_file(view)
    view.page.evaluate(
        """async () => {
            await window.jupyterapp.shell.currentWidget.sessionContext.restartKernel();
            document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    expect(live).to_contain_text("the kernel was restarted: run the cell again")
    # One that is ended while it starts says so in the server's log.
    view.page.evaluate(
        "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestKernelInfo()"
    )
    is_a_table_without_its_kernel(view)


def opened(view):
    """The monitor in the output of the notebook's second cell."""
    for number in (0, 1):
        view.run_cell(number)
        view.wait_ran(number)
    live = view.page.locator(LIVE)
    expect(live).to_contain_text("cuda:0")
    return live


def draws_while_a_cell_runs(view, live):
    view.run_cell(2)
    for step in range(3):
        expect(live).to_contain_text(f"{step + 1}.0/8 GiB")
        running = view.page.evaluate(
            "window.jupyterapp.shell.currentWidget.content.widgets[2].model.executionState"
        )
        assert running == "running"
        # Until then the cell waits.
        (view.lab.home / f"step-{step}").touch()
    view.wait_ran(2)
    view.run_cell(3)
    expect(live.locator(".results").last).to_contain_text("Timing")
    live.locator("canvas").last.focus()
    expect(live.locator(".tip")).to_contain_text("In [")


def is_a_table_in_the_file(view):
    expect(view.page.locator(SAVED).last).to_be_hidden()
    view.page.evaluate("window.jupyterapp.shell.currentWidget.context.save()")
    path = view.lab.home / "widget.ipynb"

    def outputs():
        cell = json.loads(path.read_text())["cells"][1]
        return [output["data"] for output in cell["outputs"] if "data" in output]

    view.wait_until(outputs)
    data = outputs()[0]
    assert "</table>" in "".join(data["text/html"])
    assert "cuda:0" in "".join(data["text/plain"])


def is_a_table_without_its_kernel(view):
    view.close_documents()
    view.lab.forget()
    view.open_notebook("widget.ipynb")
    expect(view.page.locator(SAVED).last).to_be_visible()
    expect(view.page.locator(SAVED).last).to_contain_text("cuda:0")
    complaint = view.page.get_by_text("Error displaying widget")
    expect(complaint).to_have_count(1)
    expect(complaint).to_be_hidden()
    # The same complaint, of ipywidgets, in the console.
    view.errors[:] = [e for e in view.errors if "widget model not found" not in e]
