"""The README's own cells run on two virtual GPUs, and show what it says that they show."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
IMPORTS = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
# What stands above each cell in the notebook that the README tells of, by the cell's number.
SETUP = {
    2: "",
    3: "X, y = torch.randn(4096, 784), torch.randint(10, (4096,))",
    4: "net, X = nn.Linear(2, 2), torch.ones(1, 2)",
    5: "",
    6: "",
    7: "net, X = nn.Linear(20, 1).cuda(1), torch.randn(64, 20).cuda(1)",
    8: "net, X = nn.Linear(20, 5), torch.randn(64, 20)",
    9: "net, images = nn.Linear(784, 10), torch.randn(256, 784)",
}
# The same with less memory and less time.
SHORTER = {
    "%gpus --virtual 2": "%gpus --virtual 2 --memory 2GiB",
    "%%gputime cpu 0": "%%gputime cpu 0 --max-time 0.5",
    '["cpu", 0])': '["cpu", 0], max_time=0.5)',
}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
NUMBER = re.compile(r"[\d.,]+[  ]?(?:ns|µs|ms|s|B|[KMGT]iB|%)?(?!\w)")


def notebook_cells():
    """Number, code and output of each `In [n]:` block."""
    for _, block in BLOCKS:
        if start := re.match(r"In \[(\d+)\]: (.*)", block):
            rest = block.splitlines()[1:]
            code = [start[2]]
            while rest and rest[0].startswith("   ...: "):
                code.append(rest.pop(0).removeprefix("   ...: "))
            yield pytest.param(int(start[1]), "\n".join(code), rest, id=f"In-{start[1]}")


def words(line):
    """A line without its numbers, which are another machine's, and without alignment."""
    return " ".join(NUMBER.sub("#", line.replace("\N{NO-BREAK SPACE}", " ")).split())


@pytest.fixture
def notebook(shell):
    from gpumagic import virtual

    virtual.enable(2, "2GiB")
    shell.run(IMPORTS)
    yield shell
    shell.run("%ongpu off")
    virtual.disable()


@pytest.mark.filterwarnings("ignore::gpumagic.CrossDeviceWarning")
@pytest.mark.parametrize(("number", "code", "output"), list(notebook_cells()))
def test_a_cell_shows_what_the_readme_says(notebook, number, code, output):
    assert notebook.run(SETUP[number]).success
    for written, shorter in SHORTER.items():
        code = code.replace(written, shorter)
    done = notebook.run(code)
    refused = any(line.startswith("UsageError") for line in output)
    assert done.success != refused, done.text
    shown = {words(line) for line in done.text.splitlines()}
    if number == 2:  # the host's name and who holds memory are the machine's
        output = output[1:2]
    if number == 9:  # remarks about spread come and go
        output = [line for line in output if line.startswith(("cuda:0 is", "  device", "  net"))]
    missing = [line for line in output if line.strip() and words(line) not in shown]
    assert not missing, done.text


def test_every_cell_of_the_readme_is_found():
    assert sorted(SETUP) == sorted(int(n) for n in re.findall(r"^In \[(\d+)\]", README, re.M))


def test_the_library_runs(notebook):
    (code,) = (block for language, block in BLOCKS if language == "python")
    notebook.run(
        "net = nn.Linear(20, 10); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "batch = torch.randn(4, 20); a = torch.randn(32, 32)"
    )
    for written, shorter in SHORTER.items():
        code = code.replace(written, shorter)
    done = notebook.run(code)
    assert done.success, done.text
    assert str(notebook.ns["device"]) == "cuda:1"
    assert notebook.ns["net"].weight.device.index == 0  # moved by the line below
