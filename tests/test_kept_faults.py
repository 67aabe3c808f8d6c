"""An error in one line."""

import pytest

from gpumagic.faults import first_line, in_words


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


@pytest.mark.parametrize(
    ("error", "line", "words"),
    [
        (ValueError("no room\nmore"), "no room", "ValueError: no room"),
        (ValueError("\n  no room\r\n"), "no room", "ValueError: no room"),
        (NotImplementedError(), "NotImplementedError", "NotImplementedError"),
        (RuntimeError(" \n "), "RuntimeError", "RuntimeError"),
        (Mute(), "Mute", "Mute"),
    ],
)
def test_the_first_line_of_an_error_and_its_type(error, line, words):
    assert first_line(error) == line
    assert in_words(error) == words
