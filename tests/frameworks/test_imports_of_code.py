"""Hold what code is found to import: in whatever statement the import stands."""

import ast

from gpumagic.frameworks.known import imports_of

CODE = """
import a.b as x, c
from d.e import f
from . import g
async def h():
    async with x: import i
class J:
    def k(self):
        for _ in (): import l
        else: import m
        while x: from n import o
try: import p
except E: import q
else: import r
finally: import s
match x:
    case 1 if x: import t
if (lambda: 1)() if x else [y for y in x]: pass
elif x: import u
"""


def test_an_import_is_found_in_every_kind_of_block():
    assert imports_of(ast.parse(CODE)) == {*"acdilmnpqrstu"}
    assert imports_of(None) == set()
