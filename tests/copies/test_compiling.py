"""What torch.compile has made in one world is nothing to another, nor to the user."""

import pytest
import torch
from worlds import notebook

from gpumagic.timing import compare

NOTEBOOK = """
f = torch.compile(lambda x: x.sin() * K, backend="eager")
def outer(x):
    @torch.compile(backend="eager")
    def inner(y): return y.cos() * K
    return inner(x)
K = 2.0
"""
IN_CELL = "@torch.compile(backend='eager')\ndef h(x): return x.tan() * K\n"


@pytest.mark.parametrize(("before", "call"), [("", "f({})"), ("", "outer({})"), (IN_CELL, "h({})")])
def test_a_compiled_function_runs_in_every_world_and_after_them(before, call):
    torch.compiler.reset()
    space = notebook(NOTEBOOK + before)
    code = f"{before}y = {call.format('torch.ones(n)')}"
    made = compare(code, ["cpu"], namespace=space, sweep={"n": [2, 3, 4, 5]}, max_time=0.02)
    assert [timing.error for timing in made.timings] == [None] * 4
    exec(f"y = {call.format('torch.ones(4)')}", space)
    assert space["y"].shape == (4,)
