"""Objects as notebooks make them: a copy does what the original would, or is refused in a line."""

import sys
import types

import pytest
from worlds import notebook, run

from gpumagic.errors import GpuError

pytestmark = pytest.mark.usefixtures("gpus")

PROGRAMS = {
    "closure": (
        "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return up, lambda: n\nup, get = counter()",
        "up(); up(); out = get()",
        2,
    ),
    "a closure that holds None": (
        "def remember():\n    last = None\n    def see(x):\n        nonlocal last\n"
        "        before, last = last, x\n        return before\n    return see\nsee = remember()",
        "out = see(1), see(2)",
        (None, 1),
    ),
    "super and properties": (
        "class A:\n    def __init__(self): self.v = [1]\n    def go(self): return self.v\n"
        "class B(A):\n    def go(self): super().go().append(2); return self.v\n"
        "    @property\n    def p(self): return self.v[0]\n"
        "    @p.setter\n    def p(self, x): self.v[0] = x\n"
        "    @classmethod\n    def mark(cls): cls.tag = 1\nb = B()",
        "b.p = 7; B.mark(); out = b.go(), isinstance(b, A), type(b) is B, B.tag",
        ([7, 2], True, True, 1),
    ),
    "a dataclass with slots": (
        "@dataclasses.dataclass(slots=True)\nclass P:\n    x: list\np = P([1])",
        "p.x.append(2); out = dataclasses.asdict(p), hasattr(p, '__dict__')",
        ({"x": [1, 2]}, False),
    ),
    "a registry of subclasses": (
        "class Base:\n    known = {}\n    def __init_subclass__(cls, *, tag):\n"
        "        Base.known[tag] = cls\nclass A(Base, tag='a'):\n    items = []",
        "A.items.append(1); out = len(Base.known), Base.known['a'] is A",
        (1, True),
    ),
    "an argument of a subclass": (
        "class Base:\n    def __init_subclass__(cls, *, tag): cls.tag = tag\n"
        "class A(Base, tag='a'): pass\na = A()",
        "\nclass B(type(a), tag='b'): pass\nout = type(a).tag, B.tag",
        ("a", "b"),
    ),
    "the limits of a dtype": ("f = torch.finfo(torch.half)", "out = f.bits", 16),
    "a metaclass": (
        "class Meta(type):\n    made = []\n    def __new__(m, name, bases, space):\n"
        "        m.made.append(space['label'])\n"
        "        return super().__new__(m, name, bases, space)\n"
        "class P(metaclass=Meta):\n    label = 'p'\np = P()",
        "P.new = 1; out = Meta.made, isinstance(p, P), type(P) is Meta",
        (["p"], True, True),
    ),
    "an enumeration": (
        "class Mode(enum.Enum):\n    A = 1\n    B = 2\nm, d = Mode.A, {Mode.B: [1]}",
        "d[Mode.B].append(2); out = m is Mode.A, d[Mode(2)]",
        (True, [1, 2]),
    ),
    "partials, methods and defaults": (
        "def f(kept, x, more={}): kept.append(x); more[x] = 1; return len(more)\nkept = []\n"
        "p = functools.partial(f, kept)\nadd = kept.append",
        "p(1); add(3); out = p(2), kept",
        (2, [1, 3, 2]),
    ),
    "a wrapper that answers anything": (
        "class W:\n    def __init__(self, inner): self.inner = inner\n"
        "    def __getattr__(self, name): return getattr(self.inner, name)\nw = W([1])",
        "w.append(2); out = w.inner",
        [1, 2],
    ),
    "weak references": (
        "class N: pass\na = N(); a.v = [0]; r = weakref.ref(a)\n"
        "d = weakref.WeakKeyDictionary(); d[a] = 1",
        "r().v.append(1); out = a.v, d[a]",
        ([0, 1], 1),
    ),
    "an object that objects": (
        "class A:\n    def __eq__(self, other): raise ValueError\n"
        "    def __hash__(self): return 1\n"
        "    def __bool__(self): raise ValueError\n    def __len__(self): raise ValueError\n"
        "a = A(); d = {a: [1]}",
        "d[a].append(2); out = d[a]",
        [1, 2],
    ),
    "a lock": (
        "class T:\n    def __init__(self): self.lock, self.n = threading.Lock(), 0\nt = T()",
        "with t.lock: t.n += 1\nout = t.n",
        1,
    ),
    "a name that the code gives a new meaning": (
        "def use(): return helper() * k\ndef helper(): return 1\nk = 2",
        "k = 5\ndef helper(): return 10\nout = use()",
        50,
    ),
    "a function in an attribute, that reads a variable": (
        "log = []\ndef note(): log.append(1)\nclass T: pass\nt = T(); t.calls = [(note,)]",
        "t.calls[0][0](); out = log",
        [1],
    ),
    "a sentinel": (
        "NONE = object()\nclass A:\n    def missing(self, x=NONE): return x is NONE\na = A()",
        "out = a.missing(), a.missing(NONE)",
        (True, True),
    ),
    "a figure": (
        "import matplotlib.figure\nfig = matplotlib.figure.Figure(); ax = fig.subplots()",
        "line, = ax.plot([1, 2]); out = ax.figure is fig, line in ax.lines, len(ax.lines)",
        (True, True, 1),
    ),
    "torch's decorators": (
        "log = []\n@torch.no_grad()\ndef f(x): log.append(1); return x * 2\n"
        "x = torch.ones(1, requires_grad=True)",
        "out = f(x).requires_grad, log",
        (False, [1]),
    ),
    "a generator of a GPU": (
        "g = torch.Generator('cuda:1').manual_seed(3)",
        "out = g.device.type, torch.rand(1, device='cuda:1', generator=g).device.type",
        ("cuda", "cuda"),
    ),
    "an array's class with attributes": (
        "class Signal(np.ndarray):\n    def __array_finalize__(self, source):\n"
        "        self.marks = getattr(source, 'marks', None)\n"
        "base = np.arange(3.); s = base.view(Signal); s.marks = [1]",
        "s.marks.append(2); base[0] = 5; out = s.marks, float(s[0]), isinstance(s, Signal)",
        ([1, 2], 5.0, True),
    ),
    "an empty array between two that overlap": (
        "m = np.arange(100.).reshape(10, 10); e = m[5:, :0]; v = m[6:]",
        "m[7, 0] = -1; out = v[1, 0], e.shape",
        (-1, (5, 0)),
    ),
    "a result of a tensor's subclass": (
        "class T(torch.Tensor):\n    def twice(self): return self * 2\n"
        "x = torch.ones(2).as_subclass(T).requires_grad_(); y = x * 3",
        "out = type(y) is T, y.twice().tolist(), y.is_leaf, y.requires_grad",
        (True, [6, 6], False, True),
    ),
    "an object that leaves a handle out of its state": (
        "class D:\n    def __init__(self): self.x, self.file = [1], (i for i in '1')\n"
        "    def __getstate__(self): return {'x': self.x}\nd = D()",
        "d.x.append(2); out = d.x",
        [1, 2],
    ),
    "a structure of ctypes": (
        "import ctypes\nclass P(ctypes.Structure): _fields_ = [('x', ctypes.c_int)]\np = P(3)",
        "p.x += 1; out = p.x, type(p) is P",
        (4, True),
    ),
    "a dictionary of weak references": (
        "class N: pass\na = N(); a.v = [0]; d = weakref.WeakValueDictionary(a=a)",
        "d['a'].v.append(1); out = a.v",
        [0, 1],
    ),
    "an autograd function": (
        "log = []\nclass D(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x): return x * 2\n    @staticmethod\n"
        "    def backward(ctx, g): log.append(1); return g * 2\n"
        "x = torch.ones(1, requires_grad=True)",
        "D.apply(x).sum().backward(); out = log, x.grad.item()",
        ([1], 2.0),
    ),
}


@pytest.mark.parametrize(("setup", "code", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_programs_of_a_notebook(setup, code, expected):
    namespace = notebook(setup)
    result, _ = run(namespace, code)
    assert result["out"] == expected
    result["out"] = None
    exec(code, namespace)
    assert namespace["out"] == expected, "the program itself is not what the test takes it for"


def test_a_librarys_class_with_a_method_of_the_notebook_is_copied(monkeypatch):
    """Or the method would run with the notebook's own variables."""
    namespace = notebook(
        "import argparse\nlog = []\ndef mark(self): log.append(self.n)\n"
        "space = argparse.Namespace(n=3)"
    )
    monkeypatch.setattr(namespace["argparse"].Namespace, "mark", namespace["mark"], raising=False)
    result, _ = run(namespace, "space.mark(); out = log")
    assert result["out"] == [3]
    assert namespace["log"] == []


def test_a_decorated_function_is_copied_where_main_has_it_by_its_name(monkeypatch):
    namespace = notebook("log = []\n@torch.no_grad()\ndef f(): log.append(1)")
    main = types.ModuleType("__main__")
    vars(main).update(namespace)
    monkeypatch.setitem(sys.modules, "__main__", main)
    run(namespace, "f()")
    assert namespace["log"] == []


@pytest.mark.parametrize(
    ("setup", "code", "words"),
    [
        ("g = (i for i in range(3))", "next(g)", "g cannot be copied (cannot pickle 'generator'"),
        (
            "class T: pass\nt = T(); t.it = (i for i in '12')",
            "next(t.it)",
            "t cannot be copied (cannot pickle 'generator' object)",
        ),
        (
            "import os\nf = open(os.devnull)",
            "f.read()",
            "f cannot be copied (cannot copy an open file)",
        ),
        (
            "f = memoryview(bytearray(3))[1:]",
            "f[0] = 1",
            "f cannot be copied (cannot copy a memoryview)",
        ),
        (
            "it = iter(torch.utils.data.DataLoader([1, 2]))",
            "next(it)",
            "it cannot be copied (",
        ),
        (
            "import warnings\nwith warnings.catch_warnings():\n"
            "    warnings.simplefilter('ignore'); net = torch.jit.script(nn.Linear(2, 2))",
            "net",
            "net cannot be copied (",
        ),
    ],
)
def test_what_has_no_copy_is_refused_in_a_line(setup, code, words):
    namespace = notebook(setup)
    with pytest.raises(GpuError) as refused:
        run(namespace, code)
    line = str(refused.value)
    assert line.startswith(words)
    assert line.endswith("), so each run would change it; create it in the cell")
    assert "\n" not in line
    if "f" in namespace and hasattr(namespace["f"], "close"):
        namespace["f"].close()
