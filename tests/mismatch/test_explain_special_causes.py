"""`gpumagic.explain`: optimizers, generators and loaders, explained where they are made or used."""

import pytest
import torch
from snippets import run

import gpumagic

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]

STEP = """
net = nn.Linear(3, 2)
adam = torch.optim.Adam(net.parameters())
def step(x):
    net(x).sum().backward()
    adam.step()
step(torch.ones(1, 3))
net.cuda()
for _ in range(3):
    step(torch.ones(1, 3, device="cuda"))
"""
PASSED = STEP.replace("def step(x):", "def step(x, optimizer):").replace(
    "adam.step", "optimizer.step"
)
PASSED = PASSED.replace("3))\nnet", "3), adam)\nnet").replace('"cuda"))', '"cuda"), adam)')


@pytest.mark.parametrize("code", [STEP, PASSED])
def test_the_state_of_an_optimizer_moves_once_above_the_outermost_loop(code):
    explanation = gpumagic.explain(run(code))
    assert explanation.fix.code == "adam.load_state_dict(adam.state_dict())"
    assert explanation.fix.line == 9
    assert run(explanation.fix.apply(code)) is None


def test_a_generator_with_other_draws_stays_and_its_numbers_move():
    code = (
        'rng = torch.Generator("cuda:0").manual_seed(1)\n'
        'noise = torch.rand(4, device="cuda:0", generator=rng)\n'
        "def rows():\n    return torch.randint(4, (2,), generator=rng)\nx = noise[rows()]\n"
    )
    explanation = gpumagic.explain(run(code))
    drawn = 'return torch.randint(4, (2,), generator=rng, device=rng.device).to("cpu")'
    assert explanation.fix.code.strip() == drawn
    assert run(explanation.fix.apply(code)) is None


def test_a_gpu_that_is_not_here_is_renamed_in_map_location():
    code = (
        "import io\nfile, rank = io.BytesIO(), 5\ntorch.save(torch.ones(2), file)\nfile.seek(0)\n"
        'x = torch.load(file, map_location=f"cuda:{rank}")\n'
    )
    explanation = gpumagic.explain(run(code))
    assert explanation.reason.startswith("the code names a GPU that is not here: there are cuda:0")
    assert (
        explanation.fix.code
        == 'x = torch.load(file, map_location=f"cuda:{rank % torch.cuda.device_count()}")'
    )
    assert run(explanation.fix.apply(code)) is None


def test_a_generator_for_several_draws_on_one_device_is_made_there():
    code = (
        'device = "cuda:1"\ndef noise(n):\n    rng = torch.Generator().manual_seed(n)\n'
        "    x = torch.rand(n, generator=rng, device=device)\n"
        "    return x + torch.rand(n, generator=rng, device=device)\nx = noise(4)\n"
    )
    explanation = gpumagic.explain(run(code))
    assert explanation.fix.code.strip() == "rng = torch.Generator(device).manual_seed(n)"
    assert run(explanation.fix.apply(code)) is None


LOADER = """
from torch.utils.data import DataLoader
torch.set_default_device("cuda")
loader = DataLoader(list(range(8)), shuffle=True)
def order():
    return [int(each) for each in loader]
found = order()
"""


def test_a_loader_of_the_default_device_gets_its_generator_where_it_is_made():
    try:
        for code in (LOADER, LOADER.replace("found = order()", "def main():\n    order()\nmain()")):
            fix = gpumagic.explain(run(code)).fix
            assert fix.code.endswith('shuffle=True, generator=torch.Generator("cuda:0"))')
            assert run(fix.apply(code)) is None
    finally:
        torch.set_default_device(None)


def test_a_gpu_that_is_not_here_is_named():
    code = 'cfg = {"device": "cuda:5"}\nnn.Linear(2, 2).to(cfg["device"])\n'
    explanation = gpumagic.explain(run(code))
    assert explanation.reason.startswith(
        'cfg["device"] is no GPU here: there are cuda:0 and cuda:1'
    )


def test_a_gpu_that_is_not_here_is_renamed_where_the_cell_names_it():
    code = (
        "cfg = {'gpu': 7}\ndef train(device):\n    net = nn.Linear(2, 2).to(device)\n"
        "    return net(torch.ones(1, 2).to(device))\n"
        "device = torch.device('cuda:%d' % cfg['gpu'])\ny = train(device)\n"
    )
    explanation = gpumagic.explain(run(code))
    assert (explanation.fix.line, explanation.fix.code) == (5, 'device = torch.device("cuda:1")')
    assert run(explanation.fix.apply(code)) is None
