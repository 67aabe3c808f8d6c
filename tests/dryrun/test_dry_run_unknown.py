"""`%%ongpu 1 --dry-run`: what cannot be known without data, and what is left out."""

import sqlite3
import sys
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from dry_runs import assigned, dry, ended

import gpumagic

ENDS = {
    "if X.sum() > 0: pass": "a condition on a tensor depends on data",
    "if X.sum().item() > 0: pass": "a condition on .item() depends on data",
    "k = X[X > 0]": "an index of booleans depends on data",
    "k = X.nonzero()": "nonzero depends on data",
    "k = y.unique()": "unique depends on data",
    "k = torch.zeros(y.max().item())": "zeros with .item() depends on data",
    "k = X[: y[0].item()]": "the value of .item() depends on data",
    "k = X[y[0].item()]": "__getitem__ with .item() depends on data",
    "k = float(X.sum())": "float() of a tensor depends on data",
    "k = X.cpu().numpy()": "a NumPy array of a tensor depends on data",
    "k = {v: 1 for v in y.tolist()}": "the hash of an element of a list depends on data",
    "k = open('file', 'w')": "writing to 'file': a dry run writes no file",
    "import subprocess; subprocess.run(['ls'])": "starting a program is not allowed in a dry run",
    "os.rmdir('folder')": "removing a folder is not allowed in a dry run",
    "os.replace('a', 'b')": "renaming a file is not allowed in a dry run",
    "input()": "asking for input is not allowed in a dry run",
    "k = torch.equal(X, X)": "equal depends on data",
    "k = torch.full(size=(y[0].item(),), fill_value=0)": "full with .item() depends on data",
}


def test_it_ends_where_data_decides(notebook):
    for statement, reason in ENDS.items():
        result = dry(notebook, f"before = X + 1\n{statement}\nafter = 1")
        assert ended(result) == (3, reason)
        assert set(assigned(result)) - {"subprocess"} == {"before"}
        assert f"ended at line 3: {reason} · {statement}" in str(result)


def test_a_condition_on_several_numbers_is_torchs_own_error(notebook):
    result = dry(notebook, "if X > 0: pass")
    assert "Boolean value of Tensor with more than one value is ambiguous" in result.error


def test_an_unknown_number_may_be_divided(notebook):
    result = dry(notebook, "n = y[0].item()\na, b = n // X, n % X")
    assert result.complete, result


def test_a_use_of_an_unknown_number_that_a_dry_run_cannot_follow_is_no_failure(notebook):
    for use in ("json.dumps({'loss': loss})", "divmod(loss, 60)"):
        result = dry(notebook, f"import json; loss = X.sum().item()\nk = {use}")
        assert ended(result) == (3, "this needs a value that depends on data")
        assert result.error is None


def test_an_unknown_number_has_the_attributes_of_a_number(notebook):
    mean = "import numpy as np; losses = [X.sum().item()] * 2\nprint(f'{np.mean(losses):.3f}')"
    result = dry(notebook, mean)
    assert (result.complete, result.printed) == (True, "?\n")
    assert ended(dry(notebook, "\nX.sum().item().real"))[1] == ".real of .item() depends on data"
    failed = dry(notebook, "\nX.sum().item().cpu()").error
    assert failed == "AttributeError: a number has no attribute 'cpu'"
    assert ended(dry(notebook, "files = !ls\nfiles.n"))[0] == 3


def test_nothing_is_sent_in_a_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(4)
    try:
        for send in (lambda: dist.all_reduce(x), dist.barrier):
            (end,) = gpumagic.dry_run(send).unknown
            assert end.ended
            assert end.reason.endswith(" in a process group: a dry run sends nothing")
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


def test_a_database_that_is_open_is_not_written_and_that_is_no_error_of_the_codes(ip, tmp_path):
    with closing(sqlite3.connect(tmp_path / "file")) as database:
        database.execute("create table t (x)")
        ip.ns["database"] = database
        line, reason = ended(dry(ip, "database.execute('insert into t values (1)')"))
        assert (line, reason) == (2, "OperationalError: disk I/O error: a dry run writes no file")
        assert database.execute("select * from t").fetchall() == []
        del ip.ns["database"]


def test_nothing_of_the_users_can_swallow_the_end(notebook):
    cell = "try:\n    if X.sum() > 0: pass\nexcept Exception:\n    swallowed = 1"
    assert ended(dry(notebook, cell))[0] == 3


def _signed(x):
    if bool(x.sum() > 0):
        return x
    return -x


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_a_library_makes_of_the_end_is_no_failure_of_the_code(ip):
    ip.ns.update(X=torch.ones(3), scripted=torch.jit.script(_signed))
    line, reason = ended(dry(ip, "a = X + 1\nb = scripted(X)"))
    assert (line, reason) == (3, "the value of a tensor depends on data")


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_dry_run_is_named(ip):
    ip.ns.update(y=torch.ones(3, 2), net=torch.nn.Linear(4, 4), rows=torch.eye(3).to_sparse_csr())
    ip.ns["ragged"] = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    assert ended(dry(ip, "rows @ y"))[1] == (
        "a dry run cannot follow to() of a tensor of torch.sparse_csr"
    )
    assert "it is nested" in ended(dry(ip, "net(ragged)"))[1]


def test_the_sparse_gradient_of_an_embedding_is_followed(ip):
    ip.run(
        "rows = torch.arange(5); net = nn.Embedding(10, 3, sparse=True)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)"
    )
    result = dry(
        ip, "(net(rows).sum() + net(rows).mean()).backward(); opt.step()\ng = net.weight.grad"
    )
    assert result.complete, result
    assert assigned(result)["g"] == ("float32[10, 3]", "cuda:1")


def test_checks_of_arguments_and_counters_on_a_gpu_are_no_end(ip):
    ip.run(
        "X = torch.ones(64, 20); net = nn.Linear(20, 5)\n"
        "mean = torch.optim.swa_utils.AveragedModel(net); nadam = torch.optim.NAdam([X])\n"
        "X.grad = X.clone(); nadam.step()"
    )
    result = dry(
        ip,
        "d = torch.distributions.Normal(X, 1.0); p = d.log_prob(d.sample())\n"
        "mean.update_parameters(net); mean.update_parameters(net)\n"
        "nadam.load_state_dict(nadam.state_dict()); nadam.step()\n"
        "p.record_stream(torch.cuda.current_stream())",
    )
    assert result.complete, result
    assert assigned(result)["p"] == ("float32[64, 20]", "cuda:1")


def test_memory_allocated_is_what_the_dry_run_counts(notebook):
    result = dry(
        notebook,
        "before = torch.cuda.memory_allocated(); big = torch.zeros(1024, 1024)\n"
        "assert torch.cuda.memory_allocated() - before == 4 * 2**20\n"
        "del big; assert torch.cuda.memory_allocated() == before\n"
        "print(torch.cuda.max_memory_allocated() / 2**20)",
    )
    assert result.complete, result
    assert result.printed == "?\n"


def test_threads_are_not_started(notebook):
    cell = "import threading\nt = threading.Thread(target=print, args=('ran',)); t.start()"
    result = dry(notebook, cell)
    assert ended(result)[1] == "starting threads is not allowed in a dry run"
    assert result.printed == ""


def test_a_pool_of_threads_does_its_work_at_once(notebook):
    result = dry(
        notebook,
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    halves = list(pool.map(lambda x: x @ x.mT, X.chunk(2)))\n"
        "    failed = type(pool.submit(lambda: 1 / 0).exception()).__name__",
    )
    assert result.complete, result
    assert assigned(result)["halves"] == ("list of 2, 2 tensors", "cuda:1")
    assert assigned(result)["failed"][0] == "str 'ZeroDivisionError'"


def test_a_folder_is_left_out_and_a_library_does_without_a_program(
    notebook, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("lib") / "site-packages"
    folder.mkdir()
    (folder / "a_library_that_asks.py").write_text(
        "import subprocess\n"
        "def cards():\n"
        "    try: return subprocess.check_output(['nvidia-smi'])\n"
        "    except OSError: return 0"
    )
    monkeypatch.syspath_prepend(folder)
    notebook.run("")
    result = dry(
        notebook,
        "import a_library_that_asks\nn = a_library_that_asks.cards(); os.makedirs('a/b')\nX @ y",
    )
    notes = {(unknown.where.line, unknown.reason) for unknown in result.unknown}
    assert (3, "making a folder was skipped") in notes
    assert assigned(result)["n"][0] == "int 0"
    assert result.error is not None  # what fails later is no consequence of it


def test_a_tensor_of_what_lies_in_memory_has_its_shape(notebook):
    result = dry(notebook, "a = torch.asarray(torch.UntypedStorage(8), dtype=torch.uint8)")
    assert assigned(result)["a"][0] == "uint8[8]"


def test_numbers_that_are_not_known_go_on_as_long_as_they_only_scale(notebook):
    result = dry(
        notebook,
        "m = X.mean().item(); total = 0\n"
        "for i in range(3): total += m\n"
        "a = X * m; b = m * X; c = y * y.max().item(); d = y / y.max().item()\n"
        "e = torch.tensor([v.item() for v in X.mean(1)]); f = torch.full((3,), m)\n"
        "words = f'{round(total / 3, 2):.2f}'",
    )
    assert result.complete, result
    kinds = {name: kind for name, (kind, _) in assigned(result).items()}
    assert (kinds["a"], kinds["b"]) == ("float32[64, 20]",) * 2
    assert (kinds["c"], kinds["d"], kinds["e"]) == ("int64[64]", "float32[64]", "float32[64]")
    assert kinds["f"] == "float32[3]"


def test_a_single_number_that_is_there_is_known(notebook):
    notebook.run("")
    result = dry(notebook, "n = torch.tensor(5, device='cpu'); m = n + 1\nz = zeros(m.item())")
    assert assigned(result)["z"] == ("float32[6]", "cuda:1")


def test_magics_commands_and_files_are_named(notebook):
    result = dry(notebook, "%pwd\nfiles = !ls\ntorch.save(net.state_dict(), 'net.pt')\nB = X + 1")
    notes = {unknown.reason for unknown in result.unknown}
    assert notes == {"%pwd was skipped", "!ls was skipped", "torch.save was skipped"}
    assert assigned(result)["B"] == ("float32[64, 20]", "cuda:1")
    assert result.complete


def test_a_magic_with_options_is_left_out(notebook):
    result = dry(notebook, "%timeit -n 10 X + 1\nB = X + 1\n!ls")
    notes = {unknown.reason for unknown in result.unknown}
    assert notes == {"%timeit -n 10 X + 1 was skipped", "!ls was skipped"}
    assert assigned(result) == {"B": ("float32[64, 20]", "cuda:1")}
    assert result.complete


def test_python_below_other_magics(notebook):
    result = dry(notebook, "%%time\nB = X + 1\nif B.sum() > 0: pass")
    assert assigned(result) == {"B": ("float32[64, 20]", "cuda:1")}
    assert ended(result)[0] == 4
    assert assigned(dry(notebook, "%time C = X * 2"))["C"] == ("float32[64, 20]", "cuda:1")


def test_what_a_cell_awaits_is_followed(notebook):
    result = dry(notebook, "import asyncio\nA = X + 1\nawait asyncio.sleep(0)\nB = zeros(2)")
    assert result.complete, result
    assert assigned(result)["B"] == ("float32[2]", "cuda:1")
    cell = "async def gen():\n    for n in range(3): yield n\nZ = [X * i async for i in gen()]"
    result = dry(notebook, cell)
    assert result.complete, result
    assert assigned(result)["Z"] == ("list of 3, 3 tensors", "cuda:1")


def test_what_can_be_read_once_is_read_in_the_copy(notebook):
    assert assigned(dry(notebook, "k = next(it)"))["k"] == ("int 0", "")
    assert next(notebook.ns["it"]) == 0


def test_files_that_it_imports_are_imported_anew_afterwards(
    notebook, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("code")
    (folder / "gm_constants.py").write_text("import torch\nTABLE = torch.arange(3)\n")
    monkeypatch.syspath_prepend(folder)
    result = dry(notebook, "import gm_constants\nk = X[gm_constants.TABLE]")
    assert assigned(result)["k"] == ("float32[3, 20]", "cuda:1")
    assert "gm_constants" not in sys.modules
