"""Prove the stand-in CUDA runtime on what torch's own CUDA code does with it."""

import copy
import os
import subprocess
import sys
import time
import warnings

import pytest
import standin_cuda
import torch
from torch import nn

import gpumagic

pytestmark = pytest.mark.usefixtures("gpus")
MIB = 2**20


def python(code, **environment):
    """What a new process prints, on GPUs of its own unless STANDIN_CUDA_USED says otherwise."""
    own = "STAND_IN_NVML", "STANDIN_CUDA_USED"
    env = {name: value for name, value in os.environ.items() if name not in own}
    env |= {"STANDIN_CUDA_MEMORY": "1024", "STANDIN_CUDA_CONTEXT": "64"} | environment
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_two_devices_with_the_properties_of_a_hopper():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    there = torch.cuda.get_device_properties(1)
    assert (there.name, there.major, there.multi_processor_count) == ("Stand-in H100", 9, 132)
    assert torch.cuda.get_device_capability() == (9, 0)


def test_a_tensor_is_printed_as_on_a_gpu():
    assert repr(torch.ones(2, device="cuda:1")) == "tensor([1., 1.], device='cuda:1')"


def test_torch_words_the_errors_of_devices_itself():
    x = torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:[01] and cuda:[01]"):
        x + x.cuda(1)
    with pytest.raises(RuntimeError, match=r"mat2 is on cpu.*wrapper_CUDA_mm"):
        x @ torch.ones(2, 2)


def test_the_caching_allocator_is_torch_s():
    with standin_cuda.log() as log:
        sizes = 400, MIB + 1, 30 * MIB + 1
        kept = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
    assert torch.cuda.memory_allocated() == 512 + (MIB + 512) + (30 * MIB + 512)
    assert torch.cuda.memory_reserved() == log.bytes("malloc") == (2 + 20 + 32) * MIB
    free, total = torch.cuda.mem_get_info()
    assert total - free == standin_cuda.used()
    del kept


def test_out_of_memory_in_torch_s_words_with_this_process_s_memory():
    held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    text = (
        r"Tried to allocate 4\.00 GiB\. GPU 0 has a total capacity of 1024\.00 MiB of which .* is"
    )
    with pytest.raises(torch.OutOfMemoryError, match=text) as caught:
        torch.empty(2**32, dtype=torch.uint8, device="cuda")
    assert "this process has 100.00 MiB memory in use" in str(caught.value)
    del held


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, pinned: pinned.to("cuda", non_blocking=True), {"h2d": 4000}),
        (lambda x, pinned: x.sum().item(), {"d2h": 4, "waits": 1}),
        (lambda x, pinned: x.cpu(), {"d2h": 4000, "waits": 1}),
        (lambda x, pinned: torch.ones(9).cuda(), {"h2d": 36, "waits": 1}),
        (lambda x, pinned: x.to("cuda:1"), {"peer": 4000}),
        (lambda x, pinned: x.nonzero(), {"d2h": 4, "waits": 1}),
        (lambda x, pinned: torch.cuda.synchronize(), {"waits": 1}),
        (lambda x, pinned: x + 1, {}),
    ],
    ids=["pinned", "item", "cpu", "cuda", "peer", "nonzero", "synchronize", "add"],
)
def test_copies_and_waits(run, expected):
    x, pinned = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
    with standin_cuda.log() as log:
        run(x, pinned)
    found = {way: log.bytes(way) for way in ("h2d", "d2h", "peer")}
    found["waits"] = log.count(*standin_cuda.WAITS)
    assert {key: n for key, n in found.items() if n} == expected


def test_values_are_the_cpu_s_whatever_the_way():
    host = torch.randn(500)
    there = host[::2].to("cuda", torch.float64)[:, None].expand(250, 3).t().contiguous().half()
    assert torch.equal(there.cpu(), host[::2].double()[:, None].expand(250, 3).t().half())
    torch.manual_seed(0)
    first = torch.randn(7, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(torch.randn(7, device="cuda"), first)
    assert not torch.equal(torch.randn(7, device="cuda"), first)


def trained(net, x, device):
    """Losses of three steps."""
    net, x, losses = copy.deepcopy(net).to(device), x.to(device), []
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        found = net(x)
        loss = (found[0] if isinstance(found, tuple) else found).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


NETS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (4, 5)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        (2, 3, 8, 8),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
    ),
    "LSTM": (lambda: nn.LSTM(5, 6, 2, bidirectional=True), (4, 2, 5)),
    "GRU": (lambda: nn.GRU(5, 6), (4, 2, 5)),
    "RNN": (lambda: nn.RNN(5, 6), (4, 2, 5)),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_train_to_the_cpu_s_numbers(name):
    make, shape = NETS[name]
    torch.manual_seed(1)
    net, x = make(), torch.randn(*shape)
    assert trained(net, x, "cuda") == pytest.approx(trained(net, x, "cpu"), rel=1e-4)


def test_data_parallel():
    net = nn.Linear(4, 3).cuda()
    x = torch.randn(8, 4, device="cuda")
    split = nn.DataParallel(net)(x)
    assert torch.allclose(split, net(x))
    split.sum().backward()
    assert torch.allclose(net.weight.grad, x.sum(0).expand(3, 4), atol=1e-5)


def test_work_takes_as_long_as_it_is_told():
    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    standin_cuda.slow(kernel_us=50_000)
    with torch.cuda.stream(side):
        begun.record()
        x + 1
        ended.record()
    assert not ended.query()
    assert torch.cuda.current_stream().query()
    side.synchronize()
    assert 50 <= begun.elapsed_time(ended) < 60
    standin_cuda.slow(malloc_ms=20)
    start = time.perf_counter()
    torch.empty(64 * MIB, device="cuda")
    assert time.perf_counter() - start >= 0.02


def test_what_nobody_computes_is_an_error_with_its_name():
    spin = r"not computed by the stand-in: \w*spin"
    with standin_cuda.log() as log, pytest.raises(RuntimeError, match=spin):
        torch.cuda._sleep(100)
    assert log.count("refused") == 1
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="cudaStreamBeginCapture"), graph:
        pass


STAYS = {
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    710: "device-side assert triggered",
    719: "unspecified launch failure",
}


@pytest.mark.parametrize("code", STAYS)
def test_an_error_that_stays(code):
    x = torch.ones(3, device="cuda")
    standin_cuda.plant(code, after=2)
    x + 1
    torch.cuda.synchronize()
    x + 1
    for call in (torch.cuda.synchronize, lambda: x + 1, x.cpu):
        with pytest.raises(RuntimeError, match=f"CUDA error: {STAYS[code]}"):
            call()
    standin_cuda.mend()


def test_an_index_out_of_bounds_asserts_after_the_call():
    x, index = torch.ones(3, device="cuda"), torch.tensor([7], device="cuda")
    x[index]
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        torch.cuda.synchronize()
    standin_cuda.mend()


def test_a_busy_gpu_is_one_error_and_a_lost_one_stays_lost():
    standin_cuda.plant(46)
    with pytest.raises(RuntimeError, match="busy or unavailable"):
        torch.ones(3, device="cuda")
    standin_cuda.lose(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="busy or unavailable"):
            torch.ones(3, device="cuda:1")
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    standin_cuda.mend()
    assert torch.ones(3, device="cuda:1").sum().item() == 3


def test_nvml_tells_the_same_gpus_and_this_process_s_memory():
    held = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda:1")
    snapshot = gpumagic.snapshot()
    uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(2)]
    assert [gpu.uuid for gpu in snapshot.gpus] == uuids
    assert [gpu.ordinal for gpu in snapshot.gpus] == [0, 1]
    mine = [p for p in snapshot.processes if p.uuid == uuids[1]]
    assert [(p.pid, p.memory) for p in mine] == [(os.getpid(), standin_cuda.used(1))]
    assert standin_cuda.used(1) >= 300 * MIB
    del held


@pytest.mark.parametrize("visible", ["0,1", "1,0", "1", "", "1,7,0"])
def test_cuda_visible_devices(visible):
    told = python(
        "from torch.cuda import *\n"
        "print(*[get_device_properties(i).uuid for i in range(device_count())])",
        CUDA_VISIBLE_DEVICES=visible,
    )
    expected = {"1,7,0": "1"}.get(visible, visible)  # what follows an unknown one is not seen
    assert [int(uuid[-2:]) for uuid in told.split()] == [int(n) for n in expected.split(",") if n]


def test_processes_share_a_gpu_s_memory(tmp_path):
    code = (
        "import sys, subprocess, torch\n"
        "held = torch.empty(700 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "child = 'import torch; print(torch.cuda.mem_get_info()[0] // 2**20)'\n"
        "subprocess.run([sys.executable, '-c', child])"
    )
    # Two contexts of 64 MiB.
    assert python(code, STANDIN_CUDA_USED=str(tmp_path / "used")) == str(1024 - 700 - 2 * 64)


def test_a_forked_child_has_no_cuda():
    told = python(
        "import os, torch\ntorch.ones(1, device='cuda')\nread, write = os.pipe()\n"
        "if not os.fork():\n"
        "    try: torch._C._cuda_synchronize()\n"
        "    except RuntimeError as e: os.write(write, str(e).encode())\n    os._exit(0)\n"
        "print(os.read(read, 200).decode())"
    )
    assert "initialization error" in told


def test_without_the_variable_there_is_no_gpu():
    assert python("import torch; print(torch.cuda.device_count())", STANDIN_CUDA_DEVICES="") == "0"


def test_torch_s_profiler_runs():
    x = torch.ones(3, device="cuda")
    with warnings.catch_warnings(), torch.profiler.profile() as profile:
        x.sum().item()
    assert "aten::sum" in [event.key for event in profile.key_averages()]
