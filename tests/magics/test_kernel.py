"""The same in a real kernel, over its wire: where reports go, interrupts, several kernels."""

import os
import re
import time
from queue import Empty

import pytest
from kernels import TIMEOUT, Kernel, text
from snapshots import snapshot_in

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_environment_variable_turned_virtual_gpus_on(kernel):
    found, _ = kernel.run("torch.cuda.device_count()")
    assert text(found) == "2\n"


def test_the_report_comes_last_as_text_and_html(kernel):
    found, reply = kernel.run("%%ongpu 1\nprint('first', end='')\ntorch.zeros(2)")
    assert [kind for kind, _ in found] == ["stream", "execute_result", "display_data"]
    assert found[1][1]["data"]["text/plain"] == "tensor([0., 0.], device='cuda:1')"
    data = found[2][1]["data"]
    assert data["text/plain"].startswith("cuda:1 (virtual")
    assert "<b" in data["text/html"]
    assert reply["status"] == "ok"
    found, _ = kernel.run(f"Out[{reply['execution_count']}] is _")
    assert text(found) == "True\n"


def test_await_and_the_next_cell_is_free(kernel):
    found, _ = kernel.run("%%ongpu 1\nimport asyncio\nawait asyncio.sleep(0.01)\ntorch.zeros(1)")
    assert "device='cuda:1'" in text(found)
    found, _ = kernel.run("torch.zeros(1).device, torch.cuda.current_device()")
    assert text(found) == "(device(type='cpu'), 0)\n"


def test_a_background_task_of_another_cell_is_not_placed(kernel):
    kernel.run(
        "import asyncio\nseen = []\nasync def watch():\n    for _ in range(50):\n"
        "        seen.append(torch.zeros(1).device.type); await asyncio.sleep(0.001)\n"
        "task = asyncio.create_task(watch())"
    )
    found, _ = kernel.run("%%ongpu 1\nawait task\nset(seen), torch.zeros(1).device.index")
    assert "({'cpu'}, 1)" in text(found)


def test_errors_reach_the_front_end_as_the_users_own(kernel):
    found, reply = kernel.run("%%ongpu 1\nx = 1\n\nx / 0")
    # The first trial of a fix imports much, so a progress bar may come first.
    assert [found[0][0], found[-1][0]] == ["error", "display_data"]
    assert reply["ename"] == "ZeroDivisionError"
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(found[0][1]["traceback"]))
    assert "----> 4 x / 0" in shown
    assert "gpumagic" not in shown


def test_an_error_between_devices_is_explained_below_it_and_kept_as_it_is(kernel):
    found, reply = kernel.run("left = torch.ones(2, device='cuda:1')\nleft + torch.ones(2)")
    # The first trial of a fix imports much, so a progress bar may come first.
    assert [found[0][0], found[-1][0]] == ["error", "display_data"]
    assert reply["ename"] == found[0][1]["ename"] == "RuntimeError"
    assert "between devices" not in "".join(found[0][1]["traceback"])
    data = found[-1][1]["data"]
    assert data["text/plain"].startswith("between devices · In [")
    assert "left + torch.ones(2, device=left.device)" in data["text/plain"]
    assert "<table" in data["text/html"]


def test_bad_input_is_one_line_and_an_error_status(kernel):
    found, reply = kernel.run("%%ongpu 7\nnever = 1")
    assert reply["status"] == "error"
    assert text(found).count("\n") == 1
    assert "no GPU 7: there are cuda:0 and cuda:1 (virtual)" in text(found)
    assert text(kernel.run("'never' in globals()")[0]) == "False\n"


def test_errors_of_the_library_are_one_line_too(kernel):
    found, _ = kernel.run("import gpumagic\nwith gpumagic.on(7): pass")
    assert found[0][1]["traceback"] == [f"GpuError: {found[0][1]['evalue']}"]


@pytest.mark.skipif(os.name == "nt", reason="interrupts by signal")
@pytest.mark.parametrize(
    "wait",
    [
        "import time; time.sleep(60)",
        "import asyncio\nfor _ in range(6000): await asyncio.sleep(0.01)",
    ],
)
def test_an_interrupt_stops_the_cell_and_undoes_the_placement(kernel, wait):
    sent = kernel.send(f"%%ongpu 1\nprint('running', flush=True)\n{wait}")
    found = kernel.outputs(sent, until=lambda kind, content: kind == "stream")
    kernel.manager.interrupt_kernel()
    found = kernel.outputs(sent)
    assert any(
        k == "error" and c["ename"] in ("KeyboardInterrupt", "CancelledError") for k, c in found
    )
    assert "cuda:1" in text(found)
    found, _ = kernel.run("torch.zeros(1).device.type, torch.cuda.current_device()")
    assert text(found) == "('cpu', 0)\n"


def test_pages_are_told_of_this_host_while_a_cell_runs_until_the_magics_go(kernel):
    def ask(kind, **content):
        request = kernel.client.session.msg(kind, content)
        kernel.client.control_channel.send(request)
        while True:
            reply = kernel.client.get_control_msg(timeout=TIMEOUT)
            if reply["parent_header"]["msg_id"] == request["header"]["msg_id"]:
                return reply["content"]

    def listed():
        return list(ask("comm_info_request", target_name="gpumagic")["comms"].values())

    sent = kernel.send("import threading\nprint('runs')\nthreading.Event().wait(60)")
    kernel.outputs(sent, until=lambda kind, content: kind == "stream")
    assert listed() == [{"target_name": "gpumagic"}]
    told = ask("gpumagic_request")
    assert told["pid"] == kernel.manager.provisioner.pid
    snapshot = snapshot_in(told["snapshot"])
    assert snapshot.host.name == "node-7"
    assert [gpu.virtual_ordinal for gpu in snapshot.gpus] == [0, 1]
    assert all(process.mine for process in snapshot.processes)
    kernel.manager.interrupt_kernel()
    kernel.outputs(sent)
    kernel.run("%unload_ext gpumagic")
    assert listed() == []
    kernel.run("%load_ext gpumagic")


def test_debug_sees_the_failed_cell(kernel):
    kernel.run(
        "%%ongpu 1\ndef broken():\n    local = torch.ones(3)\n    return local / 'x'\nbroken()"
    )
    sent = kernel.send("%debug", allow_stdin=True)
    for answer in ("p local.device", "q"):
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            try:
                kernel.client.get_stdin_msg(timeout=1)
                break
            except Empty:
                continue
        kernel.client.input(answer)
    assert "device(type='cuda', index=1)" in text(kernel.outputs(sent))


def test_another_kernel_sees_the_virtual_gpus_and_who_holds_them(kernel):
    kernel.run("held = torch.empty(300 * 2**20, dtype=torch.uint8, device='cuda:1')")
    other = Kernel(GPUMAGIC_RUNTIME_DIR=kernel.runtime)
    try:
        found, _ = other.run("%load_ext gpumagic\nsnapshot = %gpus\nsnapshot")
        # What earlier tests left on that GPU is a few MiB.
        assert re.search(r"30\d MiB", text(found))
        assert "virtual" in text(found)
        code = (
            "[(p.pid, p.memory // 2**20 // 10, p.mine) for p in snapshot.processes if p.memory],"
            "[(g.ordinal, g.virtual) for g in snapshot.gpus],"
            " __import__('sys').modules.get('torch')"
        )
        found, _ = other.run(code)
        pid = kernel.manager.provisioner.pid
        held = f"([({pid}, 30, False)], [(None, True), (None, True)], None)"
        assert text(found).replace("\n", "").replace("  ", " ") == held
    finally:
        other.stop()
    kernel.run("del held")


def test_a_killed_kernels_virtual_gpus_are_forgotten(kernel):
    victim = Kernel(GPUMAGIC_RUNTIME_DIR=kernel.runtime, GPUMAGIC_VIRTUAL="1")
    victim.run("%load_ext gpumagic")
    count = "import gpumagic; len(gpumagic.snapshot().gpus)"
    assert text(kernel.run(count)[0]) == "3\n"
    victim.stop()
    assert text(kernel.run(count)[0]) == "2\n"


def test_live_is_shown_once_wherever_it_stands_and_is_the_value(kernel):
    found, reply = kernel.run("m = %gpus --live\nm.close()")
    assert reply["status"] == "ok"
    shown = [content["data"] for kind, content in found if kind == "display_data"]
    # The table, for who has no widgets, and the view that stands for it.
    table, view = shown
    assert "cuda:1" in table["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in view
    found, reply = kernel.run("m = %gpus --live\nm")
    assert [kind for kind, _ in found].count("display_data") == 2
    kernel.run("m.close()")


def test_live_says_how_to_stop_and_that_works(kernel):
    found, _ = kernel.run("m = %gpus --live")
    said = "live until the kernel ends; to end it earlier: m = %gpus --live, then m.close()"
    assert text(found).splitlines()[-1] == said
    assert text(kernel.run("m.close()\nprint(m.comm)")[0]) == "None\n"
