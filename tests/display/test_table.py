"""One table for text and HTML: aligned, at most 100 columns, escaped."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumagic.display import table
from gpumagic.display.table import Column, Fold

NAMES = Column("name", ["a", "long one"])
COUNTS = Column("count", ["1,000", "7"], number=True)


def test_words_stand_to_the_left_and_numbers_to_the_right():
    assert table.lines([NAMES, COUNTS], "  ") == [
        "  name      count",
        "  a         1,000",
        "  long one      7",
    ]
    assert table.lines([Column("", ["a"]), Column("", ["b"])]) == ["a  b"]
    assert table.lines([]) == []


def test_a_wide_character_counts_as_two():
    lines = table.lines([Column("", ["模型", "net"]), Column("", ["x", "y"])])
    assert lines == ["模型  x", "net   y"]
    assert table.width("e\N{COMBINING ACUTE ACCENT}") == 1
    assert table.short("模型模型", 5) == "模型…"


def test_a_very_long_text_is_cut_at_once():
    assert table.short("x" * 10**6, 10) == "x" * 9 + "…"
    assert table.width(table.short("模" * 10**6, 10)) <= 10


def test_what_has_no_room_is_cut_or_goes_on_below_itself():
    (cut,) = table.lines([Column("", ["x" * 150], fit="cut"), Column("", ["end"])])
    assert cut == "x" * 94 + "…  end"
    words = Column("", ["word " * 30], fit="wrap")
    lines = table.lines([Column("", ["first"]), words])
    assert [line[:7].strip() for line in lines] == ["first", ""]
    assert " ".join(lines).split() == ["first", *["word"] * 30]


@pytest.mark.parametrize("room", [2, 3, 60, 61, 100])
@pytest.mark.parametrize("text", ["漢" * 120, "a漢" * 80, "漢字 and words " * 9])
def test_wide_characters_are_wrapped_by_width(text, room):
    column = Column("", [text], fit="wrap", least=room)
    for lines in (table.wrapped(text, more="", room=room), table.lines([column], room=room)):
        assert max(map(table.width, lines)) <= room
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_wide_note_is_wrapped_and_empty_cells_are_shown():
    noted = Column("", ["x"], notes=["漢" * 50])
    lines = table.lines([noted, Column("", [""], fit="wrap")], room=60)
    assert [table.width(line) for line in lines] == [1, 60, 42]


def test_a_no_break_space_keeps_words_together_and_is_shown_as_a_space():
    cell = f"{'x' * 80} cuda:1{table.GLUE}3.1{table.GLUE}GiB"
    lines = table.lines([Column("", ["held by"]), Column("", [cell], fit="wrap")])
    assert lines[-1].strip() == "cuda:1 3.1 GiB"


def test_a_note_stands_below_its_row_from_its_column_on():
    source = Column("source", ["x.item()", "y"], notes=["→ keep it", ""])
    assert table.lines([Column("line", ["12", "3"], number=True), source]) == [
        "line  source",
        "  12  x.item()",
        "      → keep it",
        "   3  y",
    ]
    html = table.html([Column("line", ["12", "3"], number=True), source])
    assert '<tr class="gm-below"><td></td><td colspan="1">→ keep it</td></tr>' in html


@pytest.mark.parametrize("room", [24, 26, 30])
def test_a_note_below_a_column_at_the_edge_is_shown(room):
    source = Column("source", ["x"], notes=["keep it"])
    found = table.lines([Column("line", ["a" * 24]), source], room=room)
    assert found[-1].strip() == "keep it"


def test_too_many_columns_go_on_in_a_table_below():
    columns = [Column(f"c{n}", ["x" * 30]) for n in range(5)]
    lines = table.lines(columns)
    assert [line.split() for line in lines if line.startswith("c")] == [
        ["c0", "c1", "c2"],
        ["c0", "c3", "c4"],
    ]


def test_rows_above_a_number_are_folded():
    columns = [Column("n", [str(n) for n in range(10)], number=True)]
    fold = Fold(2, "… {} more")
    assert table.lines(columns, fold=fold) == ["n", "0", "1", "… 8 more"]
    html = table.html(columns, fold=fold)
    assert html.count("<tr>") == 3
    assert "… 8 more" in html
    assert table.lines(columns, fold=Fold(10)) == ["n", *map(str, range(10))]


def test_html_is_escaped_and_its_cells_have_their_classes():
    column = Column("<h>", ["<b>", "2"], number=True, css=["gm-bad", ""])
    html = table.html([column], css="gm-section")
    assert '<table class="gm-section"><thead>' in html
    assert '<th scope="col" class="gm-number">&lt;h&gt;</th>' in html
    assert '<td class="gm-number gm-bad">&lt;b&gt;</td>' in html
    assert "<i>2</i>" in table.html([Column("", ["2"], html=["<i>2</i>"])])
    assert '<th scope="colgroup" colspan="1">&lt;t&gt;</th>' in table.html([column], title="<t>")
    assert "<thead>" not in table.html([Column("", ["x"])])


CELLS = st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40), min_size=2)


@given(st.lists(CELLS.map(lambda cells: cells[:2]), min_size=2, max_size=6), st.booleans())
@example([["0" * 39, ""], ["0" * 38, ""], ["0", "0" * 20]], True)  # a head is cut too
def test_no_line_is_wider_than_a_hundred(columns, number):
    shown = [
        Column(cells[0], cells, number, fit="cut" * (n == 1)) for n, cells in enumerate(columns)
    ]
    assert all(table.width(line) <= table.WIDTH for line in table.lines(shown))
