"""Records find their views, which are imported when something is shown and not before."""

import sys

from gpumagic.display import table


def test_a_view_is_imported_when_its_record_is_shown_first(monkeypatch, tmp_path):
    class Record(table.Shown):
        _view = "late_view"

    (tmp_path / "late_view.py").write_text(
        "def text(record): return 'words'\ndef html(record): return '<b>words</b>'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record = Record()
    assert "late_view" not in sys.modules
    assert repr(record) == "words"
    assert record._repr_html_() == "<b>words</b>"
    del sys.modules["late_view"]


def test_a_record_is_shown_as_its_base_class_is(monkeypatch):
    class Record(table.Shown):
        _view = "a_view"

    class Special(Record):
        pass

    view = type(sys)("a_view")
    view.text = lambda record: f"a {type(record).__name__}"
    view.html = lambda record: "<b>one</b>"
    monkeypatch.setitem(sys.modules, "a_view", view)
    assert repr(Special()) == str(Special()) == "a Special"
    assert Special()._repr_html_() == "<b>one</b>"
