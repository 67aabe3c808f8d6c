"""A framework other than torch is timed on the same terms: waited for, copied, compared.

The framework is one of this file, on a clock that stands still unless somebody moves it.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import late as lates
import numpy
import pytest
from late import Late

from gpumagic.frameworks import known
from gpumagic.frameworks.framework import Framework
from gpumagic.ledger.entry import Count
from gpumagic.timing import compare
from gpumagic.timing.runner import Stopwatch


@dataclass(eq=False)
class Array:
    """An array of it."""

    numbers: numpy.ndarray
    place: str = "cpu"

    def __array__(self, dtype=None, copy=None):
        return numpy.array(self.numbers, dtype=dtype)


@dataclass(eq=False)
class Slow(Framework):
    """Finishes late, compiles at the first call, and copies when it is asked to."""

    clock: Late
    name: str = "Slow"
    here: str = "cpu"
    held: tuple = (100, None)
    copies: list = field(default_factory=list)

    def call(self, host=0.001, device=0.25, compiles=0.0):
        self.clock.work(host + compiles, self, device)

    def silent(self):
        self.tally.add(("copy",), Count("copy", "copy", "cpu", self.here)).count = 1

    def started(self):
        return True

    def devices(self):
        return []

    def place(self, device):
        self.here = str(device)
        return nullcontext()

    def is_array(self, value):
        return isinstance(value, Array)

    def where(self, array):
        return array.place

    def nbytes(self, array):
        return array.numbers.nbytes

    def copy(self, array, device):
        self.copies.append((array, str(device)))
        return Array(array.numbers.copy(), str(device))

    def parts(self, value):
        return None

    def knows(self, kind):
        return False

    def wait(self, *devices):
        self.clock.wait()

    def allocated(self, device):
        return self.held

    def count(self, tally, strict, *, warn=False):
        self.tally = tally
        return nullcontext()


@pytest.fixture
def slow(monkeypatch):
    made = Slow(Late())
    monkeypatch.setattr(known, "needed_by", lambda tree, namespace: [made])
    lates.seen[:] = [made]
    return made


def timed(slow, code, where=("cpu",), **options):
    """`code` finds the framework in `slow`, which stays the same in all copies."""
    stopwatch = Stopwatch([slow], slow.clock.clock)
    space = {"late": lates, "Array": Array} | options.pop("space", {})
    # On a clock that stands still nothing would ever be steady.
    code = f"slow.clock.work(0.01)\n{code}".replace("slow.", "late.seen[0].")
    return compare(code, where, namespace=space, stopwatch=stopwatch, max_time=1, **options)


def test_what_it_was_given_is_waited_for(slow):
    (timing,) = timed(slow, "slow.call(0.001, 0.25)").timings
    assert timing.median == pytest.approx(0.261)
    assert timing.host_median == pytest.approx(0.011)


def test_what_was_queued_before_is_not_counted(slow):
    slow.clock.work(0.0, slow, 60.0)
    assert timed(slow, "slow.call()").timings[0].median == pytest.approx(0.261)


FIRST = "slow.call(compiles=0.0 if late.seen[1:] else 2.0)\nlate.seen.append(1)"


def test_a_first_run_that_compiles_is_told_apart(slow):
    made = timed(slow, FIRST)
    (timing,) = made.timings
    assert timing.first == pytest.approx(2.261)
    assert timing.median == pytest.approx(0.261)
    assert "first run 2.26 s" in repr(made)
    assert made.to_pandas().first_s[0] == pytest.approx(2.261)


def test_it_is_a_column_where_devices_are_compared(slow, gpus):
    made = timed(slow, FIRST, ["cpu", "0"])
    assert " first run " in repr(made)
    assert "first run: not in the median, may have compiled" in made.remarks
    assert "first run" not in repr(timed(slow, "slow.call()"))


def test_inputs_are_copies_on_the_device_and_the_users_stay(slow, gpus):
    given = Array(numpy.zeros(3))
    kept = {"a": given, "both": [given]}
    code = "assert a is both[0] and a.place == slow.here\na.numbers += 1"
    made = timed(slow, code, ["cpu", "1"], space=kept)
    assert [t.error for t in made.timings] == [None, None]
    assert [t.copied for t in made.timings] == [24, 24]
    assert given.numbers.tolist() == [0.0] * 3
    assert kept["both"][0] is given is kept["a"]


def test_results_are_compared_through_numpy(slow, gpus):
    code = "y = Array(numpy.full(3, 1.0 + (slow.here != 'cpu') * {}))"
    same = timed(slow, code.format("1e-9"), ["cpu", "0"], space={"numpy": numpy})
    assert [(a.same, a.name) for a in same.agreements] == [(True, "y")]
    other = timed(slow, code.format("0.5"), ["cpu", "0"], space={"numpy": numpy})
    assert [(a.same, a.name, a.largest) for a in other.agreements] == [(False, "y", 0.5)]


def test_copies_of_the_first_run_are_counted(slow, gpus):
    made = timed(slow, "if not late.seen[1:]: slow.silent()\nlate.seen.append(1)", ["0"])
    assert "1 transfer" in made.timings[0].transfers
    assert timed(slow, "1").timings[0].transfers == ""


def test_a_peak_is_known_only_where_it_has_grown(slow):
    slow.held = (100, 500)
    assert timed(slow, "1").timings[0].peak == {}
    assert timed(slow, "slow.held = (100, 700)").timings[0].peak == {"cpu": 600}


@pytest.mark.parametrize(
    "error", [RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), MemoryError()]
)
def test_memory_that_is_short_ends_a_curve(slow, error):
    slow.error = error
    made = timed(slow, "if n > 1: raise slow.error", sweep={"n": [1, 2, 3]})
    assert [t.error for t in made.timings] == [None, "out of memory"]
