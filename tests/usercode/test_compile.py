"""Code of a cell: what awaits at its top is found, and compiles as IPython compiles it."""

import ast
import asyncio
import inspect

import pytest

from gpumagic.usercode.program import awaits, compile_cell

GEN = "async def gen():\n    yield 1\n    yield 2\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = 1\nawait f()", 2),
        ("Z = [i async for i in gen()]", 1),
        ("d = {i: 1 for j in k async for i in j}", 1),
        ("async with a: pass", 1),
        ("if x:\n    async for i in a: pass", 2),
        ("async def f():\n    await g()", None),
        ("z = (i async for i in gen())", None),
        ("[i for i in gen()]", None),
        ("z = sum(x for x in await f())", 1),
        ("def f(a=await g()): pass", 1),
        ("@(await d())\nasync def f(): pass", 1),
    ],
)
def test_the_first_await_at_the_top_is_found_and_compiles(code, line):
    tree = ast.parse(code)
    assert awaits(tree) == line
    body, last = compile_cell(tree, "cell")
    flags = body.co_flags | (last.co_flags if last else 0)
    if line is not None:
        assert flags & inspect.CO_COROUTINE


def test_what_awaits_runs_and_the_last_expression_has_its_value():
    space = {}
    body, last = compile_cell(ast.parse(f"{GEN}Z = [i async for i in gen()]\nsum(Z)"), "cell")
    asyncio.run(eval(body, space))
    assert space["Z"] == [1, 2]
    assert eval(last, space) == 3
    assert compile_cell(ast.parse("x = 1"), "cell")[1] is None
