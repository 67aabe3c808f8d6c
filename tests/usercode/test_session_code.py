"""What of a session other code needs, and its cells as plain Python."""

import pytest

from gpumagic.usercode.session_code import needed, parts_of, plain_python

# Each session ends in what is wanted; the statements without # are those that it needs.
SESSIONS = {
    "by name, also through functions, later ones too": """
def f(): return g() + n
import math  #
def g(): return m
m = 1
n: int = 2
k = 3  #
f()""",
    "the last of definitions that are run again": """
import os  #
def f(): return os.name  #
x = load()  #
import os
def load(): return 1
def f(): return os.name
x = load()
f(x)""",
    "each of those that build on the one before": """
x = 1
x = x + 1
x += 1
y = 1
z = [y]
y = 2
print(x, y, z)""",
    "what a function reads when it is called": """
def f(): return n
n = 1
y = f()
n = 2
y, n""",
    "changes of a part, and methods, but nothing that only reads": """
x = Net()
class Net: pass
x.lr = 1
x["a"] = 2
x.train()
show(x)  #
x  #
del x.a
with open("f") as file: w = file.read()
for i in range(3): x.add(i)
from nowhere import *
x, w""",
    "nothing from after it": """
x = 1
x; y = 2  #
x""",
}


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_only_what_is_needed_is_kept(session):
    *lines, wanted = session.strip().splitlines()
    every = [each for line in lines for each in parts_of(line)]
    (last,) = parts_of(wanted)
    after = [*parts_of("x = 9")]
    kept = needed([*every, last, *after], [last])
    assert [each.text for each in kept] == [x for x in lines if not x.endswith("#")] + [wanted]


def test_statements_keep_their_text_and_comments():
    code = "# one\nx = (1,\n     2)  # two\n\n# f\n@g\ndef f(): 'a\\\nb'\ny = 1; z = 'é'; w = 3\n"
    texts = [each.text for each in parts_of(code)]
    assert texts == [
        "# one\nx = (1,\n     2)  # two",
        "# f\n@g\ndef f(): 'a\\\nb'",
        "y = 1",
        "z = 'é'",
        "w = 3",
    ]


def test_what_ipython_adds_is_left_out():
    cell = "%%time\n%%capture\nif x:\n    !ls\n    %time y = f(x)\na = %env HOME\n?f\nb = 1"
    above, code = plain_python(cell)
    assert above == ["%%time", "%%capture"]
    lines = code.splitlines()
    assert lines[:3] == [
        "if x:",
        "    pass  # left out: get_ipython().system('ls')",
        "    y = f(x)",
    ]
    assert lines[3].startswith("pass  # left out: a = get_ipython()")
    assert lines[-1] == "b = 1"
    for other in ("%%bash\nls", "if:", "%%ongpu"):
        assert plain_python(other)[1] == ""
