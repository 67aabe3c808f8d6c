"""The cell and the line that made what lies on a GPU."""

import pytest
import torch
from torch.cuda import memory

import gpumagic
from gpumagic.memory import allocator
from gpumagic.memory.allocator import Allocator
from gpumagic.memory.memory_report import Made
from gpumagic.usercode.files import last_cell


@pytest.fixture
def made(ip):
    """Tell the cell and line of a variable, as `%gpumem` shows them."""

    def of(name):
        (holder,) = (h for h in gpumagic.memory().holders if h.path == name)
        return str(holder.made)

    return of


def test_a_variable_is_made_in_the_cell_and_line_that_allocated_it(ip, made):
    ip.run("device = 'cuda:1'\nx = zeros(1000, device=device)\ny = x + x")
    assert made("x") == f"{last_cell()}, line 2"
    assert made("y") == f"{last_cell()}, line 3"


def test_the_first_run_of_a_cell_is_told_from_its_second(ip, made):
    ip.run("zeros(3, device='cuda:1')")  # from now on a GPU is used, and cells are stamped
    cell = "x = zeros(1000, device='cuda:1')"
    ip.run(cell)
    first = last_cell()
    ip.run("kept = x")
    ip.run(cell)
    assert made("kept") == f"{first}, line 1"
    assert made("x") == f"{last_cell()}, line 1"


def test_of_a_function_it_is_the_cell_that_ran_it_with_the_line_in_it(ip, made):
    ip.run("def make():\n    return zeros(1000, device='cuda:1')")
    defined = last_cell()
    ip.run("x = make()")
    assert made("x") == f"{last_cell()} ({defined}, line 2)"


def test_of_a_class_it_is_the_cell_that_ran_it_with_the_line_in_the_class(ip, made):
    ip.run(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = zeros(1000, device='cuda:1')"
    )
    defined = last_cell()
    ip.run("n = 1\nnet = Net()")
    assert made("net") == f"{last_cell()} ({defined}, line 4)"


def test_of_a_function_in_its_own_cell_the_cell_is_named_once(ip, made):
    ip.run("def make():\n    return zeros(1000, device='cuda:1')\nx = make()")
    assert made("x") == f"{last_cell()}, line 2"


def test_of_a_timed_cell_it_is_the_line_in_the_cell(ip, made):
    ip.run("%%time\ny = 1\nx = zeros(1000, device='cuda:1')")
    assert made("x") == f"{last_cell()}, line 3"


def test_gradients_are_made_where_backward_is_called(ip, made):
    ip.run("x = torch.ones(1000, device='cuda:1', requires_grad=True)\nloss = (x * x).sum()")
    ip.run("grad = None\nloss.backward()\ngrad, x.grad = x.grad, None")
    assert made("grad") == f"{last_cell()}, line 2"


def test_what_the_user_stamps_stays(ip):
    ip.run("zeros(3, device='cuda:1')")
    memory._set_memory_metadata("mine")
    ip.run("inside = torch.cuda.memory._get_memory_metadata()")
    assert ip.ns["inside"].startswith("In [")
    assert memory._get_memory_metadata() == "mine"
    ip.run("torch.cuda.memory._set_memory_metadata('other')")
    assert memory._get_memory_metadata() == "other"


def test_a_silent_cell_is_not_stamped(ip):
    ip.run("zeros(3, device='cuda:1')")
    ip.run("inside = torch.cuda.memory._get_memory_metadata()", silent=True)
    assert ip.ns["inside"] == ""


@pytest.fixture
def as_real(monkeypatch):
    """Virtual GPUs pass for real ones, which know the line only while it is recorded."""
    monkeypatch.setattr(allocator, "has_virtual", lambda: False)


def test_virtual_gpus_need_no_record(ip):
    assert "virtual GPUs always record" in ip.run("%gpumem --record on").text
    assert not torch._C._cuda_isHistoryEnabled()


def test_record_turns_the_allocators_record_on_and_off(ip, as_real):
    assert "--record was not on" in ip.run("%gpumem --record off").text
    assert "about 2 µs per allocation" in ip.run("%gpumem --record on").text
    assert torch._C._cuda_isHistoryEnabled()
    assert "no longer recorded" in ip.run("%gpumem --record off").text
    assert not torch._C._cuda_isHistoryEnabled()


def test_what_the_user_records_is_left_alone(ip, as_real):
    memory._record_memory_history(max_entries=5)
    for what in ("on", "off"):
        assert "your code already records memory history" in ip.run(f"%gpumem --record {what}").text
    assert torch._C._cuda_isHistoryEnabled()
    ip.run("%unload_ext gpumagic")
    assert torch._C._cuda_isHistoryEnabled()


def test_unloading_ends_our_record(ip, as_real):
    ip.run("%gpumem --record on")
    ip.run("%unload_ext gpumagic")
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_real_gpus_record_is_read_as_torch_gives_it(gpus, monkeypatch):
    """Blocks bear no stamp there, the trace does; frames of torch stand before the user's."""
    file = "<ipython-input-3-abc>"
    frames = [
        {"filename": torch.__file__, "line": 9, "name": "linear"},
        {"filename": file, "line": 5, "name": "<module>"},
        {"filename": __file__, "line": 1, "name": "run"},
    ]
    snapshot = {
        "segments": [
            {
                "device": 0,
                "blocks": [
                    {"address": 512, "size": 512, "state": "active_allocated", "frames": frames},
                    {"address": 1024, "size": 512, "state": "active_allocated", "frames": []},
                    {"address": 1536, "size": 512, "state": "active_allocated", "frames": []},
                    {"address": 2048, "size": 512, "state": "inactive", "frames": frames},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": "alloc", "addr": 512, "user_metadata": "In [1]"},
                {"action": "free_completed", "addr": 512, "user_metadata": "In [2]"},
                {"action": "alloc", "addr": 512, "user_metadata": "In [4]"},
                {"action": "alloc", "addr": 1024, "user_metadata": "In [4]"},
            ]
        ],
    }
    torch.zeros(1, device="cuda:0")
    with monkeypatch.context() as patched:  # before the virtual GPUs go
        patched.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
        patched.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: snapshot)
        made_in = Allocator().made_in
        assert made_in("cuda:0", [512]) == Made("In [4]", 5)
        assert made_in("cuda:0", [1024]) == Made("In [4]")
        assert [made_in("cuda:0", [address]) for address in (1536, 2048, 4096)] == [None] * 3
