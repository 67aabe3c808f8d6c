"""The table of notebooks and the deaths of kernels in a real JupyterLab."""

import json
import shutil

import psutil
import pytest
from playwright.sync_api import expect

MIB = 2**20
DIE = "import os, time\ntime.sleep(1)\nos.kill(os.getpid(), 9)"
CRASH = "import ctypes, time\ntime.sleep(1)\nctypes.string_at(0)"
HOLD = "import time\nheld = bytearray({} * 2**20)"
SPIN = "end = time.time() + 60\nwhile time.time() < end: pass"


@pytest.fixture(scope="module", autouse=True)
def _no_death_is_left(lab, shared_chromium):
    """Start the server again: it keeps deaths, whose notifications cover other tests' buttons."""
    yield
    shared_chromium.drop_page()
    lab.stop()
    lab.start()


@pytest.fixture
def limit(lab):
    """Give the machine's container a RAM limit of 300 MB; returns a function that fills it."""

    def fill(used, kills=0):
        files = {"max": 300 * 10**6, "current": used * 10**6, "events": f"oom_kill {kills}"}
        for name, value in files.items():
            path = lab.group / f"memory.{name}.new"
            path.write_text(str(value))
            path.replace(lab.group / f"memory.{name}")

    yield fill
    shutil.rmtree(lab.group)
    lab.group.mkdir()


def run(view, number):
    view.run_cell(number)
    view.wait_ran(number)


def dies(view, number, title):
    """Runs the cell in which the kernel dies, and waits until the panel says so."""
    view.run_cell(number)
    view.shows(title)
    # JupyterLab's own word about the kernel.
    view.page.get_by_role("dialog").get_by_role("button", name="Ok").click()


def active_cell(view):
    return view.page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex")


def deaths(view):
    return json.loads(view.lab.request("gpumagic/api/deaths"))


def test_a_killed_kernel_is_told_and_its_cell_is_found(lab, view):
    lab.write("killed.ipynb", ["1", DIE, "2"])
    view.open_notebook("killed.ipynb")
    run(view, 0)
    dies(view, 1, "killed.ipynb's kernel was killed (signal 9) while In [2] ran")
    view.shows("variables are lost")
    assert "memory" not in view.panel.locator(".death b").inner_text()
    toast = view.page.locator(".jp-toastContainer, .Toastify").get_by_role(
        "button", name="Go to In [2]"
    )
    expect(toast).to_have_count(1)
    view.page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex = 2")
    toast.click()
    view.wait_until(lambda: active_cell(view) == 1)
    # Also from the card, after the notebook was closed.
    view.close_documents()
    view.panel.get_by_role("button", name="Go to In [2]").click()
    view.wait_until(lambda: active_cell(view) == 1)
    view.panel.get_by_role("button", name="Dismiss").click()
    view.hides("was killed")


def test_a_crash_has_its_line(lab, view):
    lab.write("crash.ipynb", ["%load_ext gpumagic", CRASH])
    view.open_notebook("crash.ipynb")
    run(view, 0)
    dies(view, 1, "crash.ipynb's kernel crashed (segmentation fault, signal 11) while In [2] ran")
    view.shows("a cell, line 3")


def test_running_out_of_ram_is_seen_before_and_after(lab, view, limit):
    limit(150)
    lab.write("grow.ipynb", [HOLD.format(60), "held = bytearray(600 * 2**20)\n" + DIE])
    view.open_notebook("grow.ipynb")
    run(view, 0)
    view.shows("143/286 MiB")
    expect(view.panel.locator(".meter.warn")).to_have_count(0)
    limit(290)
    expect(view.panel.locator(".meter.warn").first).to_be_visible()
    limit(150, kills=1)
    view.run_cell(1)
    view.shows("grow.ipynb's kernel was killed by the out-of-memory killer while In [2] ran")
    view.shows("of the container's 286 MiB of RAM")
    view.page.get_by_role("dialog").get_by_role("button", name="Ok").click()


def test_three_kernels_and_no_death_without_a_death(lab, view):
    known = len(deaths(view))
    pids = {}
    for name, held in (("small", 5), ("busy", 5), ("large", 300)):
        lab.write(f"{name}.ipynb", [HOLD.format(held), SPIN, "exit()"])
        view.open_notebook(f"{name}.ipynb")
        run(view, 0)
    view.open_notebook("busy.ipynb")
    view.run_cell(1)
    kernels = {}

    def measured():
        kernels.update(
            {
                one["notebook"]: one
                for one in json.loads(lab.request("gpumagic/api/snapshot"))["kernels"]
            }
        )
        return (kernels["busy.ipynb"]["cpu"] or 0) > 30 and len(kernels) == 3

    view.wait_until(measured)
    for one in kernels.values():
        process = psutil.Process(one["pid"])
        assert one["host_memory"] == pytest.approx(process.memory_info().rss, rel=0.05)
        pids[one["kernel"]] = one["pid"]
    assert kernels["large.ipynb"]["host_memory"] > 300 * MIB
    assert kernels["small.ipynb"]["cpu"] < 40
    for name in ("small", "busy", "large"):
        row = view.panel.locator("li.process").filter(has_text=f"{name}.ipynb")
        expect(row).to_contain_text("MiB")
        expect(row).to_contain_text("%")
    expect(view.panel.locator("li.process").filter(has_text="busy.ipynb")).to_contain_text("In [2]")
    # One is restarted by the user, and one ends by itself.
    busy, small = kernels["busy.ipynb"], kernels["small.ipynb"]
    lab.request(f"api/kernels/{busy['kernel']}/restart", method="POST", data=b"")
    view.open_notebook("small.ipynb")
    view.run_cell(2)

    def restarted():
        found = json.loads(lab.request("gpumagic/api/snapshot"))["kernels"]
        now = {one["kernel"]: one["pid"] for one in found}
        return all(now.get(one["kernel"]) != one["pid"] for one in (busy, small)) and len(now) == 3

    view.wait_until(restarted)
    assert len(deaths(view)) == known
    view.page.get_by_role("dialog").get_by_role("button", name="Ok").click()
