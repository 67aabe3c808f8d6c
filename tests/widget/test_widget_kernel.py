"""The widget in a real kernel: all of it over the wire."""

import pytest
from kernels import TIMEOUT, Kernel

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    runtime = str(tmp_path_factory.mktemp("kernels"))
    started = Kernel(GPUMAGIC_RUNTIME_DIR=runtime, GPUMAGIC_VIRTUAL="1")
    started.run("%load_ext gpumagic\nimport torch, threading\nfrom gpumagic.widget import monitor")
    yield started
    started.stop()


def wire(kernel, code):
    """Everything that a request sends, up to its end, as (type, content)."""
    sent, found = kernel.send(code), []
    while True:
        message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
        content = message["content"]
        found.append((message["msg_type"], content))
        ended = message["parent_header"].get("msg_id") == sent
        if ended and content.get("execution_state") == "idle":
            kernel.client.get_shell_msg(timeout=TIMEOUT)
            return found


def errors(found):
    return [content["evalue"] for kind, content in found if kind == "error"]


def test_the_output_is_a_table_and_the_view_and_in_the_end_the_table(kernel):
    found = wire(kernel, "m = monitor(0.25)\nm")
    table, view = [content for kind, content in found if kind == "display_data"]
    assert "<table" in table["data"]["text/html"]
    assert "Virtual GPU" in table["data"]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in view["data"]
    found = wire(kernel, "m.close()")
    updates = [content for kind, content in found if kind == "update_display_data"]
    last = {content["transient"]["display_id"]: content["data"] for content in updates}
    assert "<table" in last[table["transient"]["display_id"]]["text/html"]
    assert set(last[view["transient"]["display_id"]].values()) == {""}
    assert [kind for kind, _ in found].count("comm_close") == 2


@pytest.mark.parametrize("time", ["first", "second", "third"])
def test_each_time_it_is_displayed_once(kernel, time):
    kinds = [kind for kind, _ in wire(kernel, "%gpus --live")]
    assert kinds.count("display_data") == 2
    assert "execute_result" not in kinds
    assert errors(wire(kernel, "_.close()")) == []


def test_when_a_cell_has_run_the_table_is_brought_up_to_date(kernel):
    wire(kernel, "m = monitor(0.25)\nm")
    found = wire(kernel, "held = torch.empty(1000 * 2**20, dtype=torch.uint8, device='cuda')")
    # Told at the cell's end, be it before or after the word that it has ended.
    while not any(
        kind == "update_display_data" and "1000 MiB" in content["data"]["text/plain"]
        for kind, content in found
    ):
        message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
        found.append((message["msg_type"], message["content"]))
    assert errors(wire(kernel, "del held\nm.close()")) == []


@pytest.mark.parametrize("wait", ["pass", "threading.Event().wait(0.01)"])
def test_it_draws_while_a_cell_runs(kernel, wait):
    code = (
        "m = monitor(0.25)\nbegan = m.snapshot['time']\n"
        f"while m.snapshot['time'] < began + 0.7: {wait}\nm.close()"
    )
    found = wire(kernel, code)
    states = [content["data"].get("state", {}) for kind, content in found if kind == "comm_msg"]
    assert len([state for state in states if "snapshot" in state]) >= 2
    assert errors(found) == []


def test_a_view_speaks_over_the_wire(kernel):
    wire(kernel, "m = monitor(0.25)")
    found = wire(kernel, "print(m.comm.comm_id)")
    comm = "".join(c["text"] for kind, c in found if kind == "stream").strip()
    for kind in ("alive", "gone"):
        data = {"method": "custom", "content": {"type": kind, "id": "a"}}
        message = kernel.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        kernel.client.shell_channel.send(message)
    found = wire(kernel, "assert not m._running and m._subscription.closed\nm.close()")
    assert errors(found) == []


def test_two_hundred_in_a_kernel_leave_no_thread_comm_or_hook(kernel):
    code = (
        "import comm, gc\nfrom gpumagic.telemetry.sampler import shared_sampler\n"
        "def count():\n"
        "    gc.collect()\n"
        "    for thread in threading.enumerate():\n"
        "        if thread.name.startswith('gpumagic'): thread.join(10)\n"
        "    hooks = sum(map(len, get_ipython().events.callbacks.values()))\n"
        "    return (threading.active_count(), len(comm.get_comm_manager().comms), hooks,\n"
        "            bool(shared_sampler()._watching))\n"
        "m = monitor(); m.close(); del m; before = count()\n"
        "for _ in range(200): m = monitor(); m.close()\n"
        "del m; after = count(); assert before == after, (before, after)"
    )
    assert errors(wire(kernel, code)) == []


def test_when_the_kernel_ends_the_table_stays(tmp_path):
    ended = Kernel(GPUMAGIC_RUNTIME_DIR=str(tmp_path), GPUMAGIC_VIRTUAL="1")
    try:
        ended.run("%load_ext gpumagic\nfrom gpumagic.widget import monitor\nm = monitor()\nm")
        ended.manager.request_shutdown()
        while True:
            message = ended.client.get_iopub_msg(timeout=TIMEOUT)
            if message["msg_type"] == "update_display_data":
                break
        assert set(message["content"]["data"]) == {"text/plain", "text/html"}
    finally:
        ended.stop()
