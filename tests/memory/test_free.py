"""`%gpufree`: what no variable holds comes back, to the byte, and nothing else is touched."""

import gc
import io
import sys
import threading
import types

import pytest
import torch

import gpumagic

MIB = 2**20
NESTED = """
def inner(x):
    more = torch.ones(10 * 2**18, device="cuda")
    return more + torch.empty(2**29, device="cuda")
def middle(x):
    kept = x * 2
    return inner(kept)
def outer(x):
    copies = [x + n for n in range(3)]
    return middle(x)
"""


def allocated():
    return torch.cuda.memory_allocated(0)


@pytest.fixture
def held(ip):
    """A notebook that holds 4 MiB by a name."""
    ip.run("x = torch.ones(2**20, device='cuda')")
    return ip


FAILING = [
    "outer(x)",
    "%%ongpu 0\nouter(x)",
    "import asyncio\nasync def run():\n    await asyncio.sleep(0)\n    outer(x)\nawait run()",
    "try:\n    outer(x)\nexcept RuntimeError as error:\n    raise KeyError('a') from error",
    "try:\n    outer(x)\nfinally:\n    outer(x)",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(1) as pool:\n    list(pool.map(outer, [x]))",
    "import threading\nthread = threading.Thread(target=outer, args=[x])\nthread.start()\n"
    "thread.join()\nouter(x)",
    "def steps():\n    yield outer(x)\nnext(steps())",
]


def test_after_an_error_three_deep_only_what_names_hold_is_left(held, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest's keeps the error
    held.run(NESTED)
    before = allocated()
    for cell in FAILING:
        assert "OutOfMemoryError" in held.run(cell).text
        assert allocated() > before + 20 * MIB
        said = held.run("%gpufree").text
        assert allocated() == before, (cell, said)
        assert "on cuda:0" in said
        assert held.run("x + 1;").error is None


def test_the_traceback_stays_on_the_page_and_debug_says_that_it_has_gone(held):
    held.run(NESTED)
    assert "in inner" in held.run("outer(x)").text
    assert "the exception of In [4]: 26.0 MiB on cuda:0" in held.run("%gpufree").text
    assert not hasattr(sys, "last_value")
    assert "No traceback" in held.run("%tb").text
    assert held.run("%debug").error is None


def test_after_debug_has_ended_its_frames_come_back(held, monkeypatch):
    held.run(NESTED)
    held.run("outer(x)")
    monkeypatch.setattr("builtins.input", lambda prompt="": "q")
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert "inner" in held.run("%debug").text
    assert allocated() == 30 * MIB
    held.run("%gpufree")
    assert allocated() == 4 * MIB


@pytest.mark.parametrize("line", ["%gpumem x['q']", "%gpumem nets", "%gpufree n", "%gpumem n"])
def test_an_error_about_a_line_keeps_nothing(held, line):
    held.run("n = 3")
    ran = held.run(line)
    assert ran.text.startswith("UsageError: %gpu")
    assert len(ran.text.splitlines()) == 1
    held.run("del x")
    assert allocated() == 0


def test_an_error_that_holds_nothing_is_left_for_debug(held):
    held.run("1 / 0")
    assert "there was nothing to free" in held.run("%gpufree").text
    assert isinstance(sys.last_value, ZeroDivisionError)


def test_an_optimizer_of_the_error_goes_once_its_name_is_another_ones(held):
    held.run("import torch\nclass Keeps:\n    def step(self):\n        self.x = x\n        1 / 0")
    held.run("opt = Keeps()\nopt.step()")
    held.run("%gpufree")
    held.run("opt = None\ndel x")
    assert allocated() == 0


def test_an_error_that_a_variable_holds_keeps_its_frames(held):
    held.run(NESTED)
    held.run("try:\n    outer(x)\nexcept torch.OutOfMemoryError as error:\n    err = error")
    before = allocated()
    held.run("raise err")
    held.run("%gpufree")
    assert allocated() == before
    held.run("del err\n%gpufree")
    assert allocated() == 4 * MIB


def test_in_an_except_block_the_frames_of_its_error_are_emptied(held):
    held.run(NESTED)
    ran = held.run(
        "def train():\n"
        "    try:\n        outer(x)\n"
        "    except torch.OutOfMemoryError:\n        freed = gpumagic.free_memory()\n"
        "        return freed, torch.cuda.memory_allocated()\n"
        "import gpumagic\nfreed, left = train()"
    )
    assert ran.error is None
    assert held.ns["left"] == 4 * MIB
    assert held.ns["freed"].nbytes == 26 * MIB


def test_outputs_come_back_and_those_that_are_variables_stay(held):
    for cell in ("x * 2", "x", "x[:5] + 1", "3", "[x, x + 1]"):
        held.run(cell)
    assert allocated() == 4 * MIB + 4 * MIB + 512 + 4 * MIB
    freed = gpumagic.free_memory()
    assert allocated() == 4 * MIB
    assert [each.cause for each in freed.released] == ["Out[3], Out[5], Out[7]"]
    assert freed.nbytes == 8 * MIB + 512
    assert sorted(held.ns["Out"]) == [4, 6]
    assert "_3" not in held.ns
    assert "_4" in held.ns
    held.run("x.sum() * 0 + 7")
    assert "tensor(7." in held.run("_").text


def test_an_underscore_that_the_user_assigned_is_a_variable(held):
    held.run("_ = x + 1\n__ = x + 2\n_9 = x + 3")
    held.run("%gpufree")
    assert allocated() == 16 * MIB


@pytest.mark.parametrize(("where", "left"), [("0", 1), ("cuda:1", 0)])
def test_a_gpu_may_be_named_and_the_outputs_of_others_stay(held, where, left):
    for gpu in (0, 1):
        held.run(f"torch.ones(2**20, device='cuda:{gpu}')")
    before = torch.cuda.memory_allocated(left)
    assert "4.0 MiB on cuda:" in held.run(f"%gpufree {where}").text
    assert torch.cuda.memory_allocated(left) == before
    assert "there are cuda:0 and cuda:1" in held.run("%gpufree 7").text


def test_names_come_back_and_say_who_else_holds_them(held):
    held.run("y = x\nz = torch.ones(2**20, device='cuda:1')\nz")
    said = held.run("%gpufree z y").text
    assert "z" not in held.ns
    assert "4.0 MiB on cuda:1" in said
    assert held.ns["y"] is held.ns["x"]
    assert "y stays: x holds its memory too" in said
    assert "4.0 MiB on cuda:0 still allocated, most by x" in said
    assert torch.cuda.memory_allocated(1) == 0


def test_garbage_is_not_told_as_what_was_named(held):
    held.run("class A: pass\na = A()\na.a, a.t = a, torch.ones(2**19, device='cuda')\ndel a")
    assert (
        "freed 6.0 MiB (garbage: 2.0 MiB on cuda:0, x: 4.0 MiB on cuda:0)"
        in held.run("%gpufree x").text
    )


def test_what_was_made_meanwhile_is_not_told_as_freed(held):
    make = "made.append(torch.ones(2**18, device='cuda:1'))"
    held.run(f"made = []\nclass A:\n    def __del__(self): {make}\na = A()\na.x = x\ndel x")
    said = held.run("%gpufree a").text
    assert "freed 4.0 MiB (a: 4.0 MiB on cuda:0) · 1.0 MiB on cuda:1 still allocated" in said


def test_what_a_backward_pass_that_failed_left_in_its_queue_comes_back(held):
    held.run("full = torch.empty(1000 * 2**18, device='cuda')")
    held.run("w = torch.ones(512, 512, device='cuda', requires_grad=True)")
    before = allocated()
    held.run(
        "g = w\ntry:\n    for n in range(99):\n        s = (g @ w).sin().sum()\n"
        "        g, = torch.autograd.grad(s, w, create_graph=True)\n"
        "except RuntimeError:\n    del g, s"
    )
    assert allocated() > before
    held.run("%gpufree")
    assert allocated() == before


def test_what_is_there_comes_back_though_another_name_is_gone(held):
    held.run("n = 3")
    freed = gpumagic.free_memory("nothing", "x", "n")
    assert "freed 4.0 MiB" in repr(freed)
    assert freed.skipped == ("there is no variable 'nothing'", "n holds nothing on a GPU")
    assert all(why in repr(freed) for why in freed.skipped)
    assert allocated() == 0


def test_all_outputs_have_a_name(held):
    held.run("x + 1")
    said = held.run("%gpumem Out").text
    assert "Out: 4.0 MiB" in said
    assert "also held by _" in said
    assert "Out[3]: 4.0 MiB on cuda:0" in held.run("%gpufree Out").text
    assert "Out" in held.ns
    assert allocated() == 4 * MIB


def test_what_gpumem_names_may_be_typed_and_twice_too(held, monkeypatch):
    helper = types.ModuleType("helper")
    helper.__file__, helper.big = "/home/me/helper.py", torch.ones(2**18, device="cuda")
    monkeypatch.setitem(sys.modules, "helper", helper)
    held.run("x + 1")
    assert "there is no variable 'helper'" in held.run("%gpufree helper").text
    said = held.run("%gpufree Out[3] helper x x").text
    assert "(Out[3]: 4.0 MiB on cuda:0, x: 4.0 MiB on cuda:0)" in said
    assert "there is no variable 'helper'" in said
    assert allocated() == MIB


def test_bad_input_is_told_in_a_line_and_frees_nothing(held):
    held.run("n = 3\nx + 1")
    before = allocated()
    for line, words in (
        ("%gpufree nonsense", "no variable 'nonsense'"),
        ("%gpufree xx", "no variable 'xx'; %gpumem shows what is on a GPU"),
        ("%gpufree torhc", "no variable 'torhc'; did you mean torch?"),
        ("%gpufree n", "n holds nothing on a GPU"),
        ("%gpufree torch", "torch holds nothing on a GPU"),
        ("%gpufree x.grad", "x.grad is a part of x, and %gpufree deletes whole variables; %gpumem"),
        ("%gpufree x[0]", "x[0] is a part of x, and %gpufree deletes whole variables; %gpumem"),
        ("%gpufree --wrong", "unexpected --wrong"),
    ):
        said = held.run(line).text
        assert words in said
        assert said.strip().count("\n") == 0
        assert allocated() == before


def test_what_is_cached_goes_back_to_the_driver(held):
    held.run("big = torch.empty(2**25, device='cuda')\ndel big")
    reserved = torch.cuda.memory_reserved(0)
    said = held.run("%gpufree").text
    assert reserved - torch.cuda.memory_reserved(0) == 128 * MIB
    assert said.startswith("freed 128 MiB of torch's cache · 4.0 MiB on cuda:0 still allocated")


def test_memory_that_names_share_is_the_first_names(held):
    held.run("part = x[:2]")
    said = held.run("%gpufree x part").text
    assert "freed 4.0 MiB (x: 4.0 MiB on cuda:0; part: nothing)" in said


def test_without_any_gpu_there_is_nothing_to_free(shell):
    assert "there was nothing to free" in shell.run("%gpufree").text


def test_the_line_says_what_was_freed_and_what_is_held_by_whom(held):
    held.run("y = x + 1\ny + 1")
    said = held.run("%gpufree y").text
    assert said.strip() == (
        "freed 8.0 MiB (Out[3]: 4.0 MiB on cuda:0, y: 4.0 MiB on cuda:0)"
        " · 4.0 MiB on cuda:0 still allocated, most by x (4.0 MiB)"
    )


def collections(held, line):
    """How often a line collects all garbage, and its text."""
    began = []

    def note(phase, info):
        if (phase, info["generation"]) == ("start", 2):
            began.append(line)

    gc.callbacks.append(note)
    try:
        said = held.run(line).text
    finally:
        gc.callbacks.remove(note)
    return len(began), said


def test_garbage_is_collected_once_and_again_only_for_a_cycle(held):
    assert collections(held, "%gpufree")[0] == 1
    held.run("a, b = x + 1, torch.ones(2**18, device='cuda:1')\nx * 2")
    times, said = collections(held, "%gpufree a b")
    assert times == 1
    assert "a: 4.0 MiB on cuda:0, b: 1.0 MiB on cuda:1" in said
    held.run("class A: pass\na = A()\na.a, a.t = a, torch.ones(2**18, device='cuda')")
    times, said = collections(held, "%gpufree a")
    assert times == 2
    assert "freed 1.0 MiB (a: 1.0 MiB on cuda:0)" in said


@pytest.mark.parametrize("where", [1, "cuda:1", "GPU:1", torch.device("cuda:1")])
def test_in_a_program_a_gpu_is_named_as_in_the_magic(held, where):
    for gpu in (0, 1):
        held.run(f"torch.ones(2**20, device='cuda:{gpu}')")
    assert gpumagic.free_memory(where).nbytes == 4 * MIB
    assert torch.cuda.memory_allocated(1) == 0
    assert "x: 4.0 MiB on cuda:0" in repr(gpumagic.free_memory(where, "x"))
    for wrong in (7, 2.5, torch.ones(2)):
        with pytest.raises(gpumagic.GpuError, match=r"no GPU 7|is not a device"):
            gpumagic.free_memory(wrong)


def test_an_error_that_was_released_is_no_holder_any_more(held):
    held.run("y = x.view(2, -1)\ndef fail(x):\n    raise ValueError")
    held.run("fail(x)")
    said = held.run("%gpufree x").text
    assert "x stays: y holds its memory too" in said
