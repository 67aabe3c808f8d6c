"""What a cell reads: the value from before the cell must be able to reach an expression."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.usercode.variables import names_read

CASES = {
    "print(x)": "print x",
    "x = 1; print(x)": "print",
    "x = x + 1": "x",
    "x += 1": "x",
    "y: int = x": "int x",
    "x: int; x": "int x",
    "if c:\n    x = 1\nx": "c x",
    "if c:\n    x = 1\nelse:\n    x = 2\nx": "c",
    "for i in xs:\n    y = i\ny": "xs y",
    "while c:\n    x = 1\nx": "c x",
    "while c:\n    if d:\n        break\n    x = 1\nelse:\n    x = 2\nx": "c d x",
    "for i in xs:\n    if i:\n        break\n    x = 1\nelse:\n    x = 2\nx": "xs x",
    "try:\n    x = f()\nexcept ValueError as e:\n    e\nx": "f ValueError x",
    "try:\n    x = 1\nfinally:\n    x": "",
    "with open(p) as h:\n    h.read()": "open p",
    "import torch as t; t.zeros(n)": "n",
    "from a import b; b(c)": "c",
    "[a * i for i in xs if i > k]": "xs k a",
    "i = [i for i in i]": "i",
    "{k: v for k, v in d.items()}": "d",
    "def f(a, b=c):\n    d = a\n    return d + g": "c g",
    "def f():\n    global d\n    d = d + 1": "d",
    "async def f(a: A, *b: B, c: C = c) -> list[D]: ...": "A B C c list D",
    "lambda a: a + b": "b",
    "def f(a, key=lambda x: 1):\n    return x": "x",
    "class A(B):\n    x = y\n    def f(self): return z": "B y z",
    "class A:\n    x = 2\n    def f(self): return x": "x",
    "class A:\n    x = 2\n    y = x\n    z = lambda: x": "x",
    "class A:\n    x = 2\n    y = [x for _ in a]": "a x",
    "class A:\n    x = a\n    y = [b for b in x]": "a",
    "class A:\n    x = 2\n    class B:\n        y = x": "x",
    "class A:\n    def x(self): return x": "x",
    "class A:\n    def f(self):\n        x = 1\n        return lambda: x": "",
    "x = 1\nclass A:\n    x = 2\n    def f(self): return x": "",
    "def f():\n    x = 1\n    class A:\n        x = 2\n        def g(self): return x": "",
    "def f(): return [x for x in a], x": "a x",
    "def f(): return {x: y for x, y in a}, x, y": "a x y",
    "def f(): return [(y := x) for x in a if (z := x)], y, z": "a",
    "[(y, (y := x)) for x in a]": "a y",
    "def f(id): return [id(x) for x in a]": "a",
    "def f():\n    for i in a: x = i\n    return x": "a",
    "def f():\n    try: import x\n    except E: pass\n    return x": "E",
    "def f(): return [[x for x in y] for y in a], x": "a x",
    "def f():\n    def g(): x = 1\n    return x": "x",
    "def f():\n    def g():\n        nonlocal x\n        return x\n    x = 1": "",
    "def f():\n    x = 1\n    def g():\n        global x\n    return x": "",
    "def f():\n    class A: x = 1\n    return x": "x",
    "def f(): return (lambda: (x := 1)), x": "x",
    "a.b.c = d[e]": "d e a",
    "a[i] = v": "v a i",
    "f'{x:{w}}'": "x w",
    "(y := x) + y": "x",
    "del x": "",
    "async def f():\n    await g(x)": "g x",
    "await g(x)": "g x",
    "match p:\n    case [a, *b]: a + b + c": "p c",
    "a and (b := c) or b": "a c b",
    "Out[3] + x": "x",
    "get_ipython().run_line_magic('timeit', '-n 10 net(X)')": "net X",
    "get_ipython().run_cell_magic('time', '', 'y = net(X)\\n')": "net X",
    "get_ipython().run_cell_magic('timeit', '-n 1 z = W', 'z @ X\\n')": "W X",
    "get_ipython().run_cell_magic('bash', '', 'echo X')": "",
    "get_ipython().run_line_magic('timeit', 'not python')": "python",
    "get_ipython().run_line_magic('time', ')(')": "",
    "get_ipython().run_line_magic('lprun', '-f net.f train(X)')": "net f train X",
    "get_ipython().run_line_magic('time')": "",
    "get_ipython().run_line_magic(magic_name='time', line=x)": "x",
}


@pytest.mark.parametrize(("code", "expected"), CASES.items())
def test_names(code, expected):
    assert names_read(ast.parse(code)) == expected.split()


NAMES = st.sampled_from("abcde")
STATEMENTS = st.recursive(
    st.builds("{} = {}".format, NAMES, NAMES) | st.builds("{}".format, NAMES),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(
        lambda body: "if True:\n" + "\n".join("  " + ln for s in body for ln in s.splitlines())
    ),
    max_leaves=6,
)


@given(st.lists(STATEMENTS, max_size=5))
def test_every_name_that_running_needs_is_read(statements):
    code = "\n".join(statements)
    read = set(names_read(ast.parse(code)))
    # With exactly those names given, the code runs: nothing that it needs was left out.
    exec(compile(code, "cell", "exec"), dict.fromkeys(read, 0))


@pytest.mark.parametrize(
    ("code", "found"),
    [("exec('x.add_(1)')", True), ("globals()['x'] = y", True), ("print('x')", False)],
)
def test_a_name_in_a_text_counts_where_code_reads_by_name(code, found):
    assert ("x" in names_read(ast.parse(code))) is found
