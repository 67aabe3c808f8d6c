"""`gpumagic.explain`: errors within a library, by what the user handed to it."""

import sys

import pytest
from snippets import names_told, run

import gpumagic
from gpumagic.usercode.files import is_users

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]

LIBRARY = """
import importlib.util, sys, tempfile
import torch
from torch import nn

class Store:
    def __init__(self, mapping):
        self._mapping = mapping

class Data:
    def __init__(self, **mapping):
        self.__dict__["_store"] = Store(mapping)
    def __getattr__(self, name):
        return self._store._mapping[name]
    def to(self, device):
        return Data(**{key: value.to(device) for key, value in self._store._mapping.items()})

class Layer:
    def __init__(self, keys):
        self.keys = keys
    def update(self, new):
        self.keys = torch.cat([self.keys, new])

class Cache:
    def __init__(self, keys):
        self.layers = [Layer(keys)]
    def update(self, new):
        self.layers[0].update(new)

class Schedule:
    def __init__(self):
        self.table = torch.ones(3)
    def step(self, pred, n, sample):
        return sample - self.table[n] * pred

class Sender:
    def __init__(self, weight):
        self.weight, self.settings = weight, {}
    def to_device(self):
        self.settings["device"] = str(torch.ones(1).cuda().device)
    def add(self):
        return self.weight + torch.ones(3).to(self.settings["device"])

class Loops:
    def __init__(self, data, pin_memory):
        self.data, self.pin_memory = data, pin_memory
    def loop(self):
        loader = torch.utils.data.DataLoader(self.data, 2, pin_memory=self.pin_memory)
        for batch in loader:
            self.last = batch

class Model:
    def fit(self, x, y):
        import numpy
        return numpy.asarray(x) + numpy.asarray(y)

def suppress(boxes, scores):
    boxes, scores = boxes.view(-1), scores.view(-1)
    return torch.where(scores > 0, boxes, scores)

def own_mistake(boxes, scores):
    return boxes + torch.zeros(boxes.shape)

def generated(folder):
    path = f"{folder}/libx.conv_propagate_1.py"
    with open(path, "w") as file:
        file.write("def propagate(x, index):\\n    return x.index_select(0, index)\\n")
    spec = importlib.util.spec_from_file_location("libx.conv_propagate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["libx.conv_propagate"] = module
    spec.loader.exec_module(module)
    return module

class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 2)
    def forward(self, ids):
        return self.table(ids)

class Conv(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.ones(3)), generated(folder)
    def forward(self, x, index):
        return self.module.propagate(x * self.weight, index)
"""


@pytest.fixture(autouse=True)
def _libx(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "libx.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("libx", "libx.conv_propagate"):
        sys.modules.pop(name, None)


GIVEN = [
    (
        'boxes, scores = torch.ones(3, device="cuda"), torch.ones(3)\n'
        "keep = libx.suppress(boxes, scores)\n",
        {"boxes": ("cuda:0",), "scores": ("cpu",)},
        "keep = libx.suppress(boxes, scores.to(boxes.device))",
    ),
    (
        "data = libx.Data(x=torch.ones(3), index=torch.zeros(3))\n"
        'w = torch.ones(3, device="cuda")\nlibx.suppress(w, data.x)\n',
        {"w": ("cuda:0",), "data": ("cpu",)},
        "libx.suppress(w, data.to(w.device).x)",
    ),
    (
        "def use(data, net):\n    return net(data.x)\n"
        "data, net = libx.Data(x=torch.ones(3)), nn.Linear(3, 1).cuda()\nuse(data, net)\n",
        {"net": ("cuda:0",), "data": ("cpu",)},
        'data = data.to("cuda:0")',
    ),
    (
        'cache, new = libx.Cache(torch.ones(3)), torch.ones(3, device="cuda")\ncache.update(new)\n',
        {"cache": ("cpu",), "new": ("cuda:0",)},
        None,
    ),
    (
        "net = libx.Lookup().cuda()\nnet(torch.zeros(2, dtype=torch.long)).sum()\n",
        {"net": ("cuda:0",), "torch.zeros(2, dtype=torch.long)": ("cpu",)},
        'net(torch.zeros(2, dtype=torch.long, device="cuda:0")).sum()',
    ),
    (
        'x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")\n'
        "libx.Model().fit(x, y)\n",
        {"x": ("cuda:0",), "y": ("cuda:0",)},
        "libx.Model().fit(x.cpu(), y.cpu())",
    ),
    (
        'x, y = torch.ones(3, device="cuda", requires_grad=True), [1]\n'
        "libx.Model().fit(x.detach(), y)\n",
        {"x": ("cuda:0",)},
        "libx.Model().fit(x.detach().cpu(), y)",
    ),
    (
        'schedule, x = libx.Schedule(), torch.ones(3, device="cuda")\n'
        "schedule.step(x.detach().cpu(), 1, x)\n",
        {"x.detach().cpu()": ("cpu",), "x": ("cuda:0",)},
        "schedule.step(x.detach(), 1, x)",
    ),
    (
        'schedule, x = libx.Schedule(), torch.ones(3, device="cuda")\n'
        "schedule.step(torch.randn(3), 1, x)\n",
        {"torch.randn(3)": ("cpu",), "x": ("cuda:0",)},
        "schedule.step(torch.randn(3, device=x.device), 1, x)",
    ),
    (
        'schedule, x = libx.Schedule(), torch.ones(3, device="cuda")\n'
        "def halved(t):\n    return t / 2\n"
        "schedule.step(halved(torch.ones(3)), 1, x)\n",
        {"halved(torch.ones(3))": ("cpu",), "x": ("cuda:0",)},
        "schedule.step(halved(torch.ones(3)).to(x.device), 1, x)",
    ),
]


@pytest.mark.parametrize(("code", "devices", "fixed"), GIVEN)
def test_what_it_was_given_is_named(code, devices, fixed):
    code = f"import libx\n{code}"
    explanation = gpumagic.explain(run(code))
    told = names_told(explanation)
    assert {name: told[name].devices for name in devices} == devices
    assert "schedule" not in told
    assert (explanation.fix and explanation.fix.code) == fixed
    if fixed:
        assert run(explanation.fix.apply(code)) is None


def test_its_own_mistake_is_not_blamed_on_what_it_was_given():
    error = run(
        'import libx\nlibx.own_mistake(torch.ones(3, device="cuda"), torch.ones(3, device="cuda"))'
    )
    assert "same device" in str(error)
    assert gpumagic.explain(error) is None


def test_a_file_that_it_wrote_is_not_the_users(tmp_path):
    code = (
        "import libx\nconv = libx.Conv(folder).cuda()\nindex = torch.tensor([0, 1])\n"
        "x = torch.ones(3, device='cuda')\ny = conv(x, index)\n"
    )
    explanation = gpumagic.explain(run(code, namespace={"folder": tmp_path}))
    assert not is_users(sys.modules["libx.conv_propagate"].__file__)
    assert (explanation.label, explanation.line) == ("snippet.py", 5)
    assert names_told(explanation)["index"].odd
    assert explanation.fix.label == "snippet.py"


def test_a_loader_that_a_library_made_over_moved_data_can_be_read_in_a_placed_cell(ip):
    ip.run("import libx\ndata = [torch.ones(3), torch.ones(3)]\nit = libx.Loops(data, True)")
    assert ip.run("%%ongpu 1\nit.loop()").error is None
    told = " ".join(ip.run("it.loop()").text.split())
    told = told[told.index("between devices") :]
    assert "a library made this loader" in told
    assert "%ongpu home" not in told  # the library may still send batches to the GPU
    assert "fix: put %%ongpu 1 on top of this cell" in told
    assert ip.run("%%ongpu 1\nit.loop()").error is None


def test_what_only_a_library_has_on_the_gpu_is_explained_if_the_line_of_ongpu_cures_it(ip):
    ip.run("import libx\nstore = libx.Sender(torch.ones(3))")
    assert ip.run("%%ongpu 1\nstore.to_device()\nstore.add()").error is None
    ip.run("%ongpu home")
    failed = ip.run("store.add()")
    assert failed.error is not None
    told = failed.text[failed.text.index("between devices") :]
    assert "a tensor in libx  cuda:1" in told
    assert "fix: put %%ongpu 1 on top of this cell" in told
    assert ip.run("%%ongpu 1\nstore.add()").error is None
    assert "between devices" not in ip.run("libx.own_mistake(torch.ones(3), torch.ones(3))").text
