"""Records find their views, which are imported when something is shown and not before."""

import subprocess
import sys

from gpumagic.display import shown

LIGHT = """
import sys
from gpumagic.ledger.entry import Ledger
print([name for name in sys.modules if name.endswith("_view")])
print(repr(Ledger()), "no copies" in Ledger()._repr_html_())
print([name for name in sys.modules if name.endswith("_view")])
"""


def test_a_view_is_imported_when_its_record_is_shown_first():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    before, said, after = done.stdout.splitlines()
    assert before == "[]", done.stderr
    assert said == "no copies between devices, and no waits for one True"
    assert after == "['gpumagic.ledger.ledger_view']"


def test_a_record_is_shown_as_its_base_is_and_html_may_have_a_view_of_its_own(monkeypatch):
    class Record(shown.Shown):
        pass

    class Special(Record):
        pass

    text, html = type(sys)("a_text_view"), type(sys)("an_html_view")
    text.text = lambda record: f"a {type(record).__name__}"
    html.html = lambda record: "<b>one</b>"
    monkeypatch.setitem(sys.modules, "a_text_view", text)
    monkeypatch.setitem(sys.modules, "an_html_view", html)
    shown.register(f"{Record.__module__}.{Record.__qualname__}", "a_text_view", "an_html_view")
    assert repr(Special()) == str(Special()) == "a Special"
    assert Special()._repr_html_() == "<b>one</b>"
