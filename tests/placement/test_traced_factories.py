"""Functions that torch.compile traces in a placed cell: whole graphs, one for each device."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpumagic

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]
GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")
BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def _dynamo_as_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, backend="eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factory_is_traced_and_follows_the_placement(backend):
    make = compiled(lambda: torch.ones(2) + torch.tensor([1.0, 2.0]), backend)
    devices = []
    for where in (1, None, 0, 1, "cpu"):
        if where is None:
            made = make()
        else:
            with gpumagic.on(where):
                made = make()
        assert made.tolist() == [2, 3]
        devices.append(str(made.device))
    assert devices == ["cuda:1", "cpu", "cuda:0", "cuda:1", "cpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_gives_the_numbers_of_the_cpu(backend):
    def loss(net, batch):
        mask = torch.triu(torch.full((4, 4), 2.0)) * torch.arange(4)
        return (net(batch) @ mask + torch.eye(4)).square().mean()

    torch.manual_seed(0)
    net, batch = nn.Linear(4, 4), torch.randn(4, 4)
    loss(net, batch).backward()
    wanted, net.weight.grad = net.weight.grad, None
    with gpumagic.on(1) as device:
        gpumagic.move((net, batch), device)
        compiled(loss, backend)(net, batch).backward()
    assert net.weight.grad.device == GPU1
    torch.testing.assert_close(net.weight.grad.cpu(), wanted)


def test_what_the_code_says_wins():
    def make(x):
        return (
            torch.zeros(2, device="cuda:0"),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros_like(x),
            torch.as_tensor(x),
            torch.as_tensor([1.0]),
            torch.zeros(2, device=x.device),
            torch.normal(0.0, 1.0, (2,)),
        )

    x = torch.ones(2)
    with gpumagic.on(1):
        made = compiled(make)(x)
    cpu = torch.device("cpu")
    assert [each.device for each in made] == [GPU0, GPU1, cpu, cpu, GPU1, cpu, GPU1]
    assert made[1].dtype == torch.int64


def test_a_device_context_of_the_user_wins():
    make = compiled(lambda: torch.ones(2))
    with gpumagic.on(1):
        assert make().device == GPU1
        with torch.device("cuda:0"):
            assert make().device == GPU0
        assert make().device == GPU1


def test_an_inner_placement_and_another_thread_have_their_own():
    make = compiled(lambda: torch.ones(2))
    with gpumagic.on(1):
        with gpumagic.on(0):
            assert make().device == GPU0
        assert make().device == GPU1
        found = []
        thread = threading.Thread(target=lambda: found.append(make().device))
        thread.start()
        thread.join()
    assert [str(device) for device in found] == ["cpu"]


def test_a_module_is_compiled_in_the_cell():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            positions = torch.arange(x.shape[1])
            return self.layer(x + positions) + F.one_hot(positions, 3).sum(0)

    with gpumagic.on(1):
        net = Net()
        x = torch.ones(2, 3)
        made = compiled(net)(x)
        assert made.device == GPU1
        torch.testing.assert_close(made, net(x))


CELL = """
import gpumagic, torch
from gpumagic import virtual
virtual.enable(2, 2**28)
with gpumagic.on(1):
    make = torch.compile(lambda: torch.ones(2), backend="eager", fullgraph=True)
    print(make().device)
print(make().device)
"""


def test_dynamo_may_be_imported_inside():
    done = subprocess.run([sys.executable, "-c", CELL], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["cuda:1", "cpu"], done.stderr
