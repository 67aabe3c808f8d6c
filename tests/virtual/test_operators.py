"""Single operators against the CPU; the whole of torch's own list is in benchmarks/."""

import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpumagic.virtual import generic_kernel

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "opinfo_virtual.py"


def x(d, *shape):
    return torch.randn(shape or (6, 8)).to(d)


def module(make, *shape):
    def run(d):
        net, given = make().to(d), x(d, *shape).requires_grad_()
        out = net(given)
        out.square().sum().backward()
        return [out, given.grad, *(p.grad for p in net.parameters())]

    return run


def channels_last(d):
    conv = nn.Conv2d(3, 4, 3).to(d, memory_format=torch.channels_last)
    return conv(x(d, 2, 3, 8, 8).to(memory_format=torch.channels_last))


def grid_sample(d):
    grid = F.affine_grid(torch.eye(2, 3)[None].to(d), [1, 2, 5, 5], align_corners=False)
    return F.grid_sample(x(d, 1, 2, 5, 5), grid, align_corners=False)


def ctc(d):
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    targets = torch.ones(2, 2, dtype=torch.long, device=d)
    return F.ctc_loss(x(d, 5, 2, 4).log_softmax(2), targets, *lengths)


def packed_lstm(d):
    pack = nn.utils.rnn.pack_sequence([torch.randn(4, 5), torch.randn(2, 5)]).to(d)
    return nn.LSTM(5, 7).to(d)(pack)[0].data


def fast_path(d):
    with torch.inference_mode():
        return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).to(d).eval()(x(d, 2, 3, 16))


def padded_transformer(d):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, mask_check=False).to(d).eval()
    padding = torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2], device=d)
    with torch.no_grad():
        return net(x(d, 2, 5, 16), src_key_padding_mask=padding)


def nested_gradient(d):
    given = [x(d, 2, 3).requires_grad_(), x(d, 1, 3).requires_grad_()]
    nested = torch.nested.as_nested_tensor(given)
    torch.nested.to_padded_tensor((nested * 2).relu_(), 0.0).sum().backward()
    return [t.grad for t in given]


def resized(d):
    t, last = torch.arange(6.0, device=d), torch.arange(6.0, device=d)[4:]
    small, images = t.resize_(2, 2).clone(), torch.ones(1, device=d)
    images.resize_(2, 3, 4, 4, memory_format=torch.channels_last)
    return small, t.resize_(9)[:6], last.resize_(3)[:2], torch.tensor(images.stride(), device=d)


CASES = {
    "sort": lambda d: tuple(x(d).sort(1)),
    "topk": lambda d: tuple(x(d).topk(3)),
    "svd": lambda d: torch.linalg.svd(x(d))[1],
    "fft": lambda d: torch.fft.rfft(x(d)),
    "conj": lambda d: torch.complex(x(d), x(d)).conj().imag + 0,
    "index": lambda d: x(d)[torch.tensor([0, 2], device=d)],
    "mask": lambda d: x(d)[x(d) > 0],
    "strides": lambda d: x(d)[:, ::2].contiguous(),
    "einsum": lambda d: torch.einsum("ij,kj->ik", x(d), x(d)),
    "where": lambda d: torch.where(x(d) > 0, x(d), 1.5),
    "scatter": lambda d: x(d).scatter(0, torch.zeros(1, 8, dtype=torch.long, device=d), 1.0),
    "unique": lambda d: torch.unique(x(d).int()),
    "arange": lambda d: torch.arange(0, 10, 0.5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "out=": lambda d: torch.add(x(d), 1, out=torch.empty(0, device=d)),
    "resize_": resized,
    "integers": lambda d: torch.arange(10, device=d) // 3,
    "half to float": lambda d: torch.softmax(x(d).half(), 1, dtype=torch.float32),
    "interpolate": lambda d: F.interpolate(x(d)[None, None], scale_factor=2, mode="bilinear"),
    "one_hot": lambda d: F.one_hot(torch.arange(3, device=d), 6),
    "kaiser_window": lambda d: torch.kaiser_window(4, device=d),
    "fmod": lambda d: [x(d).fmod(2), x(d).fmod_(1.0), x(d).remainder(2)],
    "padded transformer": padded_transformer,
    "nested gradient": nested_gradient,
    "histc": lambda d: torch.histc(x(d), 5),
    "bfloat16": lambda d: x(d).bfloat16() @ x(d, 8, 2).bfloat16(),
    "grid_sample": grid_sample,
    "ctc_loss": ctc,
    "channels_last": channels_last,
    "packed LSTM": packed_lstm,
    "LSTM with projection": lambda d: nn.LSTM(5, 7, proj_size=3).to(d)(x(d, 3, 2, 5))[0],
    "transformer fast path": fast_path,
    "RMSNorm": module(lambda: nn.RMSNorm(8), 4, 8),
    "BatchNorm3d": module(lambda: nn.BatchNorm3d(3), 4, 3, 5, 5, 2),
    "GroupNorm": module(lambda: nn.GroupNorm(2, 4), 4, 4, 5, 5),
    "SyncBatchNorm": module(lambda: nn.SyncBatchNorm(3), 4, 3, 5, 5),
    "depthwise": module(lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), 2, 4, 9, 9),
    "transposed": module(lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), 2, 4, 5, 5),
    "Conv3d": module(lambda: nn.Conv3d(2, 4, 3), 2, 2, 5, 5, 5),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_same_as_the_cpu(case, gpus):
    torch.manual_seed(0)
    cpu = CASES[case]("cpu")
    torch.manual_seed(0)
    gpu = CASES[case]("cuda:1")
    cpu, gpu = (r if isinstance(r, (list, tuple)) else [r] for r in (cpu, gpu))
    assert all(t.device == torch.device("cuda:1") for t in gpu)
    for a, b in zip(cpu, gpu, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-5)


IN_PLACE = {
    "logical_and_": lambda t, other: t.logical_and_(other),
    "logical_or_": lambda t, other: t.logical_or_(other),
    "ldexp_": lambda t, other: t.ldexp_(other),
    "addr_": lambda t, other: t.addr_(other[0], other[0]),
    "out= itself": lambda t, other: torch.add(t, other, out=t),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_nothing_grows_in_place(case, gpus):
    said = []
    for d in ("cpu", "cuda:1"):
        t = torch.ones(5, 1, device=d)
        with pytest.raises(RuntimeError) as caught:
            IN_PLACE[case](t, torch.ones(5, 5, device=d))
        said.append(str(caught.value))
        assert t.shape == (5, 1)
    assert said[0] == said[1]


def test_histc_of_integers_which_cuda_has_and_the_cpu_has_not(gpus):
    experts = torch.tensor([0, 1, 1], dtype=torch.int32, device="cuda")
    counted = torch.histc(experts, bins=2, min=0, max=1)
    assert (counted.tolist(), counted.dtype) == ([1, 2], torch.int32)


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: torch.linalg.qr(t.half()),  # nor has CUDA it
        lambda t: torch.fft.rfft(t.half()),
        lambda t: t.cfloat().nansum(),
    ],
)
def test_a_refusal_names_virtual_gpus(compute, gpus):
    with pytest.raises(
        NotImplementedError, match=r"^virtual GPUs use the CPU's kernels; .* on the CPU failed"
    ):
        compute(torch.ones(2, 2, device="cuda"))


def test_what_fails_in_the_middle_is_not_done_once_more(gpus):
    for device in ("cpu", "cuda:1"):
        first, second = torch.zeros(2, device=device), torch.zeros(2, device=device)
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch._foreach_add_([first, second], [first + 1, torch.ones(3, device=device)])
        assert first.tolist() == [1, 1], device


def test_an_error_is_one_error(gpus):
    x = torch.ones(3, device="cuda")
    for wrong in (lambda: x + x.new_ones(4), lambda: x @ x.new_ones(4), lambda: x.view(2)):
        with pytest.raises(RuntimeError) as raised:
            wrong()
        assert raised.value.__context__ is None


RECURRENT = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, dropout=0.5, bidirectional=True),
    "GRU": lambda: nn.GRU(6, 8, 2, dropout=0.5, batch_first=True),
    "RNN": lambda: nn.RNN(6, 8, 3, dropout=0.5),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks(kind, gpus, same):
    torch.manual_seed(0)
    net, given = RECURRENT[kind](), torch.randn(5, 3, 6)
    cpu = net.eval()(given)[0]
    torch.testing.assert_close(net.to("cuda:1")(given.cuda(1))[0].cpu(), cpu)
    torch.cuda.manual_seed(0)
    one, other = net.train()(given.cuda(1))[0], net(given.cuda(1))[0]
    assert not same(one, other)  # the dropout between layers
    one.sum().backward()
    assert net.weight_hh_l1.grad.device == torch.device("cuda:1")
    with torch.autocast("cuda", torch.float16):
        assert net(given.cuda(1))[0].dtype is torch.float16


def sparse(d):
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 1], [1, 0, 2]], device=d), torch.ones(3, device=d), (3, 3)
    )


def in_place(d):
    t = sparse(d).coalesce()
    t.mul_(2.0)
    return t.add_(sparse(d))


def sparse_gradient(d):
    w = torch.ones(3, 2, device=d, requires_grad=True)
    torch.sparse.mm(sparse(d), w).sum().backward()
    return w.grad


def sparse_adam(d):
    table = nn.Embedding(10, 3, sparse=True).to(d)
    opt = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        opt.zero_grad()
        table(torch.tensor([1, 2, 1], device=d)).square().sum().backward()
        opt.step()
    return table.weight.detach()


SPARSE = {
    "made": sparse,
    "from dense": lambda d: torch.eye(3, device=d).to_sparse(),
    "dense": lambda d: sparse(d).to_dense(),
    "sum": lambda d: sparse(d) + sparse(d),
    "product": lambda d: torch.sparse.mm(sparse(d), torch.ones(3, 2, device=d)),
    "both sparse": lambda d: sparse(d) @ sparse(d),
    "in place": in_place,
    "gradient": sparse_gradient,
    "SparseAdam": sparse_adam,
    "softmax": lambda d: torch.sparse.softmax(sparse(d), 1),
    "there and back": lambda d: sparse(d).cpu().to(d),
    "CSR": lambda d: torch.eye(3, device=d).to_sparse_csr() @ torch.ones(3, 2, device=d),
}


@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse(case, gpus, same):
    torch.manual_seed(0)
    cpu = SPARSE[case]("cpu")
    torch.manual_seed(0)
    gpu = SPARSE[case]("cuda:1")
    assert gpu.device == torch.device("cuda:1")
    assert same(cpu, gpu)
    del gpu
    assert torch.cuda.memory_allocated(1) == 0


def opinfo(*options):
    pytest.importorskip("expecttest")
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_slice_of_opinfo(tmp_path, monkeypatch):
    """In a child that has torch already; what torch's tests change at import stays there."""
    pytest.importorskip("expecttest")
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    said = tmp_path / "said"
    child = os.fork()
    if not child:
        status = 1
        try:
            with said.open("w") as out, redirect_stdout(out), redirect_stderr(out):
                status = importlib.import_module(BENCHMARK.stem).main(["--sample", "40"])
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, said.read_text()
    assert "0 wrong device" in said.read_text()


@pytest.mark.slow
def test_a_slice_of_the_crash_hunt():
    pytest.importorskip("expecttest")
    command = [sys.executable, str(BENCHMARK.with_name("crash_hunt.py")), "--sample", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^torch\.Tensor +\d+ +[1-9]", done.stdout, re.M)


@pytest.mark.slow
def test_all_of_opinfo():
    done = opinfo("--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: int(n) for n, _, kind in (p.partition(" ") for p in _parts(done.stdout))}
    right = counts["bit-exact"] + counts["refused"]
    assert sum(counts.values()) - right <= 22  # of the 702 of torch 2.13
    assert counts["refused"] == 2  # histograms, which CUDA has not
    assert counts["wrong device"] == 0


def _parts(text):
    return text.splitlines()[-1].partition(": ")[2].split(", ")


@pytest.mark.parametrize(
    ("product", "said"),
    [
        (lambda x: x @ x, "\"addmm_cuda\" not implemented for 'Long'"),
        (lambda x: x @ x[0], "\"addmv_impl_cuda\" not implemented for 'Long'"),
        (lambda x: x[0] @ x[0], "\"dot\" not implemented for 'Long'"),
        (lambda x: x[None] @ x[None], "\"baddbmm_cuda\" not implemented for 'Long'"),
        (lambda x: nn.functional.linear(x, x, x[0]), "\"addmm_cuda\" not implemented for 'Long'"),
        (lambda x: torch.histogram(x.float(), 3), "aten::histogram.bin_ct"),
    ],
)
def test_what_cuda_has_not_is_not_there(gpus, product, said):
    with pytest.raises(NotImplementedError, match=re.escape(said)):
        product(torch.ones(2, 2, dtype=torch.long, device="cuda"))


def test_matrices_of_two_types_are_called_as_cuda_calls_them(gpus):
    x = torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match="expected mat1 and mat2 to have the same dtype"):
        x @ x.double()


def test_two_threads_may_be_the_first_to_call_an_operator(gpus, monkeypatch):
    others = []

    class Slow(dict):
        # A second thread calls the operator while the first one reads its schema.
        def get(self, name):
            if not others:
                others.append(ThreadPoolExecutor(1))
                others.append(others[0].submit(kernel, x).result())
            return super().get(name)

    x = torch.ones(3, device="cuda")
    monkeypatch.setattr(generic_kernel, "RULES", Slow())
    kernel = generic_kernel.kernel_of(torch.ops.aten.neg.default, dense=True)
    assert kernel(x).tolist() == [-1, -1, -1]
    assert others[1].tolist() == [-1, -1, -1]
