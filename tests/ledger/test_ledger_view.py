"""The ledger as a line, as text and as a table; the advice and what it would save."""

import linecache
from html.parser import HTMLParser

import pytest
import torch

from gpumagic.ledger.entry import Entry, Ledger
from gpumagic.ledger.ledger_view import advise, line
from gpumagic.usercode.files import UserLine

CELL = "<ipython-input-2-0a1b>"
THERE = UserLine(3, "y = x.to(d)", file=CELL)
COPY = Entry("copy", "copy_", "cpu", "cuda:1", 1, 4096, 1e-3, False, THERE, "x.to(d)")
THERE = UserLine(4, "", file=CELL)
WAIT = Entry("wait", "item", "cuda:1", "cpu", 1000, 4000, 0.02, True, THERE, "loss.item()")


def entry(of, **changes):
    from dataclasses import replace

    return replace(of, **{"calls": changes.get("count", of.count)} | changes)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), ""),
        ((COPY,), "1 transfer: 4.0 KiB to cuda:1"),
        ((WAIT,), "1,000 waits at In [2], line 4: `loss.item()`"),
        (
            (COPY, WAIT),
            "1 transfer: 4.0 KiB to cuda:1; 1,000 waits at In [2], line 4: `loss.item()`",
        ),
        (
            (
                entry(COPY, count=9),
                entry(COPY, where=UserLine(8, file=CELL), destination="cpu", source="cuda:1"),
            ),
            "10 transfers: 4.0 KiB to cuda:1, 4.0 KiB to cpu, 9 of them at In [2], line 3: "
            "`x.to(d)`",
        ),
        (
            (WAIT, entry(WAIT, where=UserLine(9, file=CELL), count=1)),
            "1,001 waits, 1,000 of them at In [2], line 4: `loss.item()`",
        ),
        (
            (entry(WAIT, count=6), entry(WAIT, count=7, code="acc.item()")),
            "13 waits at In [2], line 4: `acc.item()`, `loss.item()`",
        ),
        (
            tuple(entry(WAIT, count=3, code=code) for code in ("a.item()", "b > 1", "c[i]")),
            "9 waits at In [2], line 4: `a.item()`, `b > 1` and 1 more",
        ),
        ((entry(WAIT, where=None, code=""),), "1,000 waits"),
        ((entry(COPY, via="loader"),), ""),
        (
            (
                entry(
                    WAIT,
                    via="print",
                    count=7,
                    calls=1,
                    where=UserLine(9, file=CELL),
                    code="print(loss)",
                ),
            ),
            "1 tensor printed in 7 reads at In [2], line 9: `print(loss)`",
        ),
        (
            tuple(
                entry(
                    of,
                    via="print",
                    count=8,
                    calls=calls,
                    code="print(x)",
                    where=UserLine(2, file=CELL),
                )
                for of, calls in ((WAIT, 4), (COPY, 0))
            ),
            "4 tensors printed in 16 reads at In [2], line 2: `print(x)`",
        ),
    ],
)
def test_the_line(entries, expected):
    assert line(Ledger(entries), without=("loader",)) == expected


@pytest.mark.parametrize(
    ("of", "says", "saved"),
    [
        (entry(WAIT, count=1000), "leave loss.detach().clone() on the device", 999),
        (entry(WAIT, count=1), None, None),
        (entry(WAIT, count=60, via="print", calls=3), "print after the loop", 40),
        (entry(WAIT, count=5, operator="nonzero"), "torch.where", 5),
        (entry(WAIT, count=1, operator="nonzero"), None, None),
        (entry(WAIT, count=5, operator="repeat_interleave"), "depends on the data", 5),
        (entry(WAIT, count=8, operator="histc"), "pass min= and max=", 8),
        (entry(WAIT, count=9, within="torch.optim.lbfgs"), None, None),
        (entry(WAIT, count=9, within="torch.distributions.normal"), "validate_args=False", 9),
        (entry(WAIT, count=9, code="torch.tensor([a, b])"), "torch.stack([...])", 8),
        (
            entry(COPY, count=9, nbytes=9000, implicit=True),
            "create it with device='cuda:1'",
            0,
        ),
        (entry(WAIT, count=5, operator="_unique2"), "before the loop", 5),
        (entry(WAIT, count=5, operator="synchronize"), "wait once", 4),
        (entry(COPY), None, None),
        (entry(COPY, count=10, repeats=9), "move it to cuda:1 once", 9),
        (entry(COPY, count=10, nbytes=10 * 2**20, blocking=10), "pin_memory", 0),
        (entry(COPY, count=10, nbytes=10 * 2**20, blocking=10, pinned=True), "non_blocking", 0),
        (entry(COPY, count=10, nbytes=10 * 2**20, blocking=0, pinned=True), None, None),
        (entry(COPY, count=10, nbytes=100), "many small copies", 9),
        (entry(COPY, count=10, code="torch.ones(3).to('cuda:1')"), "device='cuda:1'", 10),
        (
            entry(COPY, count=10, source="cuda:1", destination="cpu"),
            "read it once after the loop",
            9,
        ),
        (entry(COPY, count=9, operator="index", implicit=True), "or move it once", 0),
        (entry(COPY, count=10, via="loader", pinned=False), "pin_memory=True", 0),
        (entry(COPY, count=10, via="loader", pinned=True), None, None),
        (entry(WAIT, count=90, via="display"), None, None),
    ],
)
def test_advice(of, says, saved):
    advice = advise(of)
    assert (advice is None) == (says is None)
    if advice is not None:
        assert says in advice.text
        assert advice.saved == saved


def test_savings_are_estimated_in_time_only_on_a_real_gpu():
    real, virtual = (str(Ledger((entry(WAIT, count=1000),), v)) for v in (False, True))
    real, virtual = (" ".join(text.split()) for text in (real, virtual))
    assert "saves 999 of 1,000 waits, ≈ 20 ms" in real
    assert "estimated from the measured times" in real
    assert "saves 999 of 1,000" in virtual
    assert "≈" not in virtual
    assert "say nothing about a GPU" in virtual


def test_what_is_only_predicted_has_no_times():
    text = " ".join(
        str(Ledger((entry(WAIT, seconds=None, count=1000), COPY), predicted=True)).split()
    )
    assert "1,000 3.9 KiB N/A → leave loss" in text
    assert "saves 999 of 1,000 waits" in text
    assert "Predicted: nothing was copied" in text


def test_the_text_is_at_most_100_columns_wide():
    long = entry(
        WAIT,
        where=UserLine(4, "x" * 90, file=CELL),
        code="x" * 90,
        within="torch.distributions.distribution",
    )
    for ledger in (Ledger((long, WAIT)), Ledger((WAIT, entry(COPY, count=10, repeats=9)), True)):
        assert max(map(len, str(ledger).splitlines())) <= 100


def test_the_name_of_a_library_is_wrapped_before_the_table_is_split():
    where = UserLine(4, "out = model.generate(prompt, assistant_model=small)", file=CELL)
    module = "transformers.tokenization_utils_base"
    text = str(Ledger((entry(WAIT, nbytes=2**23, seconds=0.02, within=module, where=where),)))
    assert text.splitlines()[0].endswith("time")
    assert max(map(len, text.splitlines())) <= 100
    assert module in text


def test_the_table_names_files_where_there_are_several():
    text = str(Ledger((COPY, entry(WAIT, where=UserLine(4, file="/me/train.py")))))
    assert "In [2], line 3" in text
    assert "train.py, line 4" in text
    assert "y = x.to(d)" in text
    assert "elsewhere" in str(Ledger((entry(COPY, where=None),)))
    assert str(Ledger()) == "no copies between devices, no waits for a GPU"


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.said = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.said.append(data)


def test_html_says_the_same_and_is_escaped():
    evil = entry(
        COPY, code="<script>", where=UserLine(1, "<script>alert(1)</script>"), count=10, nbytes=100
    )
    page = Tags(Ledger((evil, entry(WAIT, count=1000)), True)._repr_html_())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.said
    assert any("read it once after the loop; saves 999 of 1,000" in text for text in page.said)
    assert page.tags.count("tr") == 5
    assert "no copies" in Ledger()._repr_html_()


LONG = "net(data).square().mean(dim=1).sqrt().log()"


@pytest.mark.parametrize(
    ("code", "there", "says"),
    [
        (
            "loss.item()",
            "losses.append(loss.item())",
            "leave losses on the device, with loss.detach().clone() in place of loss.item()",
        ),
        (
            "float(a[0])",
            "self.seen.append(float(a[0]))",
            "leave self.seen on the device, with",
        ),
        (
            "loss.item()",
            "total += float(loss.item())",
            "leave total on the device, with loss.",
        ),
        ("float(a * b)", "log.append(float(a * b))", "(a * b).detach().clone() in place of"),
        (
            "net(x).tolist()",
            "preds.extend(net(x).tolist())",
            "preds on the device, with net(x).d",
        ),
        ("a > b", "print(a > b)", "leave the value on the device"),
        ("loss.item()", "losses.append(", "leave loss.detach().clone() on the device, and read it"),
        ("loss.item()", "total = total + loss.item()", "leave loss.detach().clone() on the device"),
        (f"{LONG}.item()", f"x = {LONG}.item()", "with ….detach().clone() in place of ….item()"),
        (
            "h.detach().cpu()",
            "keep.append(h.detach().cpu())",
            "leave keep on the device, with h.detach().clone() in place of h.detach().cpu(), and",
        ),
    ],
)
def test_advice_is_in_the_users_own_names(code, there, says):
    of = entry(WAIT, code=code, where=UserLine(4, there, file=CELL))
    assert says in advise(of).text
    assert "read it once after the loop" in advise(of).text


@pytest.mark.parametrize(
    ("code", "loop"),
    [
        ("loss.item()", "while True:\n  if loss.item() < 0.01 or it > 30: break"),
        ("loss < 0.01", "for e in r:\n  if loss < 0.01: break"),
        ("loss.item()", "while loss.item() > 1: step()"),
        ("x.mean().item()", "for e in r:\n  acc = x.mean().item()\n  if acc > best: best = acc"),
        ("acc.item()", "for e in r:\n  a = acc.item()\n  b = a / 2\n  if b > 1: best = e"),
        ("p == 3", "for p in pred:\n  if p == 3: c += 1"),
        ("confusion[a, b]", "for a, b in z:\n  confusion[a, b] += 1"),
        ("int(y[i])", "for i in r:\n  seen[int(y[i])] += 1"),
        ("n.item()", "for e in r:\n  for k in range(n.item()): step()"),
        ("a.item()", "def f():\n  n = a.item()\n  return 1 if n > 3 else 2"),
        ("v.item()", "for e in r:\n  best = max(best, v.item())"),
        ("v.item()", "for e in r:\n  n = v.item()\n  step.update(n)"),
        ("v.item()", "def act(s):\n  return v.item()"),
        ("torch.equal(a, b)", "for e in r:\n  if torch.equal(a, b): break"),
        ("a.item()", "for e in r:\n  h.append(a.item())\n  if h[-1] > h[-2]: break"),
        ("a.cpu()", "for e in r:\n  n = a.cpu()\n  x = [v for v in r if v > n]"),
    ],
)
def test_a_value_that_decides_in_the_loop_is_not_to_be_read_later(code, loop, monkeypatch):
    number = next(n for n, row in enumerate(loop.splitlines(), 1) if code in row)
    assert advise(_read_in(loop, code, number, monkeypatch)) is None


def _read_in(loop, code, number, monkeypatch):
    monkeypatch.setitem(linecache.cache, "loop.py", (9, None, loop.splitlines(True), "loop.py"))
    copied = {"kind": "copy", "operator": "copy_"} if ".cpu" in code else {}
    equal = {"operator": "equal"} if "equal" in code else {}
    where = UserLine(number, loop.splitlines()[number - 1].strip(), file="loop.py")
    return entry(WAIT, code=code, where=where, **copied, **equal)


@pytest.mark.parametrize(
    ("code", "loop"),
    [
        ("a.item()", "for e in r:\n  if e % 9 == 0: print(a.item())"),
        ("a.item()", "for e in r:\n  total += a.item()\nif total > 3: best = total"),
        ("a.item()", "for e in r:\n  losses.append(a.item())\n  if e == 9: break"),
        ("a.item()", "for e in r:\n  seen[e] = a.item()"),
        ("a.item()", "for e in r:\n  self.h.append(a.item())\n  if self.verbose: print(e)"),
        ("broken(", "for e in r:\n  broken("),
    ],
)
def test_a_value_that_the_loop_only_keeps_may_be_read_later(code, loop, monkeypatch):
    assert "after the loop" in advise(_read_in(loop, code, 2, monkeypatch)).text


@pytest.mark.parametrize(("nbytes", "fits"), [(2**20, True), (2**50, False)])
def test_only_what_fits_into_the_gpus_free_memory_is_left_there(gpus, nbytes, fits):
    torch.ones(1, device="cuda:1")
    to_host = entry(COPY, source="cuda:1", destination="cpu", code="h.cpu()")
    advice = advise(entry(to_host, count=100, nbytes=nbytes))
    assert (advice is not None) == fits
