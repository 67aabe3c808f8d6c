"""A comparison as HTML: static, escaped, closed, and with the answer that the text has."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from comparisons import SIZES, comparison, cubes, timing, two

from gpumagic.timing.comparison import Agreement, Timing

VOID = {"br", "hr", "img", "input", "meta", "link"}


class Page(HTMLParser):
    """Tags that are closed in order; the words outside of styles; what each tag has."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def with_class(self, name):
        return [attrs for _, attrs in self.tags if name in attrs.get("class", "").split()]


FAILED = cubes(fails=512, interrupted=True, setup="A = randn(n, n)", notes=("y: a note",))
ALL = [
    two(),
    two().against(two()),
    two(agreements=(Agreement("cuda:0", "cpu", False, 0.4, "y"),)),
    cubes(),
    FAILED,
    comparison(Timing("cpu", error="interrupted")),
    comparison(),
    comparison(sweep={"n": SIZES}),
]


@pytest.mark.parametrize("found", ALL)
def test_the_answer_of_the_text_is_there_and_nothing_runs(found):
    html = found._repr_html_()
    page = Page(html)
    answer = repr(found).splitlines()[0].removeprefix("! ")
    assert answer in page.text
    assert all(" ".join(remark.split()) in page.text for remark in found.remarks)
    names = {name for name, _ in page.tags}
    assert not names & {"script", "iframe", "link", "img", "object"}
    assert not any(key.startswith("on") or key == "id" for _, a in page.tags for key in a)
    assert len(html) < 30_000


def test_bars_are_as_long_as_the_times():
    page = Page(two()._repr_html_())
    widths = [
        float(a["style"].split(":")[1].split("%")[0])
        for tag, a in page.tags
        if tag == "i" and "width" in a.get("style", "")
    ]
    assert widths[0] == pytest.approx(8 * widths[1], rel=1e-2)
    labels = [a["aria-label"] for a in page.with_class("gm-race")]
    assert labels[1] == "cuda:0: median 1.00 ms, half of the repeats from 995 µs to 1.00 ms"


def test_a_sweep_is_a_plot_and_a_table():
    page = Page(FAILED._repr_html_())
    (svg,) = page.with_class("gm-plot")
    assert svg["role"] == "img"
    assert "median time over n" in svg["aria-label"]
    assert "✕ out of memory" in page.text
    assert page.text.count("details") == 0
    assert [name for name, _ in page.tags].count("details") == 2


def test_a_long_sweep_does_not_fill_the_notebook():
    page = Page(cubes(tuple(range(64, 664)))._repr_html_())
    assert [name for name, _ in page.tags].count("tr") == 201
    assert "400 more; to_pandas() has all" in page.text


def test_all_that_a_user_or_a_file_may_write_is_escaped():
    evil = "</pre><script>alert(1)</script><img src=x onerror='a()'>\"'&"
    timings = [
        timing(w, 1.0, values={"n": n}, name=evil, transfers=evil)
        for w in ("cpu", evil)
        for n in (1, 2)
    ]
    timings.append(Timing("cpu", values={"n": evil}, error=evil))
    found = comparison(
        *timings,
        code=evil,
        setup=evil,
        notes=(evil,),
        sweep={"n": (1, 2, evil)},
        agreements=(Agreement(evil, "cpu", False, 1.0, evil, evil),),
        earlier=two(code=evil),
    )
    for each in (found, replace(found, sweep={}, timings=tuple(timings[:2]))):
        page = Page(each._repr_html_())
        assert not {"script", "img"} & {name for name, _ in page.tags}
        assert all(not key.startswith("on") for _, a in page.tags for key in a)
