"""`%%gputime` over an engine of the test's: what reaches it, and what is shown and kept."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from gpumagic import timing
from gpumagic.telemetry.history import board
from gpumagic.timing import Progress
from gpumagic.timing.comparison_view import bars


def under_way(**changes):
    """A measurement that is on its way."""
    bars = (("cpu", 4e-3, "done"), ("cuda:0", 1e-3, "timing"), ("cuda:1", None, "waiting"))
    known = {"done": 1, "total": 3, "bars": bars}
    given = {"title": "a @ a", "where": "cuda:0", "stage": "timing"} | known | changes
    return Progress(**given)


@dataclass
class Made:
    """What a comparison shows."""

    title: str = "a @ a"
    time: float = 1.0
    interrupted: bool = False

    def __repr__(self):
        return "cuda:0 is 4 × faster than cpu"

    def _repr_html_(self):
        return "<b>4 ×</b>"


class Engine:
    """Notes what it is asked; `does` is called meanwhile with the progress callable."""

    def __init__(self):
        self.asked = []
        self.made = Made()
        self.does = lambda tell: None

    def compare(self, code, devices, **options):
        self.asked.append(SimpleNamespace(code=code, devices=devices, **options))
        self.does(options["progress"])
        return self.made


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setattr(timing, "compare", made.compare)
    monkeypatch.setattr(timing, "last_comparison", lambda: None)
    return made


def test_the_cell_reaches_the_engine_with_its_lines_where_they_are(shell, engine):
    done = shell.run("%%gputime cpu 0 --items 8 --max-time 2\nx = 1\nx + 1")
    assert done.error is None
    asked = engine.asked[0]
    assert asked.code.split("\n")[1:3] == ["x = 1", "x + 1"]
    assert (asked.devices, asked.items, asked.max_time) == (("cpu", "0"), "8", 2.0)
    assert asked.namespace is shell.ns


def test_without_devices_the_engine_chooses(shell, engine):
    shell.run("%gputime -- 1 + 1")
    assert engine.asked[0].devices is None
    assert engine.asked[0].code.strip() == "1 + 1"


def test_magics_in_the_cell_are_python_by_then(shell, engine):
    shell.run("%%gputime cpu --setup '%pwd'\n%pwd")
    assert "run_line_magic('pwd'" in engine.asked[0].code
    assert "run_line_magic('pwd'" in engine.asked[0].setup


def test_braces_and_dollars_are_the_codes_own(shell, engine):
    shell.ns["x"] = 5
    shell.run("%gputime cpu -- f'{x}'")
    assert engine.asked[0].code.strip() == "f'{x}'"


def test_in_a_function_its_names_are_there(shell, engine):
    shell.run("def f():\n    local = 3\n    %gputime cpu -- local\nf()")
    assert engine.asked[0].namespace["local"] == 3
    assert "local" not in shell.ns


def test_the_result_is_shown_and_kept_and_not_in_out(shell, engine):
    before = dict(shell.ns["Out"])
    done = shell.run("%%gputime cpu -o result\n1 + 1")
    assert "4 × faster" in done.text
    assert done.result is None
    assert shell.ns["Out"] == before
    assert shell.ns["result"] is engine.made


def test_quiet_shows_nothing_and_keeps_all_the_same(shell, engine):
    assert shell.run("%%gputime cpu --quiet -o result\n1").text == ""
    assert shell.ns["result"] is engine.made


def test_interrupted_the_half_is_shown_and_bound_and_the_cell_ends(shell, engine):
    engine.made.interrupted = True
    done = shell.run("%%gputime cpu -o half\n1\n")
    assert isinstance(done.error, KeyboardInterrupt)
    assert shell.ns["half"] is engine.made
    assert "4 × faster" in done.text
    assert done.text.rstrip().endswith("KeyboardInterrupt")


def test_an_error_is_the_users_with_its_line_and_none_of_ours(shell, engine):
    def fail(tell):
        asked = engine.asked[0]
        exec(compile(asked.code, asked.filename, "exec"), {})

    engine.does = fail
    done = shell.run("%%gputime cpu\nx = 1\n\n1 / 0")
    assert isinstance(done.error, ZeroDivisionError)
    assert "line 4" in done.text.replace(":4", " line 4")
    assert "1 / 0" in done.text
    assert "gpumagic" not in done.text
    assert "run_cell_magic" not in done.text
    assert board.now is None


def test_against_the_last_or_a_name(shell):
    shell.run("%%gputime cpu --max-time 0.01 -o first\n1")
    for named in ("last", "first"):
        shell.run(f"%%gputime cpu --max-time 0.01 --against '{named}' -o second\n1")
        assert shell.ns["second"].earlier.code == "1"


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%gputime cpu 0", "put it after --"),
        ("%%gputime cpu --max-time inf\n1", "inf is not a number above 0"),
        ("%%gputime cpu --max-time 0\n1", "--max-time: 0 is not a number above 0"),
        ("%%gputime cpu -o 3x\n1", "3x cannot be the name of a variable"),
        ("%%gputime cpu -o for\n1", "for cannot be the name of a variable"),
        ("%%gputime cpu --nope\n1", "--nope"),
        ("%%gputime cpu --setup 'x\n1", "No closing quotation"),
        ("%%gputime cpu\n%%ongpu 1\n1", "says %%ongpu too"),
        ("%%gputime cpu --against last\n1", "nothing was timed before"),
        ("%%gputime cpu --against nowhere.json\n1", "no result has that name"),
        ("%%gputime cpu --sweep n\n1", "n"),
        ("%%gputime cpu --sweep a=1 --sweep b=1\n1", "sweep"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_timed(shell, engine, cell, says):
    done = shell.run(cell)
    assert done.text.startswith("UsageError: %"), done.text
    assert done.text.count("\n") == 1
    assert says in done.text
    assert engine.asked == []


def test_a_placement_and_the_counting_of_copies_end_for_what_is_timed(gpus, shell, engine):
    import torch

    from gpumagic.ledger import attribute

    seen = []
    engine.does = lambda tell: seen.append((torch.zeros(1).device.type, attribute.running))
    shell.run("import torch")
    shell.run("%gpuwatch on\n%ongpu 1")
    assert shell.run("%%gputime cpu\n1").error is None
    assert seen == [("cpu", ())]
    assert "cuda:1" in shell.run("torch.zeros(1)").text
    done = shell.run("%ongpu off\n%gpuwatch off")
    assert done.error is None
    assert "says %%ongpu 1 too" in shell.run("%%ongpu 1\n%gputime cpu -- 1").text
    shell.run("import torch\nx = torch.ones(3)")
    done = shell.run("%%ongpu 1\n%%gputime cpu 1\nx + 1")
    says = "UsageError: %%gputime: the cell says %%ongpu 1 too; leave that line out\n"
    assert (done.text, shell.ns["x"].device.type) == (says, "cpu")  # nothing runs or moves
    assert len(seen) == 1


# -- how far it is
def test_bars_are_shares_of_the_slowest():
    assert bars(under_way().bars) == [
        {"where": "cpu", "share": 1.0, "text": "4.0 ms"},
        {"where": "cuda:0", "share": 0.25, "text": "1.0 ms"},
        {"where": "cuda:1", "share": 0.0, "text": "waiting"},
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"values": {"n": 256}, "total": 36}, "cuda:0 · n = 256 · timing · 2 of 36"),
        ({"stage": "warm up"}, "cuda:0 · warm up · 2 of 3"),
        ({"total": 1}, "cuda:0 · timing"),
    ],
)
def test_the_line(changes, says):
    assert str(under_way(**changes)) == says
