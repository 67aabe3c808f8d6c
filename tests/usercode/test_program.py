"""Code as a function that runs it again and again, as a cell would."""

import inspect
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import GpuError
from gpumagic.usercode.program import FUNCTION, program


def run(code, space, times=3, **options):
    made = program(code, space, **options)
    made.set_up(space)
    if made.function is not None:
        space[FUNCTION] = made.function
    value = made.once(space)
    made.looped(space)([None] * (times - 1))
    return value


def test_names_are_global_and_the_value_is_the_last_expressions():
    space = {"n": 0}
    assert run("n += 1\nn", space) == 1
    assert space["n"] == 3
    assert run("m = n", space) is None
    assert space["m"] == 3


CODE = {
    "annotations": ("x: int = 3\ny: str\nz.a: int = 4\nx", 3),
    "walrus": ("[i for i in range(3) if (last := i) + 1]\nlast", 2),
    "function": (
        "def f(a):\n    global g\n    g = a\n    return [a for a in (a, g)]\nf(4)",
        [4, 4],
    ),
    "class": ("class K:\n    v = 5\n    def me(self): return K\nK().me().v", 5),
    "lambda": ("w = 7\n(lambda: w)()", 7),
    "except": (
        "try: 1 / 0\nexcept ZeroDivisionError as e: said = str(e)\nsaid",
        "division by zero",
    ),
    "for": ("for k in range(9):\n    if k == 2: break\nk", 2),
    "match": (
        "match {'a': 1, 'b': 2}:\n    case {'a': one, **rest}: pass\n(one, rest)",
        (1, {"b": 2}),
    ),
    "import": ("import os.path as p, json\np.join('a', json.dumps(1))", "a/1"),
    "del": ("d = 1\ndel d\n'd' in globals()", False),
    "global": ("global h\nh = 6\nh", 6),
    "future": ("from __future__ import annotations\ndef f(x: Nothing): return 8\nf(1)", 8),
    "with": ("with open('/dev/null') as file: pass\nfile.closed", True),
    "texts": ("exec('q = 4')\neval('q + 1') + locals()['q'] + vars()['q']", 13),
    "text": ("'a string alone'", "a string alone"),
}


@pytest.mark.parametrize(("code", "value"), CODE.values(), ids=CODE)
def test_what_a_cell_may_say(code, value):
    class Z:
        pass

    space = {"z": Z()}
    assert run(code, space) == value
    assert not {".runs", ".run", "<module>", "f.<locals>"} & set(space)


def test_what_is_defined_is_named_as_in_a_cell():
    space = {"__name__": "__main__"}
    run("class K: pass\ndef f(): pass", space)
    assert (space["K"].__qualname__, space["f"].__qualname__) == ("K", "f")
    assert space["K"].__module__ == "__main__"


@pytest.mark.parametrize(
    "code", ["return 1", "yield 2", "break", "nonlocal n", "1 +", "x = (yield)"]
)
def test_what_python_refuses_in_a_cell_it_refuses_here(code):
    with pytest.raises(SyntaxError):
        program(code, {})


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("", "there is no code"),
        ("# only a comment\n", "there is no code"),
        ("x = 1\nawait f()", "line 2 has an await"),
        ("[a async for a in b]", "line 1 has an await"),
        ("async with a: pass", "line 1 has an await"),
        (3, "not int"),
    ],
)
def test_what_cannot_be_timed_is_one_line(code, says):
    with pytest.raises(GpuError, match=says.replace("*", r"\*")) as caught:
        program(code, {})
    assert "\n" not in str(caught.value)


def test_an_async_function_within_is_nobodys_business():
    assert run("async def f():\n    await g()\n1", {}) == 1
    with pytest.raises(GpuError, match="async function"):
        program(inspect.iscoroutinefunction and _sleeps, {})


async def _sleeps():
    pass


def test_tracebacks_have_the_users_lines():
    code = "x = 1\n\ny = x / 0"
    with pytest.raises(ZeroDivisionError) as caught:
        run(code, {})
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.lineno, last.name, last.line) == (3, "<module>", "y = x / 0")
    with pytest.raises(ZeroDivisionError) as caught:
        run(code, {}, filename="cell 5")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == "cell 5"


def test_the_set_up_runs_once_and_what_it_reads_is_read():
    space = {"base": 10}
    made = program("total += step", space, setup="total, step = base, 2\nfrom os import *")
    assert made.reads == ("base",)
    assert made.assigned == ("total",)
    made.set_up(space)
    made.looped(space)([None] * 3)
    assert space["total"] == 16


def test_a_function_is_called():
    calls = []
    space = {}
    assert run(lambda: calls.append(1) or len(calls), space, times=4) == 1
    assert len(calls) == 4
    assert space.keys() == {FUNCTION}


def test_what_a_function_reads_are_the_variables_that_it_leads_to():
    space = {"__name__": "nb", "a": 1, "b": 2, "unused": 3}
    exec("def inner(): return a\ndef outer(): return inner() + b", space)
    made = program(space["outer"], space)
    assert set(made.reads) == {"a", "b", "inner"}
    assert made.text == "outer()"


STATEMENTS = st.sampled_from(
    [
        "a = a + 1",
        "b = [a, *b][:5]",
        "for i in range(a % 3): b.append(i)",
        "c = {k: v for k, v in enumerate(b)}",
        "def f(x): return x + a",
        "a = f(a) % 11",
        "class K:\n    v = a",
        "a += K.v",
        "if a % 2:\n    d = a\nelse:\n    d = -a",
        "a = sum(q for q in b) % 7 + (s := 1)",
        "del b[:1]",
        "b: list = b + [d]",
    ]
)


@given(st.lists(STATEMENTS, max_size=8), st.integers(1, 4))
def test_n_runs_are_n_times_the_cell(lines, times):
    def space():
        made = {"a": 3, "b": [1, 2], "d": 0}
        exec("def f(x): return x\nclass K:\n    v = 1", made)
        return made

    code = "\n".join([*lines, "a"])
    expected, found = space(), space()
    for _ in range(times):
        exec(code, expected)
    run(code, found, times)
    plain = ("a", "b", "c", "d", "i", "s")
    assert [found.get(n) for n in plain] == [expected.get(n) for n in plain]
    assert found.keys() == expected.keys()
