"""Modules, files, data loaders, and work on two devices at once."""

import copy
import threading

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("gpus")


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


def test_a_module_keeps_its_parameters():
    net = mlp()
    parameters = list(net.parameters())
    net.cuda(1)
    for before, after in zip(parameters, net.parameters(), strict=True):
        assert before is after
        assert type(after) is nn.Parameter
        assert after.device == torch.device("cuda:1")
    twin = copy.deepcopy(net)
    assert twin[0].weight.device == torch.device("cuda:1")
    assert twin[0].weight.data_ptr() != parameters[0].data_ptr()
    assert net.cpu()[0].weight is parameters[0]


@pytest.mark.parametrize(
    ("where", "device"),
    [
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda:0"), "cuda:0"),
        (lambda storage, location: storage, "cpu"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
    ],
    ids=["none", "cpu", "name", "device", "function", "dict"],
)
def test_saved_and_loaded(tmp_path, where, device, same):
    net = mlp().to("cuda:1")
    torch.save(net.state_dict(), tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", map_location=where)
    assert loaded["0.weight"].device == torch.device(device)
    assert same(list(loaded.values()), list(net.state_dict().values()))
    fresh = mlp().to("cuda:0")
    fresh.load_state_dict(loaded)
    assert same(fresh[0].weight, net[0].weight)
    assert fresh[0].weight.device == torch.device("cuda:0")


def test_an_optimizer_is_saved_with_its_state(tmp_path, same):
    net = mlp().to("cuda:1")
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 12, device="cuda:1")).sum().backward()
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    other = torch.optim.Adam(mlp().to("cuda:0").parameters())
    other.load_state_dict(torch.load(tmp_path / "opt.pt"))
    first, second = (o.state[o.param_groups[0]["params"][0]]["exp_avg"] for o in (opt, other))
    assert same(first, second)
    assert second.device == torch.device("cuda:0")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:The argument 'device':DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_pins_memory(workers):
    data = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    loader = torch.utils.data.DataLoader(
        data, 5, shuffle=True, num_workers=workers, pin_memory=True
    )
    total = 0
    for x, y in loader:
        assert x.is_pinned()
        assert x.to("cuda", non_blocking=True).device.type == "cuda"
        total += y.cuda(1).sum().item()
    assert total == 45


def test_model_parallel(same):
    def step(one, other):
        torch.manual_seed(0)
        a, b = nn.Linear(10, 20).to(one), nn.Linear(20, 3).to(other)
        x = torch.randn(4, 10).to(one).requires_grad_()
        b(torch.relu(a(x)).to(other)).square().sum().backward()
        return a.weight.grad, b.weight.grad, x.grad

    cpu, gpu = step("cpu", "cpu"), step("cuda:0", "cuda:1")
    assert [g.device.index for g in gpu] == [0, 1, 0]
    assert same(cpu, gpu)


def test_data_parallel():
    torch.manual_seed(0)
    net, x = mlp(), torch.randn(8, 12)
    expected = net(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    out = nn.DataParallel(net.cuda(0), device_ids=[0, 1])(x.cuda(0))
    out.sum().backward()
    assert out.device == torch.device("cuda:0")
    assert torch.allclose(out.cpu(), expected, atol=1e-6)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-5)


def test_a_thread_per_device():
    losses = {}

    def work(i):
        with torch.cuda.device(i):
            net = mlp().cuda()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(5):
                opt.zero_grad()
                loss = net(torch.ones(4, 12, device="cuda")).square().mean()
                loss.backward()
                opt.step()
            losses[i] = loss.device.index

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses == {0: 0, 1: 1}
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1)
