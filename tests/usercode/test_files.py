"""Which files are the user's: one answer, on which every part of gpumagic agrees."""

import linecache
import os
import sys

import pytest
import torch

import gpumagic
from gpumagic.frameworks.watching import watch
from gpumagic.usercode.files import is_users, label, module_of, source_of

LIBRARY = "import torch\nfrom torch import zeros\ndef score(x):\n    return x.sum().item()\n"


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/train.py",
        "/home/me/src/an_editable_install/layers.py",
        "/tmp/ipykernel_7/123.py",
        "<ipython-input-3-0a1b>",
        "<python-input-0>",
        "<stdin>",
        "<timed exec>",
        "<magic-timeit>",
        "<doctest notes[0]>",
        os.path.abspath(__file__),
    ],
)
def test_the_users_files(file):
    assert is_users(file)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/.local/lib/python3.11/site-packages/libx.py",
        "/opt/elsewhere/site-packages/libx/deep/inside.py",
        "/usr/lib/python3/dist-packages/libx.py",
        r"C:\Users\me\AppData\Roaming\Python\Python311\site-packages\libx.py",
        os.__file__,
        torch.__file__,
        torch.nn.functional.__file__,
        gpumagic.__file__,
        "<frozen importlib._bootstrap>",
        "<string>",
        "<__array_function__ internals>",
        "<attrs generated init x.Y>",
        "<eval_with_key>.0",
        "numpy/random/mtrand.pyx",  # as Cython has it in tracebacks
        "built-in",
        "frozen",
        None,
    ],
)
def test_files_of_libraries(file):
    assert not is_users(file)


def test_a_librarys_module_is_named():
    assert module_of(torch.nn.functional.__file__) == "torch.nn.functional"
    assert module_of(torch.__file__) == "torch"
    assert module_of("/opt/elsewhere/site-packages/libx/deep.py") == "libx.deep"
    assert module_of("/home/me/train.py") == ""


def test_a_magics_line_is_shown_as_typed():
    from IPython.core.inputtransformer2 import TransformerManager

    for typed in ("%time x.sum()", "%time d['x'].sum()"):
        code = TransformerManager().transform_cell(typed)
        linecache.cache["<ipython-input-7>"] = len(code), None, [code], "<ipython-input-7>"
        assert source_of("<ipython-input-7>", 1) == typed


@pytest.fixture
def libx(tmp_path, monkeypatch):
    """A library in a site-packages that is not this interpreter's: as of `pip install --user`."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "libx.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield "libx"
    sys.modules.pop("libx", None)


@pytest.mark.usefixtures("gpus")
def test_ledger_placement_and_dry_run_agree_about_a_library(shell, libx):
    shell.run(f"import torch, {libx}\nx = torch.ones(3, device='cuda:1')")
    ran = shell.run(f"%%ongpu 1\nplaced = {libx}.zeros is torch.zeros\n{libx}.score(x)")
    assert ran.error is None
    assert f"1 wait at line 3: `{libx}.score(x)`" in ran.text
    # What a library took of torch's names is placed as what it says now.
    assert shell.ns["placed"]
    dry = shell.run(f"%%ongpu 1 --dry-run\nplaced = 1\n{libx}.score(x)").text
    assert f"line 3: {libx}.score(x)" in " ".join(dry.split())
    assert "of score()" not in dry


@pytest.mark.usefixtures("gpus")
def test_one_cell_has_one_name(shell):
    shell.run("import torch, gpumagic\nx = torch.ones(3, device='cuda:1')")
    shell.run("with gpumagic.watch(warn=False) as w:\n    x.sum().item()\nraise KeyError")
    (entry,) = shell.ns["w"].ledger.entries
    assert entry.file == "In [2]"
    file = sys.last_value.__traceback__.tb_next.tb_frame.f_code.co_filename
    assert label(file) == "In [2]"
    assert "In [3], line 1: " in shell.run("torch.ones(3) + x").text
    assert label("<ipython-input-3-0a1b>") == "In [3]"
    assert label("/home/me/train.py") == "train.py"


@pytest.mark.usefixtures("gpus")
def test_the_ledger_counts_at_a_line_typed_anywhere():
    x = torch.ones(3, device="cuda:1")
    with watch(warn=False) as w:
        exec(compile("x.sum().item()", "<stdin>", "exec"), {"x": x})
    (entry,) = w.ledger.entries
    assert (entry.file, entry.line) == ("<stdin>", 1)
