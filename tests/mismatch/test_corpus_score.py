"""Snippets as people write them: how many are explained rightly, and made to run by their fix."""

from types import SimpleNamespace

import executing
import pytest
from corpus_score import BLIND, HELD_OUT, OTHERS, score

from gpumagic import faults

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", [BLIND, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_the_score_of_snippets(files):
    faults.forget()
    result = score(files)
    print(result)
    assert faults.all_kept() == []
    assert result.share("devices") == 1
    assert result.share("the error is left alone") == 1
    assert result.share("fix runs") >= 0.97
    assert result.missed["rightly withheld"] == []
    assert result.right["rightly withheld"] >= 5 or files is BLIND
    # Of the rules that choose what moves, and of the causes that are known; no promise.
    assert result.share("the odd one") >= 0.9
    assert result.share("the reason") >= 0.8
    assert len(result.missed["fix is at the line"]) <= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_only_the_line_is_known_nothing_wrong_is_said(monkeypatch):
    whole = executing.Source

    class LineOnly(whole):
        @classmethod
        def executing(cls, traceback):
            return SimpleNamespace(source=whole.executing(traceback).source, node=None)

    monkeypatch.setattr(executing, "Source", LineOnly)
    result = score(HELD_OUT)
    assert result.missed["nothing wrong is said"] == []
    assert result.share("devices") >= 0.5
