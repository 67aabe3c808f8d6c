"""`gpumagic.explain`: what it reads, what it leaves alone, and when it says nothing."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from snippets import names_told, run

import gpumagic

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]


def test_an_error_that_cannot_be_printed_is_none_of_ours():
    class Odd(RuntimeError):
        def __str__(self):
            raise ValueError

    assert gpumagic.explain(Odd()) is None
    assert (
        gpumagic.explain(RuntimeError("Expected all tensors to be on the same device")) is None
    )  # never raised


def test_what_the_text_says_and_what_the_frame_shows_must_agree():
    error = run(
        "x = torch.ones(2, device='cuda:1')\ny = torch.ones(2)\n"
        "def check(*tensors):\n"
        "    raise RuntimeError('found at least two devices, cuda:0 and cpu! same device')\n"
        "torch.nn.functional.relu_later = check\n"
        "x + check(x, y)"
    )
    assert gpumagic.explain(error) is None


def test_the_text():
    error = run(
        "device = 'cuda:0'\nnet = nn.Linear(784, 10).to(device)\n"
        "images, labels = torch.rand(64, 784), torch.randint(10, (64,))\n"
        "loss = F.cross_entropy(net(images), labels)",
        name="train.py",
    )
    assert str(gpumagic.explain(error)) == (
        "between devices · train.py, line 4: net(images)\n"
        "  net     cuda:0  30.7 KiB  Linear, 2 tensors\n"
        "  images  cpu      196 KiB  float32[64, 784]   ← the odd one\n"
        "  labels  cpu        512 B  int64[64]          ← also to move\n"
        "  fix: train.py, before line 4 (moves 196 KiB)\n"
        "      images, labels = images.to(device), labels.to(device)"
    )


def test_html_is_escaped():
    error = run("x = {'<b>': torch.ones(2)}\ny = x['<b>'] * torch.ones(2).cuda()")
    html = gpumagic.explain(error)._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


SPIES = """
class Spy:
    count = 0
    def __init__(self):
        self.tensor = torch.ones(2)
        self.items = {"x": torch.ones(2)}
    def __getattr__(self, name):
        Spy.count += 1
        return torch.ones(2)
    @property
    def computed(self):
        Spy.count += 1
        return torch.ones(2)
    def __getitem__(self, key):
        Spy.count += 1
        return torch.ones(2)
    def __call__(self):
        Spy.count += 1
        return torch.ones(2)
    def __len__(self):
        Spy.count += 1
        return 1
    def __repr__(self):
        Spy.count += 1
        return "spy"
    __eq__ = __lt__ = __bool__ = lambda self, *other: 1 / 0
spy = Spy()
y = torch.ones(2, device="cuda")
"""


@pytest.mark.parametrize(
    "expression",
    ["spy.computed", "spy.unknown", "spy[0]", "spy()", "spy.items['x']", "spy.tensor"],
)
def test_nothing_of_the_users_is_run_again(expression):
    namespace = {}
    code = f"{SPIES}\nSpy.count = 0\ntry:\n    y + {expression}\nfinally:\n    seen = Spy.count\n"
    error = run(code, namespace=namespace)
    frame = error.__traceback__.tb_next.tb_frame.f_globals
    explanation = gpumagic.explain(error)
    assert frame["Spy"].count == frame["seen"]
    assert [o.devices for o in explanation.operands] == [("cuda:0",), ("cpu",)]
    assert str(explanation)


def test_no_tensor_and_no_frame_is_kept():
    def fail():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        seen.append(weakref.ref(y))
        return x + y

    seen = []
    try:
        fail()
    except RuntimeError as error:
        explanation = gpumagic.explain(error)
    gc.collect()
    assert seen[0]() is None
    assert explanation.fix is not None


def test_a_module_that_was_imported_is_explained_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "my_layers.py").write_text(
        "import torch\ndef shift(h):\n    return h + torch.ones(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    error = run("import my_layers\nmy_layers.shift(torch.ones(2, 3).cuda())")
    explanation = gpumagic.explain(error)
    assert (explanation.label, explanation.line) == ("my_layers.py", 3)
    assert explanation.fix.code.strip() == "return h + torch.ones(3, device=h.device)"
    assert explanation.fix.filename == str(tmp_path / "my_layers.py")


def test_a_librarys_frames_are_not_the_users(tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "their_net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(3, 2)\n"
        "    def forward(self, z):\n        return self.a(z)\n"
        "def apply(net, z):\n    z = z.to('cuda')\n    return net(z) + z.cpu().sum(1)\n"
    )
    monkeypatch.syspath_prepend(library)
    error = run("from their_net import Net\nnet = Net().cuda()\nx = torch.ones(2, 3)\ny = net(x)")
    explanation = gpumagic.explain(error)
    assert {o.name: o.odd for o in explanation.operands} == {"net": False, "x": True}
    # What failed is within, and the operands that can be seen are not to blame.
    inside = run(
        "from their_net import Net, apply\nnet = Net().cuda()\nx = torch.ones(2, 3)\napply(net, x)"
    )
    assert "same device" in str(inside)
    assert gpumagic.explain(inside) is None


def test_an_errors_context_is_looked_into():
    code = (
        "a, b = torch.ones(2).cuda(), torch.ones(2)\n"
        "try:\n    a + b\nexcept RuntimeError:\n    raise KeyError('later')"
    )
    assert gpumagic.explain(run(code)).expression == "a + b"
    assert gpumagic.explain(run(code + " from None")) is None


def test_a_long_list_shows_the_odd_ones():
    error = run(
        "xs = [torch.ones(1).cuda() for _ in range(500)]\nxs[77] = xs[77].cpu()\ntorch.stack(xs)"
    )
    explanation = gpumagic.explain(error)
    assert len(explanation.operands) < 6
    assert [o.name for o in explanation.operands if o.odd] == ["xs[77]"]
    assert explanation.fix.code == 'torch.stack([t.to("cuda:0") for t in xs])'


def test_a_subclass_of_tensor_is_not_asked():
    class Mine(torch.Tensor):
        calls = 0

    error = run(
        "x + y", namespace={"x": torch.ones(3).as_subclass(Mine), "y": torch.ones(3).cuda()}
    )

    def asked(cls, func, types, args=(), kwargs=None):
        Mine.calls += 1
        return NotImplemented

    Mine.__torch_function__ = classmethod(asked)
    told = names_told(gpumagic.explain(error, namespace={"unused": 1}))
    assert told["x"].devices == ("cpu",)
    assert Mine.calls == 0


def test_the_source_is_gone():
    code = compile("x + y", "<gone>", "eval")
    with pytest.raises(RuntimeError) as caught:
        eval(code, {"x": torch.ones(2), "y": torch.ones(2).cuda()})
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # this test has a source
    assert gpumagic.explain(caught.value) is None


def test_it_can_be_had_without_a_shell():
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import gpumagic, sys\nassert 'torch' not in sys.modules\n"
            "assert gpumagic.explain(ValueError('x')) is None\n"
            "assert 'IPython' not in sys.modules",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_tensor_on_another_device_than_the_text_says_is_not_to_blame():
    error = run("x = torch.ones(2, device='cuda:0')\nnp.asarray(x)")
    assert gpumagic.explain(error).operands[0].name == "x"
    other = TypeError("can't convert cuda:1 device type tensor to numpy")
    assert gpumagic.explain(other.with_traceback(error.__traceback__)) is None


def test_a_value_for_numpy_among_others_of_its_gpu_is_to_move_and_not_the_odd_one():
    code = 'x, out = torch.ones(3, device="cuda"), np.zeros(3)\nout[:] = x.sin() * x\n'
    explanation = gpumagic.explain(run(code))
    assert explanation.expression == "out[:] = x.sin() * x"
    assert "odd" not in str(explanation)
    assert "← to move" in str(explanation)


@pytest.mark.parametrize("items", ["list(d.values())", "tuple(d.values())", "[*reversed(xs)]"])
def test_the_items_of_a_list_that_is_made_in_the_call_are_operands(items):
    code = (
        'd = {"a": torch.ones(3, device="cuda"), "b": torch.ones(3)}\nxs = [d["a"], d["b"]]\n'
        f"y = torch.stack({items})\n"
    )
    explanation = gpumagic.explain(run(code))
    assert [operand.odd for operand in explanation.operands].count(True) == 1
    assert run(explanation.fix.apply(code)) is None
