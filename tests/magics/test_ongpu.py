"""`%%ongpu` in an IPython shell: the user's cell runs as if the line were not there."""

import linecache
import re

import pytest
import torch
from ours import OURS

import gpumagic
from gpumagic.magics.ongpu import transform

BEGIN = "get_ipython().begin_ongpu"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%ongpu 1\nx\n", "BEGIN('%%ongpu 1')\nx\n"),
        ("\n\n%%ongpu 1\nx\n", "\n\nBEGIN('%%ongpu 1')\nx\n"),
        ("# why\n\n%%ongpu 1\nx\n", "# why\n\nBEGIN('%%ongpu 1')\nx\n"),
        ("# why\nx\n%%ongpu 1\n", None),
        ("%%ongpu\nx\n", "BEGIN('%%ongpu')\nx\n"),
        ("%%ongpu  cuda?  \nx\n", "BEGIN('%%ongpu  cuda?')\nx\n"),
        ("%%ongpu 'a b'\nx\n", "BEGIN(\"%%ongpu 'a b'\")\nx\n"),
        ("%%ongpu?\n", None),
        ("%%ongpu ?\n", None),
        ("%%ongpu??\n", None),
        ("%%ongpu 1\n", None),
        ("%%ongpu 1\n\n  \n", None),
        ("%%ongpu -h\nx\n", None),
        ("%%ongpu help\nx\n", None),
        ("%%ongpus 1\nx\n", None),
        ("x\n%%ongpu 1\n", None),
        ("%ongpu 1\nx\n", None),
        ("%ongpu cuda?\n", "get_ipython().run_line_magic('ongpu', 'cuda?')\n"),
        ("%ongpu?\n", None),
        (
            "%%ongpu 1\n%%time\nx\n",
            "BEGIN('%%ongpu 1'); get_ipython().run_cell_magic('time', '', 'x\\n')\n",
        ),
        ("", ""),
    ],
)
def test_transform(cell, expected):
    expected = (cell if expected is None else expected).replace("BEGIN", BEGIN)
    lines = cell.splitlines(keepends=True)
    before = list(lines)
    assert "".join(transform(lines)) == expected
    assert lines == before  # pure


# ---------------------------------------------------------------- what the cell sees
def test_variables_come_new_ones_land_and_the_report_says_so(ip):
    ip.run("X = torch.ones(1000); alias = X; unread = torch.ones(3)")
    done = ip.run("%%ongpu 1\nY = X * 2 + zeros(1000)")
    ns = ip.ns
    assert ns["X"] is ns["alias"]
    assert ns["X"].device == ns["Y"].device == torch.device("cuda:1")
    assert ns["unread"].device.type == "cpu"
    report = gpumagic.last_report()
    assert done.text.strip() == str(report)
    assert "cuda:1 (virtual" in done.text
    assert "moved X: 3.9 KiB from cpu in" in done.text
    assert "peak" in done.text
    assert report.moved_bytes == 4000
    assert {m.device for m in report.memory} == {"cuda:1"}
    assert report.memory[0].peak >= 12 * 1024


def test_the_line_may_name_a_device_by_a_variable_below_a_comment(ip):
    ip.run("device = 'cuda:1'")
    ip.run("# on another GPU\n%%ongpu $device\ny = zeros(3)")
    assert ip.ns["y"].device == torch.device("cuda:1")
    ip.run("device = 'cuda:0'")
    ip.run("# on another GPU\n%%ongpu $device\ny = zeros(3)")
    assert ip.ns["y"].device == torch.device("cuda:0")
    assert "'$devise' is not a device" in ip.run("%%ongpu $devise\ny = zeros(3)").text
    ip.run("n = 1\n")
    ip.run("%%ongpu cuda:{n}\ny = zeros(3)")
    assert ip.ns["y"].device == torch.device("cuda:1")
    assert "'{m}' is not a device" in ip.run("%%ongpu {m}\ny = zeros(3)").text


def test_functions_of_the_notebook_are_followed(ip):
    ip.run("net = nn.Linear(2, 2); data = torch.ones(3, 2)\ndef evaluate():\n    return net(data)")
    ip.run("%%ongpu 1\nout = evaluate()")
    assert ip.ns["out"].device.index == 1


def test_an_unnamed_optimizer_follows(ip):
    ip.run(
        "net = nn.Linear(2, 2); opt = torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1, 2)).sum().backward(); opt.step()"
    )
    ip.run("%%ongpu 1\nnet(torch.ones(1, 2)).sum().backward()")
    assert ip.run("opt.step()").success


def test_no_move_and_quiet(ip):
    ip.run("X = torch.ones(2)")
    assert ip.run("%%ongpu 1 --no-move\nY = X + 1").success
    assert ip.ns["Y"].device.type == "cpu"
    assert (
        ip.run("%%ongpu 1 --quiet\nX").text.strip() == "Out[4]: tensor([1., 1.], device='cuda:1')"
    )
    assert gpumagic.last_report().moved_bytes == 8


def test_work_that_no_move_left_elsewhere_is_no_fault_of_the_code(ip):
    ip.run("X = torch.ones(2, device='cuda:0')")
    done = ip.run("%%ongpu 1 --no-move\nY = X + 1")
    assert "all work was on cuda:0, where --no-move left the cell's data" in done.text
    assert "→" not in done.text


def test_back_brings_home_what_the_cell_brought(ip):
    ip.run("X, net = torch.ones(4, 2), nn.Linear(2, 1); adam = torch.optim.Adam(net.parameters())")
    code = "loss = net(X).sum(); loss.backward(); adam.step(); log = {'z': X * 2, 'n': [1]}"
    done = ip.run(f"%%ongpu 1 --back\n{code}; head = nn.Linear(2, 1)")
    assert re.search(r"moved net, X: \d+ B from cpu in .*, and back in \d", done.text)
    assert " · new on cuda:1: loss, log, head\n" in done.text
    ns = ip.ns
    assert {t.device.type for t in (ns["X"], *ns["net"].parameters())} == {"cpu"}
    assert ns["net"].weight.grad.device.type == "cpu"
    assert ns["loss"].device.index == 1
    assert ip.run("net(X).sum().backward(); adam.step()").success


def test_back_brings_home_after_an_error_too(ip):
    ip.run("X = torch.ones(2)")
    assert ip.run("%%ongpu 1 --back\nX += 1; 1 / 0").error.__class__ is ZeroDivisionError
    assert ip.ns["X"].device.type == "cpu"
    assert ip.ns["X"].tolist() == [2, 2]


def test_the_first_move_for_good_says_so_and_home_undoes_all(ip):
    ip.run("X = torch.ones(2); y = torch.ones(2)")
    assert "for good" not in ip.run("%%ongpu 1 --back\nX + 1").text
    assert ip.run("z = torch.ones(2)\n%ongpu 1 --quiet\nz + 1").text.count("for good") == 0
    assert ip.run("%ongpu off\n%ongpu home").success
    assert " for good (%ongpu home undoes it)" in ip.run("%%ongpu 1\nX + 1").text
    assert "for good" not in ip.run("%%ongpu 0\ny + 1").text
    assert re.match(r"moved back X, y: 16 B from cuda:1, cuda:0", ip.run("%ongpu home").text)
    assert ip.ns["X"].device == ip.ns["y"].device == torch.device("cpu")
    assert ip.run("%ongpu home").text.startswith("nothing to move back")
    ip.run("%%ongpu 1\nz = X + 1; w = z * 2")
    assert "; still on a GPU: z, w" in ip.run("%ongpu home").text


def test_home_says_of_each_object_once_where_it_is_and_not_who_put_it_there(ip):
    ip.run("import gpumagic; A, B, C = torch.ones(5), torch.ones(5), nn.Linear(2, 2)")
    ip.run("gpumagic.move(A, 1); C.cuda(1); parts = [torch.ones(3), torch.ones(3, device='cuda')]")
    assert ip.run("%ongpu home").text == "nothing to move back; still on a GPU: A, C, parts\n"
    ip.run("%%ongpu 0\nA + B + parts[0].sum()")
    said = ip.run("%ongpu home").text
    assert re.match(r"moved back A, B, parts: .*; still on a GPU: C, part of parts\n", said), said
    assert ip.ns["A"].device == torch.device("cuda:1")


def test_work_on_the_gpu_of_a_graph_that_stayed_is_explained_by_that_each_time(ip):
    ip.run("%%ongpu 1\nnet = nn.Linear(20, 2)\nloss = net(torch.ones(30, 20)).sum()")
    for code in ("(loss * 2).item()", "(loss * 2).item()", "loss.backward()"):
        said = ip.run(f"%%ongpu 0\n{code}").text
        assert "all work was on cuda:1" in said
        assert "left loss: its graph is on cuda:1; compute it in this cell instead" in said
        assert "chose that device itself" not in said
    said = ip.run("%%ongpu 0\n(torch.ones(9, device='cuda:1') * 2).sum()").text
    assert "chose that device itself" in said


def test_an_error_says_which_cell_brought_the_data_away(ip):
    ip.run("X = torch.ones(2, 2)")
    ip.run("%%ongpu 1\nX + 1")
    text = ip.run("net = nn.Linear(2, 2)\nnet(X)").text
    assert re.search(r"why: In \[\d\] moved X to cuda:1; to undo: %ongpu home;", text)
    ip.run("%ongpu home")
    assert ip.run("net(X)").success
    assert "to undo" not in ip.run("%%ongpu 1\nnet(torch.ones(1, 2, device='cpu'))").text


@pytest.mark.parametrize("changed", ["net.cpu(); net.to('cuda:1')", "net.to('cuda:1', torch.half)"])
def test_a_module_goes_home_whole_also_with_new_buffers(ip, changed):
    ip.run("net = nn.BatchNorm1d(3); X = torch.ones(4, 3)")
    ip.run("%%ongpu 1\nnet(X)")
    ip.run(changed)
    assert "still on" not in ip.run("%ongpu home").text
    assert {str(x.device) for x in ip.ns["net"].state_dict().values()} == {"cpu"}
    ip.run(f"%%ongpu 1 --back\nnet(X); {changed}")
    assert {str(x.device) for x in ip.ns["net"].state_dict().values()} == {"cpu"}


def test_fix_names_its_lines_also_if_they_are_few(ip):
    ip.run("x = torch.ones(2)")
    done = ip.run("%%ongpu 1 --fix\nw = torch.ones(2, device='cuda:0')\nz = x * w")
    assert re.search(r"\n *3 .*x \* w +cuda:0 → cuda:1", done.text)
    done = ip.run("%%ongpu 1 --fix --strict\nw = torch.ones(2, device='cuda:0')\nx + w")
    assert "ImplicitCopyError: line 3: `x + w` copies" in done.text
    assert "During handling" not in done.text


def test_workers_of_a_loader_whose_data_was_brought_away_are_explained(ip):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "X = torch.ones(4, 2); loader = DataLoader(TensorDataset(X), num_workers=1)"
    )
    ip.run("%%ongpu 1\nX + 1")
    text = ip.run("for batch in loader: pass").text
    assert "between devices" in text
    told = " ".join(text.split())
    assert "make loader again with num_workers=0" in told


def test_a_tensor_of_which_only_the_shape_is_read_stays(ip):
    ip.run("big = torch.ones(1000); small = torch.ones(2)")
    ip.run("%%ongpu 1\nprint(big.shape, len(big), big.dtype, big.device, small.sum())\nbig.device")
    assert [m.name for m in gpumagic.last_report().moved] == ["small"]
    # What is made like it, and what a function of the user's own does, may need where it is.
    ip.run("X = torch.ones(2); id = lambda value: value * 2")
    assert ip.run("%%ongpu 1\nsmall + torch.ones(big.shape[0] // 500, device=big.device)").success
    assert ip.run("%%ongpu 1\nsmall + id(X)").success


def test_back_says_nothing_of_back_where_it_had_no_room(ip):
    ip.run("X = torch.ones(1000, device='cuda:0'); size = torch.cuda.mem_get_info(0)[1] - 2048")
    cell = "X + 1; fill = torch.empty(size, dtype=torch.uint8, device='cuda:0')"
    text = ip.run(f"%%ongpu 1 --back\n{cell}").text
    assert "moved X: 3.9 KiB from cuda:0" in text
    assert "and back" not in text
    assert "left X: cuda:0 has" in text


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.pin_memory")
def test_batches_of_a_loader_land_and_are_counted(ip):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset, random_split\n"
        "data = TensorDataset(torch.arange(10.0), torch.arange(10))\n"
        "def places(loader): return {t.device.type for batch in loader for t in batch}"
    )
    body = "\nseen = places(DataLoader(data, batch_size=4, shuffle=True, {}))"
    for options in ("", "generator=torch.Generator()", "pin_memory=True", "drop_last=True"):
        done = ip.run("%%ongpu 1" + body.format(options))
        assert done.success, done.text
        assert ip.ns["seen"] == {"cuda"}
    assert "2 batches: 96 B copied" in done.text
    assert ip.run("%%ongpu 1 --no-move" + body.format("")).success
    assert ip.ns["seen"] == {"cpu"}
    ip.run(
        "%%ongpu 1\nparts = random_split(data, [4, 6])\n"
        "r = torch.randperm(5, generator=torch.Generator())"
    )
    assert [len(p) for p in ip.ns["parts"]] == [4, 6]
    assert sorted(ip.ns["r"].tolist()) == list(range(5))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loaders_with_workers_and_a_dataset_that_makes_tensors(ip):
    ip.run(
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, n): return {'x': torch.tensor(float(n)), 'y': n * n}\n"
    )
    for workers in (0, 2):
        done = ip.run(
            "%%ongpu 1\n"
            f"loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers={workers},"
            " multiprocessing_context='fork' if " + str(workers) + " else None)\n"
            "batches = list(loader)"
        )
        assert done.success, done.text
        assert [b["y"].tolist() for b in ip.ns["batches"]] == [[0, 1, 4], [9, 16, 25]]
        assert {b["x"].device.index for b in ip.ns["batches"]} == {1}


def test_out_underscore_and_semicolon(ip):
    done = ip.run("%%ongpu 1\nzeros(2)")
    n = done.execution_count
    assert done.result.device.index == 1
    assert ip.ns["Out"][n] is done.result is ip.ns["_"]
    assert ip.run("%%ongpu 1\nzeros(2);").text.count("tensor") == 0
    assert ip.ns["In"][n] == f"{BEGIN}('%%ongpu 1')\nzeros(2)"
    assert ip.ns["_ih"] is ip.ns["In"]


def test_tracebacks_have_the_users_line_numbers(ip):
    done = ip.run("%%ongpu 1\nx = 1\n\n1 / 0")
    assert isinstance(done.error, ZeroDivisionError)
    assert done.error.__traceback__.tb_next.tb_lineno == 4
    assert "line 4" in done.text
    assert OURS not in done.text
    assert "ZeroDivisionError after" in done.text
    assert gpumagic.last_report().error == "ZeroDivisionError"


def test_await(ip):
    done = ip.run("%%ongpu 1\nimport asyncio\nawait asyncio.sleep(0)\nzeros(1)")
    assert done.result.device.index == 1


def test_future_imports_docstrings_and_syntax_errors(ip):
    assert ip.run("%%ongpu 1\nfrom __future__ import annotations\nzeros(1)").result.is_cuda
    done = ip.run("X = torch.ones(2)")
    done = ip.run("%%ongpu 1\nX + (")
    assert isinstance(done.error, SyntaxError)
    assert done.error.lineno == 2
    assert ip.ns["X"].device.type == "cpu"


def test_other_magics_beneath_and_above(ip):
    ip.run("X = torch.ones(2)")
    for cell in (
        "%%ongpu 1\n%%time\nseen = X.sum().device, zeros(1).device",
        "%%time\n%%ongpu 1\nseen = X.sum().device, zeros(1).device",
        "%%prun -q\n%%ongpu 1\nseen = X.sum().device, zeros(1).device",
        "%%ongpu 1\n\n%%capture out\nseen = X.sum().device, zeros(1).device",
        "%%ongpu 1\n%time seen = X.sum().device, zeros(1).device",
        "%%ongpu 1\nx = 1\n%timeit -n 1 -r 1 seen.extend([X.sum().device, zeros(1).device])",
    ):
        ip.run("X = X.cpu(); seen = []")
        done = ip.run(cell)
        assert done.success, done.text
        assert {d.index for d in ip.ns["seen"]} == {1}, cell
    assert ip.run("%%ongpu 1\n%%time\n1 / 0").error.__class__ is ZeroDivisionError


def test_nested_on_and_nested_cells(ip):
    ip.run(
        "%%ongpu 1\nimport gpumagic\n"
        "with gpumagic.on(0):\n    inner = zeros(1)\n"
        "get_ipython().run_cell('%%ongpu 0\\ncell = zeros(1)')\n"
        "outer = zeros(1)"
    )
    assert [ip.ns[n].device.index for n in ("inner", "cell", "outer")] == [0, 0, 1]


def test_a_silent_cell_within_leaves_the_placement_as_it_is(ip):
    done = ip.run(
        "%%ongpu 1\nsilent = lambda cell: get_ipython().run_cell(cell, silent=True)\n"
        "refused = silent('%%ongpu 0\\na = zeros(1)').error_in_exec; silent('b = zeros(1)')\n"
        "c = zeros(1)"
    )
    assert done.success
    assert "silently" in str(ip.ns["refused"])
    assert "a" not in ip.ns
    assert [ip.ns[n].device.index for n in "bc"] == [1, 1]
    assert done.text.count("virtual") == 1


def test_what_begins_in_a_silent_cell_ends_with_it(ip):
    ip.run("%ongpu 1", silent=True, store_history=False)
    assert gpumagic.placement.placement() is None
    ip.run("%ongpu off")


def test_an_interrupted_dry_run_shows_no_frame_of_ours(ip, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpumagic.dryrun.follow_code.dry", interrupted)
    done = ip.run("%%ongpu 1 --dry-run\nwhile True: pass")
    assert isinstance(done.error, KeyboardInterrupt)
    assert "the dry run was interrupted; your variables have not changed" in done.text
    assert OURS not in done.text


def test_a_dry_run_below_a_magic_that_runs_code_itself_is_refused(ip):
    done = ip.run("%%prun -q\n%%ongpu 1 --dry-run\nx = 1")
    assert "--dry-run must be the first line" in done.text
    assert "x" not in ip.ns


def test_run_cell_magic_returns_the_last_value_and_raises(ip):
    done = ip.run("get_ipython().run_cell_magic('ongpu', '1', 'x = 1\\nzeros(x)')")
    assert done.result.device.index == 1
    assert ip.run("get_ipython().run_cell_magic('ongpu', '1', 'y = zeros(3)')").result is None
    done = ip.run("get_ipython().run_cell_magic('ongpu', '1', '1 / 0')")
    assert isinstance(done.error, ZeroDivisionError)


def test_keyboard_interrupt(ip):
    done = ip.run("%%ongpu 1\nraise KeyboardInterrupt")
    assert isinstance(done.error, KeyboardInterrupt)
    assert "KeyboardInterrupt after" in done.text


def test_explicit_devices_and_bare_cuda(ip):
    ip.run("%%ongpu 1\na = zeros(1, device='cpu')\nb = zeros(1, device='cuda')\nc = a.cuda()")
    assert [str(ip.ns[n].device) for n in "abc"] == ["cpu", "cuda:1", "cuda:1"]


def test_a_thread_of_the_user_is_not_placed(ip):
    ip.run(
        "%%ongpu 1\nimport threading\nseen = []\n"
        "t = threading.Thread(target=lambda: seen.append(torch.zeros(1).device.type))\n"
        "t.start(); t.join()"
    )
    assert ip.ns["seen"] == ["cpu"]


def test_other_devices_that_the_cell_touches_are_in_the_report(ip):
    ip.run("%%ongpu 1\nx = torch.ones(10, device='cuda:0')")
    assert [m.device for m in gpumagic.last_report().memory] == ["cuda:0"]
    ip.run("%%ongpu cpu\nx = torch.ones(10)")
    assert gpumagic.last_report().memory == ()


@pytest.mark.parametrize(
    ("cell", "where"),
    [
        ("y = X.cpu() @ X.cpu()", "all work was on cpu"),
        ("y = hidden()", "all work was on cpu"),
        ("loss.backward()", "all work was on cpu"),
        ("y = X.to('cuda:0') @ X.to('cuda:0')", "all work was on cuda:0"),
        (
            "y = X @ X\nfor n in range(24): y = X.to('cuda:0') @ X.to('cuda:0')",
            "% of the cell's allocations were on cuda:0",
        ),
        ("for (x,) in loader: total = x.cpu() * 2", "all work was on cpu"),
        ("y = X.cpu()", ""),
        ("y = X.cpu().numpy(); z = X.tolist()", ""),
        ("y = X @ X", ""),
        ("X.add_(1)", ""),
        ("shared *= 2", ""),
        ("print(X.shape)", ""),
        ("y = X.cpu(); 1 / 0", ""),
    ],
)
def test_work_that_was_all_elsewhere_is_told(ip, cell, where):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "X = torch.ones(2, 2); loader = DataLoader(TensorDataset(X.clone()))\n"
        "hidden = (lambda x: lambda: x * 2)(torch.ones(2)).__call__\n"
        "array = torch.ones(2).numpy(); shared = torch.from_numpy(array)\n"
        "loss = torch.ones(1, requires_grad=True) * 2"
    )
    done = ip.run(f"%%ongpu 1\n{cell}")
    assert gpumagic.last_report().elsewhere.endswith(where)
    assert ("asked for cuda:1; " in done.text) == bool(where)
    assert where in done.text


def test_a_cell_whose_data_stay_on_the_cpu_says_so_though_no_result_has_a_name(ip):
    ip.run("X = torch.ones(200, 200)")
    assert "nothing there; --no-move left its" in ip.run("%%ongpu 1 --no-move\n(X @ X).sum()").text
    assert "nothing" not in ip.run("%%ongpu 1 --no-move\nsorted(range(9))").text


def test_a_long_cell_that_allocates_nothing_on_its_gpu_says_so(ip, monkeypatch):
    assert "nothing" not in ip.run("%%ongpu 1\nsorted(range(9))").text
    monkeypatch.setattr("gpumagic.cell.run.LEAST_S", 0.0)
    told = "asked for cuda:1; the cell allocated nothing there · "
    assert told in ip.run("%%ongpu 1\nsorted(range(9))").text
    ip.run("X = torch.ones(2)")
    # The second time X is there already, so the cell neither moves nor allocates anything.
    in_place = "%%ongpu 1\nX.add_(1)"
    for cell in (in_place, in_place, "%%ongpu 1\nX + 1", "%%ongpu cpu\nX + 1"):
        assert "nothing" not in ip.run(cell).text


def test_a_dataset_that_a_cell_reads_is_named_unless_its_batches_came(ip):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.ones(4, 2)); net = nn.Linear(2, 1)"
    )
    assert "left data: a dataset stays" in ip.run("%%ongpu 1\nlen(data)").text
    again = ip.run("%%ongpu 1\nlen(data)")
    assert "dataset stays" not in again.text  # said once in a notebook
    assert "dataset stays" in gpumagic.last_report()._repr_html_()
    cell = "%%ongpu 1\nfor (x,) in DataLoader(data): net(x)"
    assert "left" not in ip.run(cell).text


def test_an_object_of_a_library_that_the_cell_reads_comes_along(ip):
    ip.run(
        "made = torch.distributions.Normal(torch.zeros(3), torch.ones(3)); net = nn.Linear(3, 2)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters()), 1)"
    )
    done = ip.run("%%ongpu 1\ny = net(made.sample((4,)))")
    assert done.success, done.text
    assert "moved net, made" in done.text
    assert ip.run("%%ongpu 0\nschedule.get_last_lr()").success
    assert ip.ns["net"].weight.device.index == 0


def test_the_notebooks_own_objects_come_along(ip):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.net = nn.Linear(2, 1)\n"
        "        self.opt = torch.optim.Adam(self.net.parameters())\n"
        "        self.loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)\n"
        "    def fit(self):\n"
        "        for (x,) in self.loader:\n"
        "            self.opt.zero_grad(); self.net(x).sum().backward(); self.opt.step()\n"
        "trainer = Trainer(); trainer.fit()"
    )
    done = ip.run("%%ongpu 1\ntrainer.fit()")
    assert done.success, done.text
    assert "moved trainer" in done.text
    assert "2 batches" in done.text
    assert ip.run("%%ongpu 0\ntrainer.net(torch.ones(1, 2))").success
    assert ip.run("trainer.opt.step()").success  # its state followed


def test_a_class_that_refuses_to_be_asked_stops_no_cell(ip):
    ip.run(
        "class Meta(type):\n"
        "    def __getattribute__(cls, name): raise ValueError(name)\n"
        "class Odd(metaclass=Meta): pass\n"
        "odd = Odd(); held = [odd]; X = zeros(3)"
    )
    done = ip.run("%%ongpu 1\nY = X + 1")
    assert done.success, done.text
    assert ip.run("%%ongpu 1\nread = odd, held, X").success


def test_deepcopies_on_a_virtual_gpu(ip):
    done = ip.run(
        "%%ongpu 1\nimport copy\nnet = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))\n"
        "best, twin = copy.deepcopy(net.state_dict()), copy.deepcopy(net)\n"
        "net.load_state_dict(best)"
    )
    assert done.success, done.text
    assert {t.device.index for t in ip.ns["best"].values()} == {1}


@pytest.mark.parametrize(
    "cell",
    [
        "  %%ongpu 1\n  x = zeros(1)",
        ">>> %%ongpu 1\n>>> x = zeros(1)",
        "In [1]: %%ongpu 1\n   ...: x = zeros(1)",
        "\n\n%%ongpu 1 # a note\nx = zeros(1)",
    ],
)
def test_pasted_and_indented_cells(ip, cell):
    done = ip.run(cell)
    assert done.success, done.text
    assert ip.ns["x"].device.index == 1
    assert done.text.startswith("cuda:1 (virtual")


def test_without_pretty_printing_the_report_is_the_line_too(ip):
    ip.run("%pprint")
    assert ip.run("%%ongpu 1\nzeros(1);").text.startswith("cuda:1 (virtual")
    ip.run("%pprint")


def test_a_traceback_shows_the_line_as_it_was_typed(ip):
    ip.run("%%ongpu 1 --quiet\ndef made(): 1 / 0")
    file = ip.ns["made"].__code__.co_filename
    assert linecache.getlines(file) == ["# %%ongpu 1 --quiet\n", "def made(): 1 / 0\n"]


@pytest.mark.parametrize("comment", ["see f(); g", "it's f();", '"a" isn\'t f()', "\\');"])
def test_a_comment_may_contain_any_code(ip, comment):
    done = ip.run(f"%%ongpu 1 --quiet # {comment}\ndef made(): 1 / 0")
    assert done.success, done.text
    file = ip.ns["made"].__code__.co_filename
    assert linecache.getlines(file)[0] == f"# %%ongpu 1 --quiet # {comment}\n"


def test_a_graph_that_the_cell_makes_again_is_not_told_as_left_behind(ip):
    ip.run("w = torch.ones(3, requires_grad=True); loss = (w * 2).sum()")
    again = "for _ in range(2):\n    loss = w.pow(2).sum()\n    loss.backward()"
    assert "left" not in ip.run(f"%%ongpu 1\n{again}").text
    assert "left loss: its graph is on cuda:1" in ip.run("%%ongpu 0\n[loss]").text


def test_what_datasets_and_loaders_read_stays_on_the_host(ip):
    ip.run(
        "from torch.utils.data import DataLoader, Dataset\nmean = torch.full((4,), 0.5)\n"
        "class Digits(Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, i):\n        return torch.ones(4) - mean\n"
        "def collate(items):\n    return torch.stack(items) - mean\n"
        "net = nn.Linear(4, 4); loader = DataLoader([torch.ones(4)] * 4, collate_fn=collate)"
    )
    for loader in ("DataLoader(Digits(), batch_size=2)", "loader"):
        done = ip.run(f"%%ongpu 1\nfor b in {loader}:\n    net(b)")
        assert done.success, done.text
        assert ip.ns["mean"].device.type == "cpu"
