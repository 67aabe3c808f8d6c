"""Explanations in a shell: under the traceback, once, and nothing else is changed."""

import sys
import traceback

import pytest
from ours import OURS

pytestmark = pytest.mark.filterwarnings("ignore")
TWO = "a, b = torch.ones(9, device='cuda'), torch.ones(3)\na = a[:3]\n"
HEAD = "between devices · "


def test_it_comes_under_torchs_own_text(ip):
    ran = ip.run(f"{TWO}c = a + b")
    assert isinstance(ran.error, RuntimeError)
    assert ran.text.index("RuntimeError: Expected all") < ran.text.index(HEAD)
    assert f"{HEAD}In [2], line 3: a + b" in ran.text
    assert ran.text.count(HEAD) == 1
    assert "c = a + b.to(a.device)" in ran.text


def test_the_exception_is_left_as_it_is(ip):
    ran = ip.run(f"{TWO}a + b")
    assert sys.last_value is ran.error
    assert ran.error.__traceback__ is not None
    assert not getattr(ran.error, "__notes__", None)


@pytest.mark.parametrize("mode", ["Plain", "Context", "Verbose", "Minimal"])
def test_every_mode_of_tracebacks(ip, mode):
    ip.run(f"%xmode {mode}")
    ran = ip.run(f"{TWO}a + b")
    assert "RuntimeError" in ran.text
    assert ran.text.count(HEAD) == 1
    ip.run("%xmode Plain")


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\nz = 1\na + b",
        "%time a + b",
        "%%ongpu 1 --no-move\na + b",
        "%%ongpu 1 --no-move\n%%time\na + b",
        "import asyncio\nawait asyncio.sleep(0)\na + b",
        "def f(t):\n    return [t + b for _ in range(1)]\nf(a)",
        "get_ipython().run_cell('a + b')",
    ],
)
def test_wherever_a_traceback_is_shown(ip, cell):
    ip.run(TWO)
    ran = ip.run(cell)
    assert ran.text.count(HEAD) == 1, ran.text
    assert "b.to(" in ran.text


@pytest.mark.parametrize("where", ["%gpuwatch on --strict", "%%ongpu 0 --no-move --strict"])
def test_it_reads_no_value_of_a_gpu(ip, where):
    ip.run("net = nn.Linear(3, 3).cuda()\nopt = torch.optim.Adam(net.parameters())")
    ip.run("net(torch.ones(3).cuda()).sum().backward()\nopt.step()")
    ip.run("x = torch.ones(3)\ndef train(x):\n    net(x)\n    opt.step()")
    ip.run("" if "%%" in where else where)
    ran = ip.run(f"{where}\ntrain(x)" if "%%" in where else "train(x)")
    ip.run("%gpuwatch off")
    assert f"{HEAD}In [" in ran.text
    assert "failed while" not in ran.text
    assert "printed" not in ran.text


def test_a_script(ip, tmp_path):
    (tmp_path / "train.py").write_text(f"import torch\n{TWO}print(a + b)\n")
    ran = ip.run(f"%run {tmp_path / 'train.py'}")
    assert f"{HEAD}train.py, line 4: a + b" in ran.text


def test_it_comes_before_the_report_of_the_cell(ip):
    ran = ip.run("%%ongpu 1\nx = torch.ones(5)\nx.numpy()")
    assert ran.text.index(HEAD) < ran.text.index("cuda:1 (virtual")
    assert "x.cpu().numpy()" in ran.text


def test_a_tensor_made_in_an_ongpu_cell_is_where_that_put_it(ip):
    ip.run("w = torch.ones(3)")
    ran = ip.run("%%ongpu 1 --no-move\ny = torch.ones(3) + w")
    assert "cuda:1" in ran.text.split(HEAD)[1]
    repaired = ip.run('%%ongpu 1 --no-move\ny = torch.ones(3) + w.to("cuda:1")')
    assert repaired.error is None


def test_other_errors_get_nothing(ip):
    for cell in ("1 / 0", "torch.ones(2) @ torch.ones(3)", "%nonsense", "def", "raise SystemExit"):
        assert HEAD not in ip.run(cell).text


def test_a_function_of_an_earlier_cell_is_told_by_its_cell(ip):
    ip.run("def add(p, q):\n    return p + q\n")
    ip.run(TWO)
    ran = ip.run("for _ in range(2):\n    add(a, b)")
    assert f"{HEAD}In [2], line 2: p + q" in ran.text
    assert "In [4], before line 1" in ran.text
    assert "b = b.to(a.device)" in ran.text


def test_our_own_failure_leaves_the_users_error(ip, monkeypatch):
    from gpumagic.mismatch import explainer as room

    def broken(error, namespace):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(room, "explain", broken)
    ran = ip.run(f"{TWO}a + b")
    assert isinstance(ran.error, RuntimeError)
    assert HEAD not in ran.text
    assert ran.text.count("gpumagic failed while explaining an error: ZeroDivisionError") == 1


def test_an_explanation_that_cannot_be_shown_is_not_explained_again(ip, monkeypatch):
    from gpumagic.mismatch import explanation

    monkeypatch.setattr(explanation, "text", lambda found: 1 / 0)
    ran = ip.run(f"{TWO}a + b")
    assert isinstance(ran.error, RuntimeError)
    assert ran.text.count("ZeroDivisionError") < 4


def test_a_tool_that_shows_tracebacks_its_own_way(ip, monkeypatch):
    monkeypatch.setattr(ip.ip, "showtraceback", lambda *args, **kwargs: print("mine"))
    ran = ip.run(f"{TWO}a + b")
    assert ran.text.startswith("mine\n")
    assert ran.text.count(HEAD) == 1


def test_unloading_takes_it_away(ip):
    shown = ip.ip.showtraceback
    ip.run("%unload_ext gpumagic")
    assert "showtraceback" not in vars(ip.ip)
    assert HEAD not in ip.run(f"{TWO}a + b").text
    shown((RuntimeError, RuntimeError("x"), None))  # one that was kept still works
    ip.run("%load_ext gpumagic")
    assert ip.run("a + b").text.count(HEAD) == 1


@pytest.mark.parametrize("placed", ["", "%%ongpu 1 --no-move\n"])
def test_no_frame_of_ours_stands_in_a_traceback(ip, placed):
    ip.run(TWO)
    for cell in (
        "a + b",
        "torch.cat([a, b])",
        "a @ torch.ones(4, device='cuda')",
        "torch.empty(2**40, device='cuda')",
        "torch.ones(2, device='cuda:7')",
        "torch.ones(-1)",
        "torch.load('no such file')",
        "torch.cuda.set_device(9)",
        "with torch.cuda.device(9): pass",
        "(a.requires_grad_() * 2).backward()",
        "next(iter(torch.utils.data.DataLoader([1, 'a'], batch_size=2)))",
    ):
        ran = ip.run(f"{placed}{cell}")
        assert ran.error is not None, cell
        assert OURS not in ran.text, ran.text
        assert "skipping hidden" not in ran.text, ran.text
    # Nor where %debug begins.
    assert "a + b" in ip.run(f"{placed}a + b").text
    trace = [entry.filename for entry in traceback.extract_tb(sys.last_value.__traceback__)]
    assert "ipython-input" in trace[-1]


def test_a_chain_of_errors_has_no_frame_of_ours(ip):
    ip.run(TWO)
    ran = ip.run("try:\n    a + b\nexcept RuntimeError as e:\n    raise KeyError('a') from e")
    assert "direct cause" in ran.text
    assert OURS not in ran.text


def test_a_function_given_to_the_library_fails_in_the_users_frames_alone(ip):
    ip.run("import gpumagic\nrate = 1\ndef f():\n    return rate / 0")
    for cell in (
        "gpumagic.compare(f, ['cpu', 0], max_time=0.1)",
        "gpumagic.compare(lambda: f(), ['0+1'])",
    ):
        ran = ip.run(cell)
        assert isinstance(ran.error, ZeroDivisionError)
        assert "gpumagic.compare(" in ran.text
        assert "return rate / 0" in ran.text
        assert OURS not in ran.text, ran.text
        assert "<gpumagic" not in ran.text, ran.text


@pytest.fixture
def no_gpu(shell):
    """A shell on a machine without a GPU, whose extension is loaded."""
    import torch

    from gpumagic import virtual

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    shell.run("import torch")
    yield shell
    virtual.disable()


def test_the_first_error_of_a_beginner_says_what_to_type(no_gpu):
    ran = no_gpu.run("x = torch.zeros(3, device='cuda')")
    assert ran.error is not None
    first, second = [line for line in ran.text.splitlines() if line.startswith("→")]
    assert 'device="cpu" works' in first
    assert "%gpus --virtual 2 makes two virtual GPUs" in second
    no_gpu.run("%gpus --virtual 2")
    assert "cuda:0" in no_gpu.run("x = torch.zeros(3, device='cuda'); print(x.device)").text


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ("nn.Linear(2, 2, device='cuda:2')", "is no GPU here: there are cuda:0 and cuda:1"),
        ("nn.Embedding(4, 2)(torch.tensor([4]))", "→ %%ongpu cpu --check as the"),
        ("torch.ones(2, device='gpu')", '→ torch calls a GPU "cuda", or "cuda:0"'),
        ("nn.NLLLoss()(torch.ones(1, 2).cuda(1), torch.ones(1).long().cuda(1) * 2)", "ongpu 1 --c"),
    ],
)
def test_a_wrong_number_has_advice(ip, wrong, advice):
    assert advice in ip.run(wrong).text
    checked = ip.run(f"%%ongpu 1 --check\n{wrong}").text
    assert "device=" in wrong or "CheckedIndexError" in checked


def test_the_check_of_an_index_is_advised_on_the_cells_device(ip):
    wrong = "nn.Embedding(4, 2)(torch.tensor([4]))"
    said = ip.run(f"%%ongpu 1\n{wrong}").text
    assert "→ %%ongpu 1 --check as the cell's first line, instead of the present one, names" in said
    ip.run("%ongpu 1")
    assert "→ %%ongpu 1 --check as the cell's first line names" in ip.run(wrong).text


def test_where_there_is_a_gpu_the_doctor_says_what_is_missing(no_gpu, monkeypatch):
    from gpumagic.device import CPU, cuda_state

    monkeypatch.setattr(cuda_state, "physical_gpus", lambda: [CPU])
    said = no_gpu.run("torch.zeros(3).cuda()").text
    assert "→ there is a GPU in this machine: %gpus --doctor" in said
    assert "--virtual" not in said


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_jax_finds_no_gpu(no_gpu, name):
    # Imported here, JAX would be in the way of all later tests of this process.
    text = f"Unknown backend: {name!r} requested, but no platforms that are instances of {name}"
    said = no_gpu.run(f"raise RuntimeError({text!r})").text
    assert "→ JAX finds no GPU; the CPU works" in said
    assert (
        "%gpus --virtual 2 makes two virtual GPUs; to use them, restart the kernel and type it"
        in said
    )


def test_another_error_that_names_cuda_gets_no_advice(no_gpu):
    said = no_gpu.run("raise RuntimeError('no cuda, no GPUs')").text
    assert "→" not in said
