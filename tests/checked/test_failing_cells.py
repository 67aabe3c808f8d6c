"""Each failing cell of the list is an ordinary error at its line, with the right names."""

import re
import traceback

import pytest
from asked_cells import ASKED
from asked_cells import SETUP as ASKED_SETUP
from failing_cells import BAD_INDICES, BAD_VALUES, MADE_NAN, SETUP
from ours import OURS

from gpumagic import faults
from gpumagic.usercode.files import is_users

KINDS = {
    "CheckedIndexError": IndexError,
    "CheckedValueError": ValueError,
    "MadeNanError": FloatingPointError,
}
HALF = len(BAD_INDICES) // 2


def wrong_in(done, said, error):
    """What is wrong with how a cell ended, in words; empty if nothing is."""
    if type(done.error).__name__ != error or not isinstance(done.error, KINDS[error]):
        return done.text
    if not re.search(re.escape(said).replace("…", ".*").replace(r"\$", "$"), str(done.error)):
        return str(done.error)
    *_, (last, _) = traceback.walk_tb(done.error.__traceback__)
    if not is_users(last.f_code.co_filename) or OURS in done.text:
        return f"the traceback goes on: {done.text}"
    return ""


@pytest.mark.parametrize(
    ("option", "cells", "error"),
    [
        pytest.param("--check", BAD_INDICES[:HALF], "CheckedIndexError", id="indices"),
        pytest.param("--check", BAD_INDICES[HALF:], "CheckedIndexError", id="more indices"),
        pytest.param("--check", BAD_VALUES, "CheckedValueError", id="probabilities"),
        pytest.param("--check nan", MADE_NAN, "MadeNanError", id="nan"),
    ],
)
def test_failing_cells_are_named_rightly(ip, option, cells, error):
    wrong = {}
    for cell, said in cells:
        assert ip.run(f"%%ongpu 1 -q\n{SETUP}").error is None
        if found := wrong_in(ip.run(f"%%ongpu 1 {option} -q\n{cell}"), said, error):
            wrong[cell] = found
    assert wrong == {}
    # The GPU is not dead, and nothing of ours has failed.
    assert ip.run("%%ongpu 1 -q\nalive = (torch.ones(2) + 1).sum().item()").error is None
    assert ip.ns["alive"] == 4
    assert faults.all_kept() == []


def test_longer_cells_are_named_rightly(ip):
    wrong = {}
    for said, cell in ASKED:
        assert ip.run(f"%%ongpu 1 -q\n{ASKED_SETUP}").error is None
        error, _, said = said.partition(": ")
        option = "--check nan" if error == "MadeNanError" else "--check"
        if found := wrong_in(ip.run(f"%%ongpu 1 {option} -q\n{cell}"), said, error):
            wrong[cell] = found
    assert wrong == {}
    assert faults.all_kept() == []
