"""`%%gputime` in a real kernel: line and result on the wire, Ctrl-C, what stays as it was."""

import os
import re
import time

import pytest
from kernels import TIMEOUT, text
from ours import OURS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _names(kernel):
    kernel.run("import threading, torch, gpumagic\na = torch.ones(64, 64)")


def wire(kernel, sent, until=None):
    """Every display of a request and every change of one, up to its end."""
    found = []
    while True:
        message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return found
        found.append((kind, content))
        if until and until(kind, content):
            return found


def displays(found):
    return [(k, c) for k, c in found if k in ("display_data", "update_display_data")]


def plain(content):
    return content["data"]["text/plain"].replace("\N{NO-BREAK SPACE}", " ")


def test_a_short_one_is_one_output_and_not_in_out(kernel):
    found = wire(kernel, kernel.send("%%gputime cpu 0 --max-time 0.3 -o result\na @ a"))
    kinds = [kind for kind, _ in found if kind not in ("status", "execute_input")]
    assert kinds == ["display_data"] or kinds[-1] == "update_display_data"
    ((_, content), *_) = displays(found)[-1:]
    assert "cuda:0" in plain(content)
    assert "virtual" in plain(content)
    assert "<" in content["data"]["text/html"]
    found, _ = kernel.run("result is gpumagic.last_comparison(), len(Out)")
    assert text(found).startswith("(True, ")


def test_a_long_one_has_a_line_whose_place_the_result_takes(kernel):
    # However fast the machine is, six of these take more than the 2 s without a line.
    sent = kernel.send("%gputime cpu 0 1 --max-time 1.5 -- threading.Event().wait(0.5); a @ a @ a")
    found = displays(wire(kernel, sent))
    assert found[0][0] == "display_data"
    name = found[0][1]["transient"]["display_id"]
    assert [kind for kind, _ in found].count("display_data") == 1
    lines = [plain(content) for _, content in found[:-1]]
    assert all(re.match(r"(cpu|cuda:\d) · ", line) for line in lines), lines
    assert " of 3" in lines[0]
    assert found[-1][1]["transient"]["display_id"] == name
    assert "text/html" in found[-1][1]["data"]
    assert "cuda:1" in plain(found[-1][1])


@pytest.mark.skipif(os.name == "nt", reason="interrupts by signal")
def test_an_interrupt_shows_and_binds_what_is_finished(kernel):
    values = ",".join(str(n) for n in range(1, 61))
    # On the CPU: Python loses a Ctrl-C that comes in the callback by which a virtual GPU's tensor
    # is freed.
    cell = f"%%gputime cpu --sweep n={values} --max-time 0.2 -o half\ntorch.ones(n, n)"
    sent = kernel.send(cell)
    # Some ten of its 60 parts have been done when it is stopped.
    wire(kernel, sent, until=lambda kind, content: "of 60" in str(content.get("data")))
    kernel.manager.interrupt_kernel()
    found = wire(kernel, sent)
    (error,) = [content for kind, content in found if kind == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert len(error["traceback"]) == 1
    found, _ = kernel.run(
        "half.interrupted, 2 <= len(half.timings) < 60, half.timings[0].median > 0"
    )
    assert text(found) == "(True, True, True)\n"


def test_an_error_names_its_line_and_the_users_code_alone(kernel):
    found, reply = kernel.run("%%gputime cpu 0\nx = 1\n\nx / 0")
    assert reply["ename"] == "ZeroDivisionError"
    (shown,) = [c for kind, c in found if kind == "error"]
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown["traceback"]))
    assert "----> 4 x / 0" in shown
    assert OURS not in shown
    assert "cpu" in shown


def test_variables_random_state_out_and_memory_are_as_before(kernel):
    kernel.run(
        "net = torch.nn.Linear(8, 8).to('cuda:1')\n"
        "opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)\n"
        "log, x = [], torch.ones(4, 8, device='cuda:1')"
    )
    state = (
        "import gc; gc.collect()\n"
        "(hash(str(net.state_dict())), hash(str(opt.state_dict())), log,"
        " hash(torch.get_rng_state().numpy().tobytes()), sorted(k for k in Out if k < {n}),"
        " [torch.cuda.memory_allocated(i) for i in range(2)])"
    )
    before, reply = kernel.run(state.format(n=0))
    n = reply["execution_count"]
    kernel.run(
        "%%gputime cpu 1 --max-time 0.2\nloss = net(x + torch.rand(1, device=x.device)).sum()\n"
        "opt.zero_grad(); loss.backward(); opt.step(); log.append(1)"
    )
    after, _ = kernel.run(state.format(n=0))
    assert text(before) == text(after)
    found, _ = kernel.run(f"{n + 1} in Out, 'loss' in globals()")
    assert text(found) == "(False, False)\n"


def test_the_widget_hears_of_it(kernel):
    kernel.run("from gpumagic.widget import monitor\nm = monitor(0.25)\nm")
    found = wire(kernel, kernel.send("%%gputime cpu 0 --max-time 0.5\na @ a"))
    states = [c["data"].get("state", {}) for kind, c in found if kind == "comm_msg"]
    told = [state["timing"] for state in states if state.get("timing")]
    assert {bar["where"] for bar in told[-1]["bars"]} == {"cpu", "cuda:0"}
    assert any(bar["share"] == 1.0 for bar in told[-1]["bars"])
    (last,) = [state["timings"] for state in states if "timings" in state][-1:]
    assert last[0]["title"].startswith("a @ a")
    assert abs(last[0]["time"] - time.time()) < TIMEOUT
    found, _ = kernel.run("m.timing, m.timings[0]['html'][:1]; m.close()")
