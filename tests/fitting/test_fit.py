"""The largest value that fits: exact on virtual GPUs, and nothing is changed by finding it."""

import gc
import re
from dataclasses import replace

import pytest
import torch
from fit_models import MODELS, brute_force, step_of
from torch import nn

import gpumagic
from gpumagic.dryrun.result import Unknown
from gpumagic.fitting import fit_search
from gpumagic.fitting.fit_result import Fit, Largest, Tried

MIB = 2**20


def _hold(mib):
    held = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda:1")
    yield
    del held
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def small(gpus):
    """cuda:1 with 24 MiB that are free."""
    yield from _hold(1000)


@pytest.fixture
def tiny(gpus):
    """cuda:1 with 6 MiB that are free."""
    yield from _hold(1018)


FEW = [("mlp", "adamw"), ("conv", "sgd"), ("attention", "eval")]
ALL = [(model, way) for model in MODELS for way in ("sgd", "adamw", "eval")]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("model", "way"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_the_value_is_the_largest_that_runs(model, way):
    step, net, _ = step_of(model, way)
    before = [tensor.clone() for tensor in net.state_dict().values()]
    random_state, allocated = torch.get_rng_state(), torch.cuda.memory_allocated(1)
    exact = gpumagic.fit(step, 1, batch=range(1, 10**6), margin=0)
    assert exact.confirmed
    assert exact.trains is (way != "eval")
    assert exact.value == brute_force(model, way, exact.value)
    # Nothing of the user's has changed.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.cuda.memory_allocated(1) == allocated
    assert all(map(torch.equal, before, net.state_dict().values()))


@pytest.mark.usefixtures("small")
def test_the_margin_stays_free():
    result = gpumagic.fit(lambda n: torch.ones(n, MIB // 4), 1, n=range(1, 100), margin=0.25)
    assert (result.value, result.confirmed) == (18, True)
    assert result.largest[0].room == 18 * MIB
    assert str(result).splitlines()[0].endswith("; a run confirms it; the power of two below: 16")
    assert "fits only without the margin" in str(result)


@pytest.mark.usefixtures("small")
def test_garbage_takes_no_room():
    def of(data):  # a reference cycle that holds 16 MiB
        data["itself"] = data

    gc.disable()
    try:
        of({"held": torch.empty(16 * MIB, dtype=torch.uint8, device="cuda:1")})
        step = lambda n: torch.ones(n, MIB // 4)  # noqa: E731
        assert gpumagic.fit(step, 1, n=range(1, 100), margin=0).value == 24
    finally:
        gc.enable()


@pytest.mark.usefixtures("small")
def test_the_answer_has_the_values_of_the_table():
    result = gpumagic.fit(lambda n: torch.ones(n, 4), 1, n=range(1, 10**7), dry=True, margin=0.1)
    above = next(tried.value for tried in result.tried if tried.value > result.value)
    said = f"n = {result.value} is the largest known to fit ({above} does not fit with 10 %"
    assert str(result).startswith(said)
    assert re.search(
        rf"\n +{result.value} .* largest\n +{above} .* fits only without the margin\n", str(result)
    )
    assert "; the power of two below: 1_048_576" in str(result)
    exact = gpumagic.fit(lambda n: torch.ones(n, 512), 1, n=range(1, 10**6), dry=True, margin=0)
    assert str(exact).startswith(f"n = {exact.value} is the largest that fits on cuda:1")


@pytest.mark.usefixtures("small")
def test_in_few_steps_each_of_which_is_told():
    told = []
    weights = torch.ones(64, 64)
    space = {"torch": torch, "weights": weights}
    result = gpumagic.fit(
        "(torch.randn(n, 64) @ weights).relu_()",
        "cuda:1",
        n=range(1, 10**6),
        namespace=space,
        progress=told.append,
    )
    assert sum(tried.predicted is not None for tried in result.tried) <= 6
    assert [tried.value for tried in result.tried if tried.ran] == [result.value]
    assert told[0] == "dry run of n = 1"
    assert told[1].startswith("dry run of n = 1 needs ")
    assert told[-1].startswith(f"run of n = {result.value} needs ")
    above = next(tried for tried in result.tried if tried.value > result.value)
    assert result.value + 1 < above.value <= result.value * 1.025  # half of the margin
    said = f"n = {result.value} is the largest known to fit ({above.value} does not fit "
    assert f"{said}with 5 % left free) on cuda:1" in str(result)
    assert weights.device.type == "cpu"


@pytest.mark.usefixtures("small")
def test_where_data_decide_it_is_found_by_runs():
    def step(batch):
        X = torch.rand(batch, 2**18)
        return X * 2 if X.sum() > 0 else X

    result = gpumagic.fit(step, 1, batch=range(1, 100), margin=0)
    assert result.value == 12  # two of 1 MiB each
    assert result.confirmed
    assert result.trains is None
    assert "found by runs alone; the dry run ended early: " in result.notes[0]
    with pytest.raises(gpumagic.GpuError, match=r"the dry run ended early: .*depends on data"):
        gpumagic.fit(step, 1, batch=range(1, 100), dry=True)
    none = str(gpumagic.fit(step, 1, batch=[40, 50]))
    assert "no batch fits on cuda:1 (virtual): batch = 40 ran out of memory with 24.0 MiB" in none


@pytest.mark.usefixtures("small")
def test_what_lies_there_already_has_no_room_for_its_copies():
    weights = torch.ones(9 * MIB // 4, device="cuda:1")  # of 24 MiB

    def step(batch):
        return weights.sum() + torch.ones(batch, MIB // 4).sum()

    result = gpumagic.fit(step, 1, batch=range(1, 100), margin=0)
    assert result.value == 14
    assert not result.confirmed
    assert result.at(5).ran
    assert "batch = 14 is only predicted: a run would need 9.0 MiB more" in result.notes[0]
    assert weights.device.type == "cuda"


AGAIN = "xb = torch.ones(n, MIB // 4)\nh = xb * 2"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("mib", "value", "confirmed"), [(10, 4, False), (1, 10, True)])
def test_values_that_the_cell_makes_again_need_no_room_of_their_own(mib, value, confirmed):
    space = {"torch": torch, "MIB": MIB}

    def cell(n):
        space["n"] = n
        with gpumagic.on(1):
            exec(AGAIN, space)

    cell(mib)
    result = gpumagic.fit(AGAIN, 1, n=range(1, 100), margin=0, namespace=space)
    assert (result.value, result.confirmed) == (value, confirmed)
    assert confirmed or "a run would need 20.0 MiB more, for copies of" in result.notes[0]
    assert not any(tried.ran is False for tried in result.tried)
    cell(value)
    space.update(xb=None, h=None)
    cell(mib)
    with pytest.raises(torch.OutOfMemoryError):
        cell(value + 1)


@pytest.mark.usefixtures("small")
def test_runs_alone_beside_values_that_the_cell_makes_again_leave_larger_values_open():
    space = {"torch": torch, "MIB": MIB, "xb": torch.ones(10, MIB // 4, device="cuda:1")}
    code = "xb = torch.ones(n, MIB // 4)\nif xb.sum() > 0: h = xb * 2"
    result = gpumagic.fit(code, 1, n=range(1, 100), margin=0, namespace=space)
    assert (result.value, result.confirmed) == (7, True)
    assert str(result).startswith("n = 7 is the largest known to fit on cuda:1")
    assert result.stopped.startswith("larger values may fit: 10.0 MiB of values that the code")


def test_the_table_of_values_and_their_verdicts_agree():
    found = Largest("cuda:0", 100, 95, 8)
    tried = [(4, 97, None), (8, 90, None), (9, 98, None), (10, None, False), (11, 99, None)]
    verdicts = [
        "fits only without the margin",
        "largest",
        "fits only without the margin",
        "too large",
        "too large",
    ]
    rows = tuple(Tried(value, needed, None, ran) for value, needed, ran in tried)
    shown = str(Fit("f(n)", "n", (found,), rows, False, 0.05)).splitlines()
    assert [line.rstrip().endswith(v) for line, v in zip(shown[3:], verdicts)] == [True] * 5  # noqa: B905


@pytest.mark.usefixtures("small")
def test_a_prediction_that_is_too_low_is_corrected_by_runs(monkeypatch):
    real = fit_search.dry

    def half(subject):
        run = real(subject)
        for device, peak in run.peak.items():
            run.peak[device] = type(peak)(device, peak.peak, peak.needed // 2, peak.free, peak.at)
        return run

    monkeypatch.setattr(fit_search, "dry", half)
    result = gpumagic.fit(lambda n: torch.ones(n, MIB // 4), 1, n=range(1, 100), margin=0)
    assert (result.value, result.confirmed) == (24, True)
    assert result.at(48).ran is False
    assert re.search(r"\n +48 +24.0 MiB +out of memory +too large\n", str(result))


@pytest.mark.usefixtures("small")
def test_ctrl_c_keeps_what_is_known():
    def stop(line):
        if line.startswith("run of"):
            raise KeyboardInterrupt

    result = gpumagic.fit(
        lambda n: torch.ones(n, MIB // 4), 1, n=range(1, 100), margin=0, progress=stop
    )
    assert result.interrupted
    assert (result.value, result.confirmed) == (24, False)
    assert "n = 24 is the largest known to fit" in str(result)


@pytest.mark.usefixtures("small")
def test_ctrl_c_before_the_first_result_says_nothing_of_what_fits():
    def stop(line):
        raise KeyboardInterrupt

    result = gpumagic.fit(lambda n: torch.ones(n), 1, n=range(1, 100), margin=0, progress=stop)
    assert result.interrupted
    assert "no result: no value of n ran to its end on cuda:1" in str(result)
    assert "fits" not in str(result)


@pytest.mark.usefixtures("small")
def test_what_fails_within_keeps_what_is_known(monkeypatch):
    real = fit_search.dry

    def fails(subject):
        if len(asked) == 2:
            raise failure
        asked.append(subject)
        return real(subject)

    def ones(n):
        return torch.ones(n, MIB // 4)

    monkeypatch.setattr(fit_search, "dry", fails)
    asked, failure = [], KeyError(1)
    result = gpumagic.fit(ones, 1, n=range(10, 100), margin=0)
    assert (result.value, result.confirmed, result.interrupted) == (10, False, False)
    assert "n = 10 is the largest known to fit" in str(result)
    stopped = r"stopped at n = \d+: a bug in gpumagic: KeyError: 1; results so far"
    assert re.search(stopped, str(result))
    asked, failure = [None], gpumagic.GpuError("the dry run's process ended by signal 6")
    result = gpumagic.fit(ones, 1, n=range(10, 100), margin=0)
    assert (result.value, result.confirmed) == (10, True)
    assert "n = 11 is unknown: the dry run's process ended by signal 6" in str(result)


@pytest.mark.usefixtures("small")
def test_a_value_whose_dry_run_takes_too_long_is_not_known(monkeypatch):
    real = fit_search.dry

    def slow(subject):
        run = real(subject)
        if "[40, " in run.assigned[0].kind:
            return replace(run, unknown=(Unknown(None, "the time limit of 20 s", True),))
        return run

    monkeypatch.setattr(fit_search, "dry", slow)
    told = []
    result = gpumagic.fit(lambda n: torch.ones(n, MIB // 4), 1, n=range(1, 41), margin=0)
    assert (result.value, result.confirmed, result.stopped) == (24, True, "")
    result = gpumagic.fit(
        lambda n: torch.ones(n, MIB // 8), 1, n=range(1, 41), margin=0, progress=told.append
    )
    assert (result.value, result.confirmed) == (39, True)
    assert "n = 39 is the largest known to fit" in str(result)
    assert result.stopped == "n = 40 is unknown: the time limit of 20 s"
    assert "dry run of n = 40 ended early: the time limit of 20 s" in told


@pytest.mark.usefixtures("small")
def test_a_smallest_value_that_the_code_refuses_is_left_out():
    def step(batch):
        norm = nn.BatchNorm1d(2**18).train()
        X = torch.ones(batch, 2**18)
        return norm(X)

    result = gpumagic.fit(step, 1, batch=range(1, 100), margin=0)
    assert result.value > 2
    assert result.confirmed
    assert "batch = 1 raises ValueError: Expected more than 1 value per channel" in str(result)


@pytest.mark.usefixtures("small")
def test_values_beyond_the_rows_of_the_data_are_no_larger_need():
    data = torch.ones(30, MIB // 64)
    told = str(gpumagic.fit(lambda n: data[:n].cuda(1) * 2, 1, n=range(1, 100)))
    assert "n = 89 and n = 99 need the same memory: do the data have fewer rows than" in told
    assert "the same memory" not in str(
        gpumagic.fit(lambda n: data[:n].cuda(1) * 2, 1, n=range(1, 20))
    )


@pytest.mark.usefixtures("small")
def test_it_says_what_ran_and_that_files_are_written(tmp_path):
    def step(n):
        made = torch.ones(n, MIB // 4)
        (tmp_path / f"{n}").write_text("here")
        return made

    result = gpumagic.fit(step, 1, n=[2, 4, 5], dry=False, margin=0)
    text = str(result)
    assert "the cell ran 3 times (n = 2, 4, 5): files it wrote remain; --dry" in text
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4", "5"}
    assert "all values fit on cuda:1 (virtual); n = 5 needs" in text
    assert "is the largest that fits" not in text
    assert "the cell ran" not in str(gpumagic.fit(lambda n: torch.ones(n), 1, n=[2, 5], dry=True))


@pytest.mark.usefixtures("small")
def test_none_fits_and_the_code_s_own_errors_are_its_own():
    result = gpumagic.fit(lambda n: torch.ones(n, MIB), 1, n=range(10, 20))
    assert result.value is None
    assert "no n fits on cuda:1 (virtual): n = 10 needs 40.0 MiB of 24.0 MiB free" in str(result)
    with pytest.raises(ZeroDivisionError) as raised:
        gpumagic.fit(lambda n: n / 0, 1, n=range(1, 9))
    notes = getattr(raised.value, "__notes__", None)  # of Python 3.11 and newer
    assert notes in (None, ["with n = 1, in a run on copies"])


def test_cards_that_are_not_here_are_asked_at_once():
    net = nn.Linear(256, 256)
    result = gpumagic.fit(
        lambda n: net(torch.randn(n, 256)).sum(), "RTX 4090, T4", n=range(1, 10**8)
    )
    first, second = result.largest
    assert (first.where, second.where) == ("RTX 4090 24GB", "T4 16GB")
    assert first.value > second.value > 10**6
    for found in result.largest:
        above = next(tried for tried in result.tried if tried.value > found.value)
        assert result.at(found.value).predicted <= found.room < above.predicted
        assert above.value <= found.value * 1.025
    assert not result.confirmed
    assert "on T4 16GB, without a backward pass: it needs" in str(result)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("code", "on", "given", "said"),
    [
        ("n", 0, {}, "fit takes one variable, not none; type one: batch=range"),
        ("n + m", 0, {"n": [1], "m": [2]}, "fit takes one variable, not n, m"),
        ("n", 0, {"n": ["a"]}, "n: the values must be numbers above 0"),
        ("n", 0, {"n": [0, 1]}, "n: the values must be numbers above 0"),
        ("n", 0, {"n": []}, "n has no values"),
        (lambda: torch.ones(3), 0, {"n": [1]}, "<lambda> neither takes it nor reads it; type def"),
        ("m = 1", 0, {"n": [1]}, "n makes no difference: the code does not read it"),
        (3, 0, {"n": [1]}, "code or a function is needed, not int"),
        ("n", "cpu", {"n": [1]}, "torch cannot limit the memory of cpu"),
        ("n", 7, {"n": [1]}, "no GPU 7"),
        ("n", "RTX 4091", {"n": [1]}, "no card 'RTX 4091' is known"),
        ("n", 0, {"n": [1], "margin": 2}, "margin=2 must be at least 0 and below 1"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(code, on, given, said):
    with pytest.raises(gpumagic.GpuError, match=said) as raised:
        gpumagic.fit(code, on, namespace={}, **given)
    assert "\n" not in str(raised.value)


def test_without_a_gpu_it_says_what_to_type():
    with pytest.raises(gpumagic.GpuError, match="there is no GPU; type a card's name, such as"):
        gpumagic.fit("n", n=[1], namespace={})
