"""`compare`: what is measured, on which devices, and what is the same afterwards."""

import gc
import random
import sys
import traceback

import late as lates
import pytest
import torch
from late import GPU0, GPU1

from gpumagic import faults, virtual
from gpumagic.errors import GpuError
from gpumagic.telemetry.history import board
from gpumagic.timing import Comparison, compare, last_comparison

LATE = {"late": lates, "GPU0": GPU0, "GPU1": GPU1}


def measured(code, devices, *, space=None, **options):
    """On a clock of its own: how long it says that each took."""
    late = lates.begin(GPU0, GPU1)
    made = compare(
        code, devices, namespace=LATE | (space or {}), stopwatch=late.stopwatch, **options
    )
    return {timing.where: timing for timing in made.timings}


# -- the wait
def test_the_wait_is_counted_on_every_device_whichever_is_current(gpus):
    code = "late.work(0.001, GPU1, 0.25)"
    found = measured(code, ["cpu", 0, 1])
    assert [t.median for t in found.values()] == pytest.approx([0.251] * 3)
    assert [t.host_median for t in found.values()] == pytest.approx([0.001] * 3)


def test_many_queued_kernels_are_all_waited_for(gpus):
    found = measured("late.work(1e-7, GPU0, 1e-4)", [0])
    assert found["cuda:0"].number == 10
    assert found["cuda:0"].median == pytest.approx(1e-4, rel=2e-3)


def test_a_run_longer_than_the_limit_is_repeated_once(gpus):
    found = measured("late.work(30.0)", ["cpu", 0], max_time=5)
    assert [len(t.seconds) for t in found.values()] == [1, 1]
    assert lates.late.now == pytest.approx(100.0 + 4 * 30.0)


# -- what comes out
MINE = 4


def test_it_takes_the_callers_names_tells_the_board_and_is_kept(gpus):
    seen, told = [], []
    stop = board.subscribe(lambda: seen.append(board.now))
    made = compare("MINE + 1", ["cpu"], progress=told.append, max_time=0.01)
    stop()
    assert made is last_comparison()
    assert seen[0]["line"] == f"MINE + 1 · {told[0]}"
    assert [bar["where"] for bar in seen[0]["bars"]] == ["cpu"]
    assert [now for now in seen if now is None]
    assert board.now is None
    assert (board.entries[0]["title"], board.entries[0]["text"]) == (made.title, repr(made))
    (shown,) = made._repr_mimebundle_().values()  # what JupyterLab's panel draws
    assert (shown["title"], shown["bars"]) == (made.title, board.entries[0]["bars"])
    assert [bar["where"] for bar in shown["bars"]] == ["cpu"]


def test_a_result_that_cannot_be_drawn_is_not_lost(gpus, monkeypatch):
    def broken(self):
        raise RuntimeError("cannot be drawn")

    faults.forget()
    monkeypatch.setattr(Comparison, "__repr__", broken)
    made = compare("1", ["cpu"], max_time=0.01)
    assert made is last_comparison()
    assert "cannot be drawn" in faults.all_kept()[0].error
    faults.forget()


def test_each_device_gives_its_numbers(gpus):
    a = torch.randn(8, 8)
    made = compare("b = a @ a\nb.sum()", namespace={"a": a}, max_time=0.1, items=8)
    assert [t.where for t in made.timings] == ["cpu", "cuda:0", "cuda:1"]
    assert [t.virtual for t in made.timings] == [False, *[virtual.enabled()] * 2]
    assert [t.copied for t in made.timings][1:] == [a.nbytes] * 2
    # Its inputs were there when it began.
    assert all(a.nbytes <= t.peak[t.where] < 8 * a.nbytes for t in made.timings[1:])
    assert [(g.where, g.reference, g.same) for g in made.agreements] == [
        ("cuda:0", "cpu", True),
        ("cuda:1", "cpu", True),
    ]
    assert (made.code, made.interrupted) == ("b = a @ a\nb.sum()", False)
    assert [t.items for t in made.timings] == [8] * 3


def test_what_the_kernel_holds_besides_is_not_in_the_peak(gpus):
    held = torch.ones(2**20, device="cuda:0")
    (timing,) = compare("1 + 1", [0], max_time=0.01).timings
    assert held.nbytes == 2**22
    assert timing.peak == {"cuda:0": 0}


def test_without_a_gpu_it_says_that_there_is_nothing_to_compare_with(monkeypatch):
    from gpumagic.frameworks.known import Needed

    monkeypatch.setattr(Needed, "devices", lambda self, memory=False: [])
    assert "there is no GPU to compare with" in repr(compare("1", max_time=0.01))
    assert "no GPU" not in repr(compare("1", ["cpu"], max_time=0.01))


def test_transfers_in_a_run_are_told_and_ours_are_not(gpus):
    a = torch.ones(4, 4)
    made = compare("c = (a + a).cpu()", [0], namespace={"a": a}, max_time=0.1)
    assert "1 transfer" in made.timings[0].transfers
    assert compare("a + a", [0], namespace={"a": a}, max_time=0.1).timings[0].transfers == ""


def test_a_wrong_answer_is_seen(gpus):
    code = "c = a.sum() + (a.device.type == 'cuda')"
    made = compare(code, ["cpu", 0], namespace={"a": torch.ones(4)}, max_time=0.1)
    (agreement,) = made.agreements
    assert (agreement.same, agreement.name, agreement.largest) == (False, "c", 1.0)


def test_each_gpu_draws_the_same_and_the_cpu_others(gpus):
    code = "torch.randn(5)"
    made = compare(code, [0, 1, "cpu"], namespace={"torch": torch}, max_time=0.1)
    gpu, cpu = made.agreements
    assert gpu.same is True
    assert cpu.same is None
    assert "random" in cpu.reason


def test_a_function_is_timed_on_copies(gpus):
    a = torch.zeros(3)
    devices = []

    def step():
        devices and devices.append(None)
        a.add_(1)
        return a.device.type

    made = compare(step, ["cpu", 0], max_time=0.1)
    assert [t.error for t in made.timings] == [None, None]
    assert a.tolist() == [0.0] * 3
    assert made.code == "step()"


# -- sweeps
def test_every_value_on_every_device_before_the_next(gpus):
    made = compare(
        "x = torch.ones(n, n)",
        ["cpu", 1],
        namespace={"torch": torch},
        max_time=0.05,
        sweep={"n": [2, 4]},
        setup="k = n * 2",
    )
    assert [(t.where, t.values["n"]) for t in made.timings] == [
        ("cpu", 2), ("cuda:1", 2), ("cpu", 4), ("cuda:1", 4),
    ]  # fmt: skip
    assert made.sweep == {"n": (2, 4)}


def test_out_of_memory_ends_that_curve_and_frees(gpus):
    gc.collect()  # what other tests left
    before = torch.cuda.memory_allocated(0)
    made = compare(
        "x = torch.empty(n * 2**18)",
        [0, "cpu"],
        namespace={"torch": torch},
        max_time=0.02,
        sweep={"n": [1, 2**11, 2**12]},
    )
    found = {(t.where, t.values["n"]): t.error for t in made.timings}
    assert found[("cuda:0", 1)] is None
    assert found[("cuda:0", 2**11)] == "out of memory"
    assert ("cuda:0", 2**12) not in found
    assert found[("cpu", 2**11)] is None
    assert torch.cuda.memory_allocated(0) <= before


def test_words_have_no_size_that_could_be_beyond_memory(gpus):
    code = "if how == 'large':\n    raise MemoryError"
    made = compare(code, "cpu", max_time=0.01, sweep={"how": ["mid", "large", "small"]})
    assert [t.error for t in made.timings] == [None, "out of memory", None]


def test_a_sweep_over_tensors(gpus):
    values = torch.zeros(2), torch.ones(2)
    options = {"max_time": 0.05, "progress": lambda now: None, "sweep": {"x": values}}
    made = compare("x + 1", ["cpu", 0], namespace={}, **options)
    assert [t.error for t in made.timings] == [None] * 4
    assert [a.same for a in made.agreements] == [True, True]


def test_an_exception_at_a_later_value_is_a_mark_and_at_the_first_the_users(gpus):
    options = {"namespace": {}, "max_time": 0.02, "sweep": {"n": [1, 0, 2]}}
    made = compare("1 / n", ["cpu"], **options)
    assert [t.error for t in made.timings] == [
        None, "ZeroDivisionError: division by zero, line 1", None,
    ]  # fmt: skip
    with pytest.raises(ZeroDivisionError) as caught:
        compare("x = 2\n1 / (n - 1)", ["cpu"], **options)
    told = "".join(traceback.format_exception(caught.value))
    assert "timed on cpu, n = 1, line 2" in told


def test_a_sweep_of_sixty_values_interrupted_half_way_is_half_a_result(gpus):
    def press(now):
        if now.done == 60:
            raise KeyboardInterrupt

    late = lates.begin(GPU0, GPU1)
    told = []

    def progress(now):
        told.append(now.done)
        press(now)

    made = compare(
        "late.work(0.01 * n)",
        ["cpu", 0],
        sweep={"n": range(1, 61)},
        progress=progress,
        namespace=dict(LATE),
        stopwatch=late.stopwatch,
        max_time=0.5,
    )
    assert made.interrupted
    finished = [t for t in made.timings if t.seconds]
    assert len(finished) == 60
    assert {t.values["n"] for t in finished} == set(range(1, 31))
    assert finished[-1].median == pytest.approx(0.3)


# -- nothing is changed
def test_an_interrupt_anywhere_keeps_what_is_finished_and_leaves_nothing(gpus):
    space = LATE | {"x": torch.zeros(2), "torch": torch}
    code = "x += torch.rand(2)\nlate.work(0.05, GPU0, 0.1)"

    def go(interrupt):
        late = lates.begin(GPU0, GPU1)
        late.interrupt = interrupt
        return late, compare(
            code, ["cpu", 0], namespace=space, stopwatch=late.stopwatch, max_time=0.9
        )

    late, whole = go(None)
    assert not whole.interrupted
    stages, state, names = late.calls, torch.get_rng_state(), set(space)
    draws = random.getstate()
    for stage in range(2, stages + 1, max(stages // 8, 1)):
        late, made = go(stage)
        assert made.interrupted
        assert len(made.timings) <= 2
        assert all(t.seconds or t.error == "interrupted" for t in made.timings)
        if stage > 0.7 * stages:
            assert made.timings[0].seconds
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == draws
        assert (space["x"].tolist(), set(space)) == ([0.0, 0.0], names)
        assert torch.cuda.current_device() == 0


def test_what_code_sets_for_the_whole_process_is_put_back(gpus):
    code = (
        "torch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
        "torch.cuda.set_device(1)\ntorch.manual_seed(3)\nrandom.seed(4)\n"
        "torch.use_deterministic_algorithms(True)\ntorch.set_autocast_enabled('cpu', True)\n"
        "torch.set_float32_matmul_precision('high')\ntorch.backends.cudnn.benchmark = True"
    )
    draws, state = random.getstate(), torch.get_rng_state()
    compare(code, ["cpu", 0], namespace={"torch": torch, "random": random}, max_time=0.02)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.cuda.current_device() == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark
    assert random.getstate() == draws
    assert torch.equal(torch.get_rng_state(), state)


def test_new_tensors_are_made_on_the_device_and_on_the_cpu_nothing_is_placed(gpus):
    seen = lates.seen
    seen.clear()
    code, space = "late.seen.append(torch.ones(1).device.type)", {"torch": torch, "late": lates}
    compare(code, ["cpu", 1], namespace=space, max_time=0.02)
    assert set(seen) == {"cpu", "cuda"}
    torch.set_default_device("cuda:0")
    seen.clear()
    compare(code, ["cpu"], namespace=space, max_time=0.02)
    assert set(seen) == {"cpu"}
    assert torch.get_default_device() == torch.device("cuda", 0)


def test_what_it_prints_is_shown_once_and_others_print_as_ever(gpus, capsys):
    code = "print('hello')\nprint('there', file=sys.stderr)"
    space = {"sys": sys}
    options = {"namespace": space, "max_time": 0.05, "progress": lambda now: print(".")}
    made = compare(code, ["cpu", "0+1"], **options)
    shown = capsys.readouterr()
    assert (shown.out.count("hello"), shown.err.count("there")) == (1, 1)
    assert "." in shown.out
    assert made.notes == ("the output of the code is shown for its first run only",)
    assert compare("1", ["cpu"], max_time=0.01).notes == ()


@pytest.mark.parametrize(
    ("code", "devices", "options", "says"),
    [
        ("1", ["cpu", "cpu"], {}, "cpu is named twice"),
        ("1", "cpu,0,cuda:0", {}, "cuda:0 is named twice"),
        ("1", [0, 7], {}, "no cuda:7|no GPU 7"),
        ("1", ["tpu"], {}, "tpu"),
        ("1", [], {}, "no device in the list"),
        ("", ["cpu"], {}, "there is no code"),
        ("1", ["cpu"], {"max_time": 0}, "max_time=0 is not a number above 0"),
        ("1", ["cpu"], {"items": float("nan")}, "items nan: nan is not a number"),
        ("1", ["cpu"], {"sweep": {"a": [1], "b": [1]}}, "over one variable"),
    ],
)
def test_nonsense_is_refused_with_a_line(gpus, code, devices, options, says):
    with pytest.raises(GpuError, match=says) as caught:
        compare(code, devices, **options)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_here_is_the_cpu_that_is_named_too(gpus):
    for named in (["cpu", "7?"], ["7?", "cpu"]):
        assert [*measured("late.work(1.0)", named, max_time=0.02)] == ["cpu"]


def test_without_devices_it_is_the_cpu_and_every_gpu(gpus):
    assert list(measured("late.work(1.0)", None, max_time=1)) == ["cpu", "cuda:0", "cuda:1"]
    assert list(measured("late.work(1.0)", "all cpu", max_time=1)) == ["cuda:0", "cuda:1", "cpu"]
