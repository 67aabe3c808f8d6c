"""Records find their views, which are imported when something is shown and not before."""

import sys

from gpumagic.display import table


def test_a_view_is_imported_when_its_record_is_shown_first(monkeypatch, tmp_path):
    class Record(table.Shown):
        pass

    (tmp_path / "late_view.py").write_text(
        "def text(record): return 'words'\ndef html(record): return '<b>words</b>'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table.register(f"{Record.__module__}.{Record.__qualname__}", "late_view")
    record = Record()
    assert "late_view" not in sys.modules
    assert repr(record) == "words"
    assert record._repr_html_() == "<b>words</b>"
    del sys.modules["late_view"]


def test_a_record_is_shown_as_its_base_is_and_html_may_have_a_view_of_its_own(monkeypatch):
    class Record(table.Shown):
        pass

    class Special(Record):
        pass

    text, html = type(sys)("a_text_view"), type(sys)("an_html_view")
    text.text = lambda record: f"a {type(record).__name__}"
    html.html = lambda record: "<b>one</b>"
    monkeypatch.setitem(sys.modules, "a_text_view", text)
    monkeypatch.setitem(sys.modules, "an_html_view", html)
    table.register(f"{Record.__module__}.{Record.__qualname__}", "a_text_view", "an_html_view")
    assert repr(Special()) == str(Special()) == "a Special"
    assert Special()._repr_html_() == "<b>one</b>"
