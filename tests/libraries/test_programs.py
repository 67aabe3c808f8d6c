"""Other people's libraries on virtual GPUs and in placed cells: results as on the CPU, and where.

`make test-libraries` runs it, in an environment of its own: a plain `pytest` does not collect it.
"""

import numpy as np
import pytest
from library_programs import compared, outcome, ran, read_programs

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ALL = read_programs()


def test_programs_are_many_and_each_has_a_name_of_its_own():
    assert len(ALL) >= 60
    assert len({(program.library, program.title) for program in ALL}) == len(ALL)


def test_a_difference_is_seen():
    one = [np.float32([1, 2]), "a"]
    assert compared(one, [np.float32([1, 2]), "a"])[0] == "exact"
    assert compared(one, [np.float32([1, 2.0000005]), "a"])[0] == "close"
    assert compared(one, [np.float32([1, 2.1]), "a"])[0] == "differs"
    assert compared(one, [np.float32([1, 2]), "b"])[0] == "differs"
    assert compared(one, one[:1])[0] == "differs"


@pytest.mark.parametrize("program", ALL, ids=lambda p: f"{p.library}: {p.title}")
def test_a_program(program, shell, table):
    plain = ran(program, "plain", shell)
    assert not plain.error
    assert plain.devices <= {"cpu"}
    assert plain.leaves
    wrong = {}
    for way in program.ways:
        found, detail = outcome(plain, ran(program, way, shell), way)
        expected, why = program.told.get(way, ("exact", ""))
        if found != ("exact" if expected == "picks" else expected):
            wrong[way] = f"{found}, not {expected}: {detail}"
        table.note(program, way, found, why)
    assert not wrong
