"""No frame of ours in the tracebacks that plain Python makes; all of the user's are there."""

import sys
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import gpumagic
from gpumagic.usercode.files import is_ours

pytestmark = [
    pytest.mark.usefixtures("gpus"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps one frame of ours"),
]


def there(*shape):
    return torch.ones(*shape, device="cuda:1")


def here(*shape):
    return torch.ones(*shape, device="cpu")


FAILING = {
    "two devices": lambda: there(2, 2) + here(2, 2),
    "shapes": lambda: there(2, 2) @ there(3, 3),
    "no memory": lambda: torch.empty(2**45, device="cuda:1"),
    "convolution": lambda: F.conv2d(there(1, 1, 3, 3), here(1, 1, 3, 3)),
    "index": lambda: there(2)[there(1).long() * 9],
    "no device": lambda: torch.ones(2, device="cuda:7"),
    "set device": lambda: torch.cuda.set_device(7),
    "attention": lambda: F.scaled_dot_product_attention(*[there(1, 2, 2)] * 2, here(1, 2, 2)),
    "refused": lambda: torch.quantize_per_tensor(there(2), 1, 1, torch.qint8),
    "no type": lambda: torch.linalg.inv(there(2, 2).half()),
    "copy": lambda: there(2).copy_(here(3)),
    "stream": lambda: torch.cuda.Stream(device=7),
    "storage": lambda: there(2).untyped_storage().resize_(9),
    "factory": lambda: torch.zeros(-1),
    "tensor": lambda: torch.tensor("a"),
    "converter": lambda: torch.as_tensor("a"),
    "from numpy": lambda: torch.from_numpy(3),
    "load": lambda: torch.load("/no/such/file"),
    "legacy": lambda: torch.FloatTensor("a"),
    "normal": lambda: torch.normal(1.0, 2.0),
    "batches": lambda: next(iter(DataLoader([object()]))),
    "wrapped": lambda: gpumagic.on(1)(lambda: there(2).item())(),
}  # fmt: skip
AROUND = {
    "plain": nullcontext,
    "placed": lambda: gpumagic.on(1),
    "watched": lambda: gpumagic.watch(warn=False),
}


def failure(function):
    """The files of the traceback of the error that a function raises, the innermost last."""
    with pytest.raises((RuntimeError, TypeError, IndexError, OSError)) as caught:
        function()
    told = traceback.format_exception(caught.value)
    return [line.split('"')[1] for row in told for line in row.splitlines() if 'File "' in line]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("what", FAILING)
def test_none_is_ours(what, around):
    with AROUND[around]():
        files = failure(FAILING[what])
    assert __file__ in files
    assert not [file for file in files if is_ours(file)]


def test_those_of_the_users_below_ours_stay():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise RuntimeError("mine")

    @gpumagic.on(1)
    def train():
        return next(iter(DataLoader(Data())))

    files = failure(train)
    assert files.count(__file__) == 3  # above, in train and in the dataset
    x = there(2).requires_grad_()
    x.register_hook(lambda grad: grad + here(3))
    assert failure(lambda: x.sum().backward())[-1] == __file__


def test_developers_see_ours(monkeypatch):
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    assert failure(FAILING["two devices"])[-1].endswith("checks.py")


def test_a_cell_that_prints_its_traceback_shows_none(ip):
    ip.run("import traceback; c = torch.ones(2)")
    shown = ip.run(
        "%%ongpu 1 --no-move\ntry:\n    c + torch.ones(2)\n"
        "except RuntimeError:\n    print(traceback.format_exc())"
    ).text
    assert "at least two devices" in shown
    assert "gpumagic" not in shown.partition("RuntimeError")[0]
