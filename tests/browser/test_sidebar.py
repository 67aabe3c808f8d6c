"""The panel and the status bar in a real JupyterLab, on virtual GPUs and on the stand-in."""

import json

import psutil
import pytest
from playwright.sync_api import expect

GIB = 2**30

ALLOCATE = [
    "%load_ext gpumagic\n%gpus --virtual 1 --memory 8GiB\nimport torch",
    "weights = torch.empty(2 * 2**30 // 4, device='cuda')",
]
SECOND_MS = 1000


def allocate(view):
    """A notebook that holds 2 GiB of a virtual GPU."""
    view.lab.write("train.ipynb", ALLOCATE)
    view.open_notebook("train.ipynb")
    view.run_cell(0)
    view.wait_ran(0)
    view.shows("cuda:0")
    view.run_cell(1)
    view.wait_ran(1)


@pytest.mark.timeout(300)  # as two tests on one kernel
def test_a_notebook_that_allocates_is_seen_also_by_a_page_loaded_again_and_ended(view):
    view.shows("H100")
    allocate(view)
    view.shows("2.0/8 GiB", 2 * SECOND_MS)
    view.shows("train.ipynb")
    expect(view.panel.locator(".who.own").first).to_be_visible()
    expect(view.status).to_contain_text("cuda:0 0 % · 2.0/8 GiB")
    has_the_past_and_the_panel_when_loaded_again(view)
    # The first snapshots of a page may have no processes.
    expect(view.panel.locator("li.process").filter(has_text="train.ipynb")).to_contain_text(
        "2.0 GiB"
    )
    view.panel.get_by_role("button", name="Shut down the kernel: train.ipynb").click()
    dialog = view.page.get_by_role("dialog")
    expect(dialog).to_contain_text("train.ipynb holds 2.0 GiB")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert "2.0/8 GiB" in view.says()
    view.panel.get_by_role("button", name="Shut down the kernel: train.ipynb").click()
    dialog.get_by_role("button", name="Shut down").click()
    view.hides("2.0/8 GiB")
    view.wait_until(lambda: json.loads(view.lab.request("api/kernels")) == [])


def has_the_past_and_the_panel_when_loaded_again(view):
    histories = []
    view.on_message("history", histories.append)
    view.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    view.save_layout()
    view.load()
    # Not opened by the test: it was open before.
    view.shows("2.0/8 GiB")
    view.wait_until(lambda: histories)
    past = histories[0]["history"]
    assert len(past["time"]) >= 2
    assert any(2 * GIB in columns["memory_used"] for columns in past["gpus"].values())
    assert "train.ipynb" in {run["notebook"] for run in histories[0]["cells"]}


def test_the_keyboard_is_enough(view):
    view.shows("cuda:0")
    view.page.evaluate("window.jupyterapp.shell.collapseRight()")
    expect(view.panel).to_be_hidden()
    view.status.focus()
    view.page.keyboard.press("Enter")
    expect(view.panel).to_be_visible()
    for name in ("Open as a page", "cuda:0"):
        view.page.keyboard.press("Tab")
        button = view.panel.get_by_role("button", name=name)
        expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-expanded", "true")
    view.page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "false")
    view.page.keyboard.press("Space")
    expect(button).to_have_attribute("aria-expanded", "true")


def test_commands_show_the_panel_and_the_doctor(view):
    view.shows("cuda:0")
    assert "state files" not in view.says()
    view.page.evaluate("window.jupyterapp.commands.execute('gpumagic:doctor')")
    view.shows("state files")
    view.page.evaluate("window.jupyterapp.commands.execute('gpumagic:doctor')")
    view.hides("state files")


def test_an_invalid_setting_in_the_users_file_leaves_the_defaults(lab, view):
    view.spoiled = True
    lab.write_settings('{"period": "fast"}')
    view.load()
    view.open_panel()
    view.shows("H100")
    expect(view.status).to_contain_text("cuda:0")


def test_settings_hold_at_once(lab, view):
    lab.machine({"gpu.0.util": 3, "gpu.1.util": 97})
    view.shows("H100")
    expect(view.status).to_contain_text("cuda:1 97 %")
    wants = []
    view.on_message("want", wants.append)
    view.set(period=7)
    view.wait_until(lambda: wants and wants[-1]["period"] == 5)
    view.set(memoryAlert=False, heatAlert=False, idleAlert=False, faultAlert=False)
    view.wait_until(lambda: wants[-1]["period"] == 7)
    view.set(statusBar=False)
    expect(view.status).to_be_hidden()


def test_an_alert_is_told_once(lab, view):
    view.set(memorySeconds=1)
    lab.write("mine.ipynb", [])
    mine = kernel(view, "notebook", "mine.ipynb")
    full = {"total": 80 * GIB, "used": 79 * GIB}
    lab.machine(
        {f"gpu.{n}.{name}": value for n in (0, 1) for name, value in full.items()}
        | {"gpu.0.compute": f"{mine}:{7 * GIB}"}
    )
    toast = view.page.get_by_text("memory is nearly full")
    expect(toast).to_have_count(1)
    seen = []
    view.on_message("snapshot", seen.append)
    view.wait_until(lambda: len(seen) >= 4)
    expect(toast).to_have_count(1)


def kernel(view, kind, name):
    """The pid of a kernel that a session of this kind has begun."""
    model = {"type": kind, "path": name, "name": name, "kernel": {"name": "python3"}}
    answer = view.lab.request("api/sessions", method="POST", data=json.dumps(model).encode())
    kernel_id = json.loads(answer)["kernel"]["id"]
    for process in psutil.process_iter(["cmdline"]):
        if any(kernel_id in part for part in process.info["cmdline"] or ()):
            return process.pid
    raise AssertionError("no process of the kernel")


def current(view):
    return view.page.evaluate("window.jupyterapp.shell.currentWidget?.sessionContext?.path")


def test_go_to_brings_the_notebook_wherever_it_is(lab, view):
    for name in ("far.ipynb", "near.ipynb"):
        lab.write(name, [])
    far = kernel(view, "notebook", "far.ipynb")
    lab.machine({"gpu.1.used": 9 * GIB, "gpu.1.compute": f"{far}:{7 * GIB}"})
    go = view.panel.get_by_role("button", name="Go to the notebook: far.ipynb")
    # It is not open at all; behind another; and closed again.
    go.click()
    view.wait_until(lambda: current(view) == "far.ipynb")
    view.open_notebook("near.ipynb")
    view.wait_until(lambda: current(view) == "near.ipynb")
    go.click()
    view.wait_until(lambda: current(view) == "far.ipynb")
    view.page.evaluate(
        """async () => {
            const { currentWidget } = window.jupyterapp.shell;
            await currentWidget.context.save();
            currentWidget.close();
        }"""
    )
    view.wait_until(lambda: current(view) != "far.ipynb")
    go.click()
    view.wait_until(lambda: current(view) == "far.ipynb")
    expect(view.panel.locator(".who.own").first).to_be_visible()


def test_go_to_brings_a_console(lab, view):
    pid = kernel(view, "console", "console-1")
    lab.machine({"gpu.1.used": 9 * GIB, "gpu.1.compute": f"{pid}:{7 * GIB}"})
    view.panel.get_by_role("button", name="Go to the notebook: console-1").click()
    view.wait_until(lambda: current(view) == "console-1")
    assert len(json.loads(lab.request("api/sessions"))) == 1


def test_a_busy_cell_is_interrupted_from_the_panel(lab, view):
    lab.write("busy.ipynb", ["import time\nprint('on')\ntime.sleep(600)"])
    pid = kernel(view, "notebook", "busy.ipynb")
    lab.machine({"gpu.1.used": 9 * GIB, "gpu.1.compute": f"{pid}:{7 * GIB}"})
    view.open_notebook("busy.ipynb")
    view.run_cell(0)
    prompt = view.page.locator(".jp-NotebookPanel .jp-InputPrompt").first
    output = view.page.locator(".jp-OutputArea").first
    # A kernel that is only starting would die of it.
    expect(output).to_contain_text("on")
    interrupt = view.panel.get_by_role("button", name="Interrupt the kernel: busy.ipynb")
    # From another notebook only after a question.
    lab.write("near.ipynb", [])
    view.open_notebook("near.ipynb")
    view.wait_until(lambda: current(view) == "near.ipynb")
    interrupt.click()
    dialog = view.page.get_by_role("dialog")
    expect(dialog).to_contain_text("busy.ipynb is not the current notebook.")
    dialog.get_by_role("button", name="Cancel").click()
    view.open_notebook("busy.ipynb")
    view.wait_until(lambda: current(view) == "busy.ipynb")
    assert "KeyboardInterrupt" not in output.inner_text()
    interrupt.click()
    expect(output).to_contain_text("KeyboardInterrupt")
    expect(prompt).to_have_text("[1]:")


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_orphan_is_ended_from_the_panel(lab, view):
    leave = (
        "import os, subprocess\n"
        # In a group of its own it is not killed along with its kernel.
        "left = [subprocess.Popen(['sh', '-c', command], preexec_fn=os.setpgrp)\n"
        "        for command in ('exec sleep 600', 'trap : TERM; while :; do sleep 1; done')]\n"
        "open('left', 'w').write(' '.join(str(one.pid) for one in left))"
    )
    lab.write("leave.ipynb", [leave, "os.kill(os.getpid(), 9)"])
    view.open_notebook("leave.ipynb")
    view.run_cell(0)
    view.wait_ran(0)
    pid, stubborn = map(int, (lab.home / "left").read_text().split())
    lab.machine({"gpu.1.used": 9 * GIB, "gpu.1.compute": f"{pid}:{5 * GIB},{stubborn}:{2 * GIB}"})
    view.shows("leave.ipynb")
    view.run_cell(1)
    view.shows("still running")
    # JupyterLab's own word about the kernel.
    view.page.get_by_role("dialog").get_by_role("button", name="Ok").click()
    view.panel.get_by_role("button", name=f"End orphaned process: leave.ipynb (PID {pid})").click()
    dialog = view.page.get_by_role("dialog").filter(has_text="End the process?")
    expect(dialog).to_contain_text(f"sleep (PID {pid}) holds 5.0 GiB")
    dialog.get_by_role("button", name="End it").click()
    view.wait_until(lambda: has_ended(pid))
    assert view.page.get_by_text("still runs").count() == 0
    # One that will not hear is killed, after a second question.
    view.panel.get_by_role("button", name=f"(PID {stubborn})").click()
    dialog.get_by_role("button", name="End it").click()
    dialog = view.page.get_by_role("dialog").filter(has_text="Kill the process?")
    expect(dialog).to_contain_text(f"sh (PID {stubborn}) holds 2.0 GiB")
    assert not has_ended(stubborn)
    dialog.get_by_role("button", name="Kill it").click()
    view.wait_until(lambda: has_ended(stubborn))
