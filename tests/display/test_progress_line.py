"""One line that says how far work is: late, in place, gone at the end, and never in a file."""

import io
from types import SimpleNamespace

import pytest

from gpumagic.display import progress_line
from gpumagic.display.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Timer:
    """One whose time comes when the test says so."""

    def __init__(self, seconds, call):
        self.call, self.started = call, False

    def start(self):
        self.started = True

    def cancel(self):
        self.started = False


class Line:
    """A progress line with a terminal and a timer of its own."""

    def __init__(self, monkeypatch, terminal=None, shell=None, **options):
        self.timer, self.terminal = None, terminal or Terminal()
        # pytest replaces sys.stderr itself between a fixture and its test.
        monkeypatch.setattr(progress_line, "sys", SimpleNamespace(stderr=self.terminal))
        with monkeypatch.context() as patched:
            patched.setattr(progress_line.threading, "Timer", self.timed)
            self.line = ProgressLine(shell or SimpleNamespace(), **options)

    def timed(self, seconds, call):
        self.timer = Timer(seconds, call)
        return self.timer

    @property
    def written(self):
        return self.terminal.getvalue()

    @property
    def seen(self):
        """What a terminal shows in the end."""
        return self.written.rpartition("\r")[2].strip()


@pytest.fixture
def at(monkeypatch):
    return Line(monkeypatch)


@pytest.fixture
def notebook(monkeypatch):
    return Line(monkeypatch, shell=SimpleNamespace(kernel=None))


def test_a_terminal_has_one_line_and_in_the_end_none(at):
    at.line.update("one of 3")
    assert at.written == ""  # over sooner, it needs no line
    at.timer.call()
    at.line.update("two of 3")
    assert at.seen == "two of 3"
    at.line.update("3")
    assert at.seen == "3"
    at.line.close()
    assert at.seen == ""
    assert "\n" not in at.written


def test_a_line_is_no_wider_than_the_terminal(at, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    at.timer.call()
    at.line.update("x" * 50)
    assert at.seen == "x" * 18 + "…"
    at.line.close()


def test_what_is_no_terminal_is_left_alone(monkeypatch):
    at = Line(monkeypatch, io.StringIO())
    at.timer.call()
    at.line.update("one of 3")
    at.line.update("two of 3")
    at.line.close()
    assert at.written == ""


def test_a_long_first_step_has_its_line_meanwhile(at):
    at.timer.call()
    assert at.written == ""  # nothing is known yet
    at.line.update("first run")
    at.timer.call()
    assert at.seen == "first run"
    at.line.close()
    assert not at.timer.started
    before = at.written
    at.timer.call()
    assert at.written == before


def test_a_silent_one_writes_nothing_and_has_no_timer(monkeypatch):
    at = Line(monkeypatch, silent=True)
    at.timer.call()
    at.line.update("one of 3")
    assert at.written == ""
    assert not at.timer.started


@pytest.fixture
def displayed(monkeypatch):
    """What IPython was given to display, and to put in its place."""
    seen = []

    class Handle:
        def update(self, data, **options):
            seen.append(("update", data))

    def display(data, **options):
        seen.append(("display", data))
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    return seen


def test_a_notebook_has_one_output_that_ends_as_the_result(displayed, notebook):
    at = notebook
    at.timer.call()
    at.line.update("one of 3")
    at.line.update("two of 3")
    at.line.close("the result")
    said = [(how, data["text/plain"]) for how, data in displayed[:-1]]
    assert said == [("display", "one of 3"), ("update", "two of 3")]
    assert displayed[-1] == ("update", "the result")
    assert at.written == ""


class Half:
    share = 0.5

    def __str__(self):
        return "<half>"


def test_a_notebook_has_a_bar_as_long_as_what_is_over(displayed, notebook):
    at = notebook
    at.timer.call()
    at.line.update(Half())
    assert ' value="0.500"></progress><span>&lt;half&gt;</span>' in displayed[0][1]["text/html"]
    at.line.update("nobody knows")
    assert '"></progress><span>nobody knows</span>' in displayed[1][1]["text/html"]
    assert "value=" not in displayed[1][1]["text/html"]
    at.line.close()


def test_a_notebook_without_a_result_keeps_no_line(displayed, notebook):
    at = notebook
    at.timer.call()
    at.line.update("one of 3")
    at.line.close()
    assert displayed[-1] == ("update", {"text/plain": "", "text/html": ""})


def test_a_line_around_work_is_gone_after_it(at):
    at.timer.call()
    with at.line as line:
        line.update("one of 3")
        assert at.seen == "one of 3"
    assert at.seen == ""
    assert not at.timer.started


def test_what_was_over_soon_displays_its_result_only(displayed, notebook):
    at = notebook
    at.line.update("one of 3")
    at.line.close("the result")
    assert displayed == [("display", "the result")]
