"""Planted divergences are found at their line; programs without one are silent."""

from pathlib import Path

import planted
import pytest
from planted import BRAIN, CLEAN, DEVICES, DOUBLE, HALF, PLANTED, inputs

import gpumagic
from gpumagic import faults

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_divergence_is_found_at_its_line(name):
    sides, code, says = PLANTED[name]
    found = gpumagic.diff(code, *sides, namespace=inputs())
    where = code if "# here" in code else Path(planted.__file__).read_text().partition("PLANTED")[0]
    lines = [n for n, line in enumerate(where.split("\n"), 1) if "# here" in line]
    assert [found.first.line] == lines
    assert says in " ".join(repr(found).split())
    assert not faults.unreported


# Adam's squared gradients are too small for float16: that is found.
TRUE = {("adam", HALF), ("transformer layer", HALF)}


@pytest.mark.parametrize("sides", [DEVICES, DOUBLE, BRAIN, HALF], ids=" ".join)
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_program_is_silent(name, sides):
    found = gpumagic.diff(CLEAN[name], *sides, namespace=inputs())
    assert found.agree is ((name, sides) not in TRUE), found
    assert found.operations
    assert not faults.unreported
