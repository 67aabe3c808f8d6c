"""`%%ongpu 1 --dry-run` in a shell: nothing runs, nothing changes, and the result is the cell's."""

import pytest
from dry_runs import assigned, dry, ended

import gpumagic


def test_a_cell(notebook):
    result = dry(notebook, "Y = net(X)\nloss = Y.sum()\nzeros(3)")
    assert assigned(result) == {
        "Y": ("float32[64, 5]", "cuda:1"),
        "loss": ("float32[]", "cuda:1"),
        "Out": ("float32[3]", "cuda:1"),
    }
    assert [(m.name, m.nbytes) for m in result.moved] == [("net", 420), ("X", 5120)]
    assert result.complete
    assert result.peak["cuda:1"].at.line == 4


FROZEN = """
class Frozen:                           # as a TensorDict
    def __init__(self, x): self.x = x
    def to(self, *args): return Frozen(self.x.to(*args))
"""


def test_an_object_whose_to_makes_another_is_there_as_in_the_cell(ip, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_with_frozen.py").write_text(FROZEN)
    monkeypatch.syspath_prepend(folder)
    ip.run("import torch; from a_library_with_frozen import Frozen")
    ip.run("net, held = torch.nn.Linear(20, 5), Frozen(torch.ones(64, 20))")
    before = ip.ns["held"]
    result = dry(ip, "out = net(held.x)")
    assert result.complete, result
    assert assigned(result) == {"out": ("float32[64, 5]", "cuda:1")}
    assert ip.ns["held"] is before
    assert ip.run("%%ongpu 1\nout = net(held.x)").success


def test_a_training_loop_with_a_loader_and_items(notebook):
    cell = (
        "for epoch in range(2):\n"
        "    for a, b in loader:\n"
        "        loss = F.cross_entropy(net(a), b)\n"
        "        opt.zero_grad(); loss.backward(); opt.step()\n"
        "        log.append(loss.item())\n"
        "mean = sum(log) / len(log)\n"
        "print(f'{mean:.3f}')"
    )
    result = dry(notebook, cell)
    assert result.complete, result
    assert result.printed == "?\n"
    counts = {(e.kind, e.line): (e.count, e.nbytes) for e in result.ledger}
    assert counts[("wait", 6)] == (8, 32)
    assert counts[("copy", 3)] == (16, 8 * (16 * 20 * 4 + 16 * 8))
    assert assigned(result)["mean"] == ("a value that depends on data", "")


def test_of_a_large_batch_some_samples_are_asked_for(notebook):
    """A data set of 100,000 items took minutes: each is a few operators on tensors without data."""
    result = dry(
        notebook,
        "class Items:\n"
        "    def __len__(self): return 100_000\n"
        "    def __getitem__(self, n): return {'x': X[n], 'y': y[n]}\n"
        "def collate(items):\n"
        "    labels = [item.pop('y') for item in items]\n"
        "    return torch.stack([item['x'] for item in items]), torch.stack(labels)\n"
        "a, b = next(iter(DataLoader(Items(), batch_size=5000, collate_fn=collate)))",
    )
    assert result.complete, result
    assert assigned(result)["a"] == ("float32[5000, 20]", "cuda:1")
    assert assigned(result)["b"] == ("int64[5000]", "cuda:1")


def test_modules_moved_in_the_cell_are_followed_and_lazy_ones_are_not(notebook):
    lazy = dry(notebook, "lazy = nn.LazyLinear(7)\nout = lazy(X)")
    assert "a dry run cannot follow a lazy module" in str(lazy)
    assert not lazy.error
    result = dry(
        notebook,
        "moved = nn.Linear(20, 7)\n"
        "out = moved(X); moved.to('cuda:0'); there = moved(X.cuda(0))\n"
        "class Net(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.scale = torch.ones(20)\n"
        "    def forward(self, x): return x * self.scale\n"
        "scaled = Net()(X)",
    )
    assert result.complete, result
    found = assigned(result)
    assert found["out"] == ("float32[64, 7]", "cuda:1")
    assert found["there"] == ("float32[64, 7]", "cuda:0")
    assert found["moved"][1] == "cuda:0"
    assert found["scaled"] == ("float32[64, 20]", "cuda:1")


def test_a_mismatch_is_explained(notebook):
    result = dry(notebook, "far = X.cuda(0)\nboth = far + X\nafter = 1")
    (mismatch,) = result.mismatches
    assert mismatch.where.line == 3
    assert "cuda:0" in mismatch.error
    assert "cuda:1" in mismatch.error
    assert "far" in str(mismatch)
    assert "X" in str(mismatch)
    assert assigned(result) == {"far": ("float32[64, 20]", "cuda:0")}
    assert not result.complete


@pytest.mark.parametrize("cell", ["b = a[i]", "a[i] = 1.0"])
def test_an_index_on_a_gpu_of_a_tensor_on_the_cpu_fails_as_it_does(notebook, cell):
    made = "a, i = torch.ones(4, 3, device='cpu'), torch.arange(2)"
    (mismatch,) = dry(notebook, f"{made}\n{cell}").mismatches
    assert "indices should be either on cpu or on the same device" in mismatch.error
    assert "i.to(a.device)" in str(mismatch)


@pytest.mark.parametrize(
    "call",
    [
        "torch.allclose(X, Y)",  # its result depends on data
        "torch.masked_select(X, Y > 0)",
        "F.mse_loss(X, Y)",  # its result has a size that the dry run knows
        "F.conv1d(X[None], torch.ones(8, 64, 3, device='cpu'))",
        "torch._foreach_add_([X], [Y])",  # it returns nothing
        "opt = torch.optim.AdamW([X.requires_grad_()], fused=True); X.sum().backward(); opt.step();"
        "opt.state[X]['exp_avg'] = Y; opt.step()",
    ],
)
def test_operators_whose_devices_torchs_fakes_do_not_check(notebook, call):
    result = dry(notebook, f"Y = torch.ones(64, 20, device='cpu')\n{call}")
    assert result.mismatches[0].error.startswith(
        "RuntimeError: Expected all tensors to be on the same"
    )


def test_operators_on_several_devices(notebook):
    cell = "Y = X.cpu()\ntorch._foreach_copy_([X], [Y])\ntorch._foreach_mul_([X], Y[0, 0])"
    assert dry(notebook, cell).complete


def test_a_mismatch_that_the_cell_catches_is_none(notebook):
    cell = "try:\n    X.cuda(0) + X\nexcept RuntimeError as e:\n    text = str(e)\nok = X + 1"
    result = dry(notebook, cell)
    assert result.complete
    assert set(assigned(result)) == {"text", "ok"}


def test_too_much_memory(notebook):
    result = dry(notebook, "big = torch.empty(2**28)\nbig += 1\nmore = big + 1")
    peak = result.peak["cuda:1"]
    assert peak.needed == 2 * 2**30
    assert peak.free == 2**30
    assert peak.fits is False
    assert "at least 2.0 GiB of 1.0 GiB free: does not fit" in str(result)


def test_other_errors_are_said_not_raised(notebook):
    result = dry(notebook, "a = X + 1\nb = nowhere\nc = 1")
    assert result.error == "NameError: name 'nowhere' is not defined"
    assert result.error_at.line == 3
    assert set(assigned(result)) == {"a"}


def test_every_way_to_write_the_flag_is_dry(notebook):
    for flag in ("--dry-run", "--dry", "'--dry-run'"):
        done = notebook.run(f"%%ongpu 1 {flag}\nlog.append(1); Y = X + 1")
        assert isinstance(done.result, gpumagic.DryRun), flag


def test_bad_input_is_one_line_and_runs_nothing(notebook):
    for line, words in (
        ("%%ongpu 7 --dry-run", "no GPU 7"),
        ("%%ongpu --dry-run", "which device?"),
        ("%%ongpu 1 --dry-runs", "unexpected --dry-runs"),
    ):
        done = notebook.run(f"{line}\nlog.append(1)")
        assert words in done.text
        assert done.text.strip().count("\n") == 0
    assert (
        "works for one cell only; type %%ongpu 1 --dry-run"
        in notebook.run("%ongpu 1 --dry-run").text
    )


def test_on_the_cpu_and_without_moving(notebook):
    assert assigned(dry(notebook, "A = X + 1", "cpu"))["A"][1] == "cpu"
    result = dry(notebook, "A = X + 1; B = zeros(2)", "1 --no-move")
    assert [a.device for a in result.assigned] == ["cpu", "cuda:1"]
    assert (result.moved, result.ledger.entries) == ((), ())


def test_run_cell_magic_and_other_magics_above(notebook):
    run = notebook.ip.run_cell_magic
    result = run("ongpu", "1 --dry-run", "Q = X + 1")
    assert assigned(result) == {"Q": ("float32[64, 20]", "cuda:1")}
    done = notebook.run("%%time\n%%ongpu 1 --dry-run\nlog.append(1)\nQ = X + 1")
    assert done.success, done.text
    assert "Q" not in notebook.ns


def test_an_interrupt_shows_what_there_is(notebook):
    result = dry(notebook, "A = X + 1\nraise KeyboardInterrupt")
    assert ended(result) == (3, "interrupted")
    assert "A" in assigned(result)


def test_the_html_is_escaped(notebook):
    result = dry(notebook, "A = X + 1\nif X.sum() < 0: '<b>'")
    html = result._repr_html_()
    assert "&lt; 0: &#x27;&lt;b&gt;&#x27;" in html
    assert "float32[64, 20]" in html


def test_the_ledger_of_real_copies_sees_none(notebook):
    notebook.run("%gpuwatch on")
    done = notebook.run("%%ongpu 1 --dry-run\nfor i in range(5): X.sum().item()\nY = X.cpu()")
    notebook.run("%gpuwatch off")
    assert done.result.complete
    assert "transfer:" not in done.text
    assert "waits at" not in done.text


def test_a_semicolon_at_the_end_hides_no_dry_run(notebook):
    done = notebook.run("%%ongpu 1 --dry-run\nA = X + 1;")
    assert "float32[64, 20]" in done.text
    assert "float32[64, 20]" in notebook.run("%%ongpu 1 --dry-run\nA = X + 1").text


def test_transforms_of_functions_are_followed(notebook):
    cell = "J = torch.func.jacrev(lambda v: (X @ v).sin())(torch.ones(20))"
    assert assigned(dry(notebook, cell))["J"] == ("float32[64, 20]", "cuda:1")


def test_how_often_an_optimizer_goes_on_is_not_guessed(notebook):
    result = dry(
        notebook,
        "w = torch.ones(3, requires_grad=True); lb = torch.optim.LBFGS([w])\n"
        "lb.step(lambda: (w * w).sum())",
    )
    assert ended(result)[0] == 3


def test_what_an_earlier_cell_imported_from_the_future_holds(notebook):
    notebook.run("from __future__ import annotations")
    cell = "def double(x: Nowhere): return x * 2\nD = double(X)"
    assert assigned(dry(notebook, cell))["D"] == ("float32[64, 20]", "cuda:1")
    del notebook.ns["annotations"]
