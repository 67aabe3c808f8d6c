"""Errors because a line such as `x.to(device)` made a copy that nothing keeps."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
START = """
net, device = nn.Linear(4, 2).to("cuda:0"), "cuda:0"
def tensors(n):
    X, Y = torch.ones(n, 4), torch.ones(n, 2)
    X.to(device)
    Y.to(device)
    return X, Y
def loss(x, y):
    return (net(x) - y).square().mean()
"""
DATA = "x, y = torch.ones(3, 4), torch.ones(3, 2)\n"


@pytest.fixture
def cells(ip):
    assert ip.run(START).error is None
    return ip


def explained(ran):
    return ran.text[ran.text.index("between devices") :]


def test_a_function_of_another_cell_keeps_the_copy(cells):
    told = explained(cells.run("x, y = tensors(3)\nloss(x, y)"))
    assert "X.to(device) returns a copy of a tensor" in told
    assert "X = X.to(device)\n      Y = Y.to(device)" in told
    assert "then run that cell again" in told or "all below it again" in told


def test_an_earlier_cell_lost_the_copies(cells):
    assert cells.run(DATA + "x.to(device)\ny.to(device)").error is None
    told = explained(cells.run("loss(x, y)"))
    assert "replace lines 2 to 3" in told
    assert "x = x.to(device)\n      y = y.to(device)" in told


def test_an_earlier_version_of_the_data_is_not_blamed(cells):
    cells.run(DATA + "x.to(device)\ny.to(device)")
    cells.run(DATA)
    assert "returns a copy" not in explained(cells.run("loss(x, y)"))


def test_a_model_moves_in_place_and_a_used_copy_is_kept(cells):
    cells.run("moved = []\nnet = net.cpu()")
    code = "for t in (torch.ones(3, 4),):\n    t = t.to(device)\n    moved.append(t)\nnet(moved[0])"
    assert "binds" not in explained(cells.run(code))
    assert "copy" not in explained(cells.run("x = torch.ones(3, 4, device=device)\nnet(x)"))


@pytest.mark.parametrize(
    "line", ["x.to(torch.float32)", "x.to('cuda:1')", "for t in (x,):\n    t = t.double()"]
)
def test_a_line_that_sends_no_copy_to_the_device_is_no_cause(cells, line):
    assert "copy" not in (told := explained(cells.run(f"{DATA}{line}\nloss(x, y)")))
    assert "binds" not in told


def test_a_copy_to_the_gpu_is_not_the_cause_where_numpy_reads(cells):
    cells.run("import numpy as np")
    told = explained(cells.run("x = torch.ones(3, device=device)\nx.to(device)\nnp.array(x)"))
    assert "nothing keeps" not in told
    assert "np.array(x.cpu())" in told


def test_of_two_functions_of_one_name_the_called_one_is_read(cells):
    code = (
        "class Other:\n    def load(self, n):\n        x = torch.ones(n, 4)\n"
        "        x.to(device)\n        return x\n"
        "class Data:\n    def load(self, n):\n        x = torch.ones(n, 4)\n        return x\n"
    )
    cells.run(f"{code}data, other = Data(), Other()")
    assert "copy" not in explained(cells.run("x = data.load(3)\nloss(x, x[:, :2])"))
    assert "line 4: x.to(device)" in explained(cells.run("x = other.load(3)\nloss(x, x[:, :2])"))
