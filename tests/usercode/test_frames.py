"""A traceback's frames: which expression of the user's failed."""

import sys

import pytest

from gpumagic.usercode.frames import failed_frames


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no positions")
def test_of_two_statements_in_a_line_of_a_cell_the_expression_that_failed_is_known(shell) -> None:
    shell.run("a = [1]; b = a[int('2')]")
    (frame,) = failed_frames(sys.last_traceback)
    assert frame.failed is not None
    assert frame.text(frame.failed) == "a[int('2')]"
