"""Through the notebook's functions, wherever a name of the cell leads to one."""

import ast

import pytest

from gpumagic.usercode.variables import variables_read


def test_functions_of_the_notebook_are_followed():
    space = {"__name__": "__main__"}
    exec(
        "data, net, unused, depth = 1, 2, 3, 4\n"
        "def inner(): return [net for _ in range(depth)]\n"
        "def train(x): return inner() + x.unused\n",
        space,
    )
    assert [n for n, _ in variables_read(["train", "data", "missing"], space)] == [
        "train",
        "data",
        "inner",
        "depth",
        "net",
    ]


def test_closures_classes_and_instances_are_followed_but_not_libraries():
    space = {"__name__": "__main__"}
    exec(
        "weights = 1\n"
        "def outer():\n"
        "    kept = 'tensor'\n"
        "    return lambda: kept\n"
        "held = outer()\n"
        "class Trainer:\n"
        "    def fit(self): return weights\n"
        "trainer = Trainer()\n",
        space,
    )
    assert dict(variables_read(["held"], space))["held.kept"] == "tensor"
    assert "weights" in dict(variables_read(["trainer"], space))
    assert "weights" in dict(variables_read(["Trainer"], space))
    assert [n for n, _ in variables_read(["parse"], {"parse": ast.parse, "sys": 1})] == ["parse"]


def test_each_closure_of_the_same_code_is_read():
    space = {"__name__": "__main__"}
    exec("def scaled(by): return lambda x: x * by\na, b = scaled('one'), scaled('two')", space)
    found = dict(variables_read(["a", "b"], space))
    assert (found["a.by"], found["b.by"]) == ("one", "two")


def test_default_arguments_are_read():
    space = {"__name__": "__main__"}
    exec("def f(x, y=1, z='tensor', *more, w='kept', **others): v = x", space)
    found = dict(variables_read(["f"], space))
    assert found == {"f": space["f"], "f.y": 1, "f.z": "tensor", "f.w": "kept"}


def test_recursion_ends():
    space = {"__name__": "__main__"}
    exec("def f(): return g()\ndef g(): return f()", space)
    assert [n for n, _ in variables_read(["f"], space)] == ["f", "g"]


def test_decorated_partial_and_cached_functions_are_followed():
    space = {"__name__": "__main__"}
    exec(
        "import functools\n"
        "a, b, c, d = 1, 2, 3, 4\n"
        "def timed(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(*args): return f(*args), a\n"
        "    return wrapper\n"
        "@timed\n"
        "def first(): return b\n"
        "@functools.lru_cache\n"
        "def second(): return c\n"
        "def third(x): return d\n"
        "part = functools.partial(third, 1)\n",
        space,
    )
    for name, expected in (("first", {"a", "b"}), ("second", {"c"}), ("part", {"d"})):
        assert expected <= set(dict(variables_read([name], space))), name


class Hostile:
    def __getattr__(self, name):
        raise KeyError(name)


def test_objects_that_raise_for_any_attribute_are_passed_over():
    assert [n for n, _ in variables_read(["x"], {"x": Hostile()}, __name__)] == ["x"]


LEADS = {
    "bound method": "class A:\n    def m(self): return net\nx = A().m",
    "method of an instance": "class A:\n    def m(self): return net\nx = A()",
    "inherited method": "class A:\n    def m(self): return net\nclass B(A): pass\nx = B()",
    "property": "class A:\n    @property\n    def m(self): return net\nx = A()",
    "static method": "class A:\n    @staticmethod\n    def m(): return net\nx = A",
    "class method": "class A:\n    @classmethod\n    def m(cls): return net\nx = A()",
    "functions in a dict": "x = {'first': lambda: net}",
    "functions in a list": "x = [lambda: net]",
    "partial of a lambda": "import functools\nx = functools.partial(lambda a: net, 1)",
    "a decorator without wraps": (
        "def plain(f):\n    def inner(): return f()\n    return inner\n@plain\ndef x(): return net"
    ),
    "a module's inner block": (
        "from torch import nn\nclass Block(nn.Module):\n    def forward(self, a): return a @ net\n"
        "x = nn.Sequential(nn.Sequential(Block()))"
    ),
    "a cached function": "import functools\n@functools.cache\ndef x(): return net",
    "a cached property": (
        "from functools import cached_property\nclass A:\n    @cached_property\n"
        "    def m(self): return net\nx = A()"
    ),
    "a keyword of a partial": "import functools\nx = functools.partial(map, f=lambda: net)",
    "an attribute": (
        "class A:\n    def __init__(self, loss): self.loss = loss\nx = A(lambda out: out @ net)"
    ),
    "a default": "def x(a, loss=lambda: net): pass",
    "a default by name": "def x(*, loss=lambda: net): pass",
}


@pytest.mark.parametrize("code", LEADS.values(), ids=LEADS.keys())
def test_every_way_to_a_function_of_the_notebook(code):
    space = {"__name__": "__main__", "net": "the net", "other": "not read"}
    exec(code, space)
    found = dict(variables_read(["x"], space))
    assert found.get("net") == "the net"
    assert "other" not in found


def test_what_cannot_be_followed_is_passed_over():
    from torch import nn

    def itself():
        """Wraps itself."""

    itself.__wrapped__ = itself
    unmade = nn.Linear.__new__(nn.Linear)
    space = {"itself": itself, "unmade": unmade}
    assert [n for n, _ in variables_read(["itself", "unmade"], space, __name__)] == [*space]
