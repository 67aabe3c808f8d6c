"""A traceback's frames: those of a deep recursion are few enough to be drawn."""

import sys
import traceback

import pytest

from gpumagic.usercode.frames import failed_frames, folded


def deeper(n: int) -> None:
    if n == 0:
        raise ValueError("the bottom")
    deeper(n - 1)


def raised(depth: int) -> Exception:
    try:
        deeper(depth)
    except ValueError as error:
        return error
    raise AssertionError


def lines(error: BaseException) -> list[int | None]:
    return [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]


def test_each_line_has_its_first_and_last_frame_and_the_error_keeps_all() -> None:
    error = raised(sys.getrecursionlimit() // 2)
    whole = lines(error)
    with folded(error) as left_out:
        shown = lines(error)
    assert shown == [whole[0], whole[1], whole[-2], whole[-1]]
    assert left_out == len(whole) - len(shown)
    assert lines(error) == whole


def test_a_short_one_and_the_error_that_it_came_from_stay_as_they_are() -> None:
    error, cause = raised(3), raised(sys.getrecursionlimit() // 2)
    error.__cause__ = cause
    whole = lines(error)
    with folded(error) as left_out:
        assert lines(error) == whole
        assert len(lines(cause)) == 4
    assert left_out > 100


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no positions")
def test_of_two_statements_in_a_line_of_a_cell_the_expression_that_failed_is_known(shell) -> None:
    shell.run("a = [1]; b = a[int('2')]")
    (frame,) = failed_frames(sys.last_traceback)
    assert frame.failed is not None
    assert frame.text(frame.failed) == "a[int('2')]"
