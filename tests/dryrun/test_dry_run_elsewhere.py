"""Dry runs for cards that are not here, on a machine without a GPU and beside virtual ones."""

import pytest
import torch
from dry_runs import dry, of_cell
from torch import nn
from torch.nn import functional as F

import gpumagic
from gpumagic.device.cards import CONTEXT, card

MIB = 2**20


def step(net, optimizer, X):
    print(torch.cuda.get_device_name(), torch.cuda.device_count())
    optimizer.zero_grad()
    net(X).square().mean().backward()
    optimizer.step()
    return torch.empty(256, 2**20)


def test_a_machine_without_a_gpu_says_what_fits_where():
    net = nn.Linear(1024, 1024, bias=False)  # 4 MiB, and as much for each gradient and state
    optimizer, X = torch.optim.AdamW(net.parameters()), torch.randn(64, 1024)
    result = gpumagic.dry_run(step, net, optimizer, X, on="H100 80GB, 1.25GiB")
    assert result.complete, result
    assert result.printed == "H100 80GB 1\n"
    assert {m.name: m.nbytes for m in result.moved} == {"net": 4 * MIB, "X": 2**18}
    h100, small = result.cards
    assert h100.card == card("H100 80GB")
    assert h100.fits
    assert h100.at is None
    # Weights, gradient, two moments and what is returned; nothing of this process is on a card.
    assert h100.needed == small.needed == pytest.approx(16 * MIB + 2**30, rel=0.001)
    assert h100.left == h100.card.total - CONTEXT - h100.card.workspace - h100.needed
    assert not small.fits
    assert "return torch.empty" in small.at.source
    assert net.weight.device.type == "cpu"
    assert not torch.cuda.is_available()
    start = f"does not fit on 1.25GiB from line {small.at.line} of step() on"
    assert f"fits on H100 80GB (77.6 GiB left); {start}" in str(result)


def test_tensors_without_memory_take_none_of_a_card():
    def step():
        with torch.device("meta"):
            net = nn.Linear(2**16, 2**16)
        return torch.ones(net.in_features)

    (there,) = gpumagic.dry_run(step, on="T4").cards
    assert there.needed == 4 * 2**16


def test_attention_there_holds_no_matrix_of_weights():
    def attend(kind):
        q = torch.randn(2, 8, 4096, 64, device="cuda", dtype=kind, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    for kind in (torch.bfloat16, torch.float32):
        (there,) = gpumagic.dry_run(attend, kind, on="RTX 4090").cards
        assert there.needed < 2 * 8 * 4096**2


@pytest.mark.usefixtures("gpus")
def test_what_is_on_a_gpu_here_counts_in_full_there():
    space = {"torch": torch, "a": torch.ones(2**20, device="cuda:1"), "b": torch.ones(9).cuda(0)}
    result = of_cell("c = a * 2", space, on="24GiB")
    assert result.cards[0].needed == 8 * MIB
    assert result.assigned[0].device == "cuda:0"
    assert [moved.sources for moved in result.moved] == [("cuda:1",)]
    assert "cuda:1 → 24GiB" in str(result)
    assert "cuda:0" not in str(result)
    assert str(space["a"].device) == "cuda:1"


def test_a_cell_is_asked_with_on(ip):
    ip.ns["a"] = torch.ones(2**20)
    result = dry(ip, "b = a * 2", "--on 'rtx 4090, 1GiB'")
    assert [(on.card.name, on.needed) for on in result.cards] == [
        ("RTX 4090 24GB", 8 * MIB),
        ("1GiB", 8 * MIB),
    ]
    for line, said in {
        "1 --dry-run --on 4090": "--on and 1 do not combine; leave out one of them",
        "--on 4090": "--on needs --dry-run; type %%ongpu --dry-run --on",
        "--dry-run --on 4091": "no card '4091' is known; did you mean 'RTX 4090 24GB'",
        "--dry-run --on '8 x 4090'": "no card '8 x 4090' is known; did you mean 'RTX 4090 24GB'",
        "@all --dry-run --on 4090": "--on and @all do not combine; leave out one of them",
    }.items():
        assert f"UsageError: %%ongpu: {said}" in ip.run(f"%%ongpu {line}\na").text


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("RTX 4091", "no card 'RTX 4091' is known; did you mean 'RTX 4090 24GB'"),
        (["A100 40GB", "nix"], "no card 'nix' is known"),
        ("8 x H100 80GB", "no card '8 x H100 80GB' is known; did you mean 'H100 80GB'"),
        ("@all", "no card '@all' is known; .*; or type a device: 1, cuda:1, cpu, free"),
        ("cuda;1", "or a size: 24GiB; or type a device: 1, cuda:1, cpu, free"),
        ("cuda:1", "no cuda:1"),
    ],
)
def test_what_is_neither_here_nor_known_is_one_line(on, said):
    with pytest.raises(gpumagic.GpuError, match=said) as raised:
        gpumagic.dry_run(print, on=on)
    assert "\n" not in str(raised.value)
