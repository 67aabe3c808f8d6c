"""Snippets as people write them: what is said of each is right, and its fix makes it run."""

import pytest
from snippets import names_told, read, run

from gpumagic.mismatch import explainer
from gpumagic.usercode import frames

pytestmark = [
    pytest.mark.usefixtures("gpus"),
    pytest.mark.filterwarnings("ignore"),
]
CORPUS = read("cross_device.txt")
HELD_OUT = [
    snippet
    for name in ("held_out", "later", "blind", "blind_2", "more")
    for snippet in read(f"cross_device_{name}.txt")
]


def every_third(snippets):
    """The others with `-m slow`: these tests are as many again, of what differs little."""
    marks = [[], [pytest.mark.slow], [pytest.mark.slow]]
    return [pytest.param(s, id=s.title, marks=marks[n % 3]) for n, s in enumerate(snippets)]


@pytest.mark.parametrize("snippet", [*CORPUS, *HELD_OUT], ids=lambda s: s.title)
def test_a_snippet_is_explained_and_mended(snippet):
    error = run(snippet.code)
    before = (type(error), error.args, error.__traceback__, getattr(error, "__notes__", None))
    explanation = explainer._first(error, {})
    assert (
        type(error),
        error.args,
        error.__traceback__,
        getattr(error, "__notes__", None),
    ) == before
    told = names_told(explanation)
    for name, device in snippet.names.items():
        assert device in told[name].devices
    odd = [name for name, operand in told.items() if operand.odd]
    if snippet.odd:
        assert any(name == snippet.odd or name.startswith(f"{snippet.odd}.") for name in odd)
    assert snippet.because.lower() in (explanation.reason or "").lower()
    assert "<table" in explanation._repr_html_() or not explanation.operands
    if snippet.withheld:
        assert explanation.fix is None
        return
    assert snippet.at in (0, explanation.fix.line)
    mended = explanation.fix.apply(snippet.code)
    assert run(mended) is None, mended
    assert explanation.fix.code.strip() in str(explanation) or "\n" in explanation.fix.code


@pytest.mark.parametrize("snippet", every_third([*CORPUS, *HELD_OUT]))
def test_by_the_line_alone_nothing_wrong_is_said(snippet, monkeypatch):
    monkeypatch.setattr(frames, "position", lambda traceback: None)
    explanation = explainer._first(run(snippet.code), {})
    if explanation is None:
        return
    assert explanation.fix is None or not snippet.withheld
    told = names_told(explanation)
    for name, device in snippet.names.items():
        assert name not in told or device in told[name].devices
    assert explanation.fix is None or run(explanation.fix.apply(snippet.code)) is None


@pytest.mark.parametrize("snippet", every_third(HELD_OUT))
def test_as_on_python_3_10(snippet, monkeypatch):
    monkeypatch.setattr(frames, "position", frames._matched)
    explanation = explainer._first(run(snippet.code), {})
    assert (explanation.fix is None) == snippet.withheld
    assert snippet.withheld or run(explanation.fix.apply(snippet.code)) is None
