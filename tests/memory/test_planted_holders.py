"""Whatever holds a tensor is found by name: each case plants one, of a size of its own."""

import gc
import re
import sys

import pytest
import torch

from gpumagic.device.caching_allocator import BLOCK
from gpumagic.memory.holders_by_name import find

SET_UP = """
import collections, contextvars, dataclasses, functools, gc, itertools, queue, sys
import threading, types, weakref
import torch
from torch import nn

def gpu():
    global size
    size += 1
    return torch.zeros(128 * size, device="cuda")

class Thing:
    def __init__(self, value):
        self.value = value
    def method(self):
        pass
size = 10
"""
# Neither the notebook nor its modules: that it is held, and not garbage, is all that is known.
OUTSIDE = r"held by C\+\+, a library, or running code.*"
# By what holds it: the cell, and the path that is told.
PLANTED = {
    "variable": ("x1 = gpu()", "x1"),
    "list": ("batches = [0, gpu()]", "batches[1]"),
    "dictionaries": ("d = {'a': {3: gpu()}}", "d['a'][3]"),
    "sparse": (
        "at = torch.zeros(1, 1, dtype=torch.int64, device='cuda')\nvalues = gpu()[None]\n"
        "sp = torch.sparse_coo_tensor(at, values, (9, values.shape[1]), check_invariants=False)\n"
        "del values",
        "sp._values()",
    ),
    "compressed": (
        "import warnings\nvalues, rows = gpu()[None], torch.arange(2, device='cuda')\n"
        "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n"
        "    csr = torch.sparse_csr_tensor(rows, at[0], values, (1, 1, values.shape[1]), "
        "check_invariants=False)\ndel values",
        "csr.values()",
    ),
    "traced": (
        "net = nn.Linear(1, 1).cuda()\nnet.weight = nn.Parameter(gpu()[:1].view(1, 1))\n"
        "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n"
        "    traced = torch.jit.trace(net, torch.zeros(1, 1, device='cuda'))\ndel net",
        OUTSIDE,
    ),
    "key of a tuple": ("by_pair = {(1, 'b'): gpu()}", "by_pair[<tuple>]"),
    "named tuple": ("p = collections.namedtuple('P', 'x y')(1, gpu())", "p[1]"),
    "set": ("a_set = {gpu()}", "a_set.<Tensor>"),
    "deque": ("dq = collections.deque([gpu()])", "dq[0]"),
    "ordered and default dictionaries": (
        "dd = collections.defaultdict(list)\ndd['x'].append(gpu())",
        "dd['x'][0]",
    ),
    "object": ("thing = Thing(gpu())", "thing.value"),
    "object in objects": ("deep = Thing([Thing(gpu())])", "deep.value[0].value"),
    "slots": (
        "@dataclasses.dataclass(slots=True)\nclass Slotted:\n    a: object\nsl = Slotted(gpu())",
        "sl.a",
    ),
    "namespace": ("space = types.SimpleNamespace(t=gpu())", "space.t"),
    "class attribute": ("class Cached:\n    cache = gpu()", "Cached.cache"),
    "class without a name": (
        "def make_local():\n    class Local:\n        kept = gpu()\n    return Local()\n"
        "local = make_local()",
        "local.<type>.kept",
    ),
    "closure": (
        "def make():\n    cache = gpu()\n    def train():\n        return cache\n    return train\n"
        "train = make()",
        "train.__closure__[0].<Tensor>",
    ),
    "default argument": ("def f(a, x=gpu()):\n    pass", "f.<tuple>[0]"),
    "keyword default": ("def g(*, y=gpu()):\n    pass", "g.<dict>['y']"),
    "lambda in a list": ("callbacks = [lambda x=gpu(): x]", "callbacks[0].<tuple>[0]"),
    "function attribute": ("def h(): pass\nh.last = gpu()", "h.last"),
    "lru_cache": (
        "@functools.lru_cache(3)\ndef load(n): return gpu()\nload(1); None",
        "load.<Tensor>",
    ),
    "cache": (
        "@functools.cache\ndef load_all(n): return gpu()\nload_all('a'); None",
        "load_all.<dict>['a']",
    ),
    "cached property": (
        "class Lazy:\n    @functools.cached_property\n    def t(self): return gpu()\n"
        "lazy = Lazy()\nlazy.t; None",
        "lazy.t",
    ),
    "partial": ("part = functools.partial(print, gpu())", "part.args[0]"),
    "keyword of a partial": (
        "part2 = functools.partial(print, end=gpu())",
        "part2.keywords['end']",
    ),
    "bound method": ("bound = Thing(gpu()).method", "bound.__self__.value"),
    "generator": (
        "def count():\n    x = gpu()\n    yield 1\n    print(x)\n"
        "running = count()\nnext(running); None",
        "running.<Tensor>",
    ),
    "coroutine": (
        "@types.coroutine\ndef pause():\n    yield\n"
        "async def wait():\n    y = gpu()\n    await pause()\n    print(y)\n"
        "coro = wait()\ncoro.send(None)",
        "coro.<Tensor>",
    ),
    "iterator": ("tee = itertools.cycle([gpu()])\nnext(tee); None", "tee.<list>[0]"),
    "default of a context variable": (
        "cv2 = contextvars.ContextVar('cv2', default=gpu())",
        "cv2.<Tensor>",
    ),
    "context": (
        "cv3 = contextvars.ContextVar('cv3')\nctx = contextvars.Context()\n"
        "ctx.run(cv3.set, gpu()); None",
        r"ctx\..*",
    ),
    "hook of a module": (
        "hooked = nn.Linear(1, 1)\nhooked.register_forward_hook(lambda *a, t=gpu(): t); None",
        r"hooked\._forward_hooks\[\d+\]\.<dict>\['t'\]",
    ),
    "hook of a tensor": (
        "leaf = torch.zeros(1, requires_grad=True)\nleaf.register_hook(lambda g, t=gpu(): g); None",
        r"leaf\.<OrderedDict>\[\d+\]\.<tuple>\[0\]",
    ),
    "parameter": (
        "net = nn.Sequential(nn.Linear(1, 1))\nnet[0].weight = nn.Parameter(gpu())",
        "net[0].weight",
    ),
    "buffer": ("net.register_buffer('running', gpu())", "net.running"),
    "attribute of a module": ("net.extra = gpu()", "net.extra"),
    "gradient": ("w = nn.Parameter(gpu())\nsize -= 1\nw.grad = gpu()", "w.grad"),
    "state of an optimizer": (
        "opt = torch.optim.Adam([w])\nopt.state[w]['exp_avg'] = gpu()",
        "opt.state[<Parameter>]['exp_avg']",
    ),
    "optimizer alone": (
        "sgd = torch.optim.SGD([nn.Parameter(gpu())])",
        "sgd.param_groups[0]['params'][0]",
    ),
    "saved for backward": (
        "loss = (torch.ones(1, device='cuda', requires_grad=True) * gpu()).sum()",
        "loss.grad_fn: MulBackward0._saved_other",
    ),
    "custom function": (
        "class Keep(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.mine = gpu()\n        return x.clone()\n"
        "kept = Keep.apply(torch.ones(1, requires_grad=True))",
        "kept.grad_fn.mine",
    ),
    "saved by a custom function": (
        "class Save(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(gpu())\n"
        "        return x.clone()\n"
        "saved = Save.apply(torch.ones(1, requires_grad=True))",
        "saved.grad_fn._saved_tensors[0]",
    ),
    "packed by a hook": (
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: [gpu()], lambda p: 1 / 0):\n"
        "    packed = torch.ones(1, requires_grad=True).exp()",
        "packed.grad_fn._saved_result[0]",
    ),
    "weakref's callback": (
        "watched = Thing(1)\nref = weakref.ref(watched, lambda r, t=gpu(): t)",
        "ref.__callback__.<tuple>[0]",
    ),
    "weak dictionary": (
        "weak = weakref.WeakKeyDictionary()\nweak[watched] = gpu()",
        "weak.data[<ReferenceType>]",
    ),
    "finalizer": (
        "weakref.finalize(watched, print, gpu()); None",
        OUTSIDE,
    ),
    "queue": ("q = queue.Queue()\nq.put(gpu())", "q.queue[0]"),
    "thread's local variable": (
        "go, ready = threading.Event(), threading.Event()\n"
        "def work():\n    held = gpu()\n    ready.set()\n    go.wait(60)\n"
        "thread = threading.Thread(target=work, name='loader')\n"
        "thread.start()\nready.wait(60); None",
        "work() (running): held",
    ),
    "thread-local": ("tl = threading.local()\ntl.x = gpu()", r"tl\.<dict>.*\['x'\]"),
    "module of the user's": (
        "mine = types.ModuleType('mine')\nmine.__file__ = '/home/me/mine.py'\n"
        "sys.modules['mine'] = mine\nmine.cache = {'x': gpu()}\ndel mine",
        "mine.cache['x']",
    ),
    "module of a library": (
        "sys.modules['torch.nn.functional']._planted = gpu()",
        OUTSIDE,
    ),
    "class of a library": ("nn.Linear._planted = gpu()", OUTSIDE),
    "output": ("gpu()", r"Out\[\d+\]"),
    "exception": (
        "def step(n):\n    x = gpu()\n    raise KeyError(n)\n"
        "try:\n    step(1)\nexcept KeyError as e:\n    error = e",
        "error.<traceback>.<traceback>.tb_frame.<Tensor>",
    ),
    "chained exception": (
        "def parse(n):\n    y = gpu()\n    raise KeyError(n)\n"
        "try:\n    try:\n        parse(1)\n"
        "    except KeyError as e:\n        raise ValueError from e\n"
        "except ValueError as e:\n    chained = e",
        "chained.<KeyError>.<traceback>.<traceback>.tb_frame.<Tensor>",
    ),
    "data of a loader": (
        "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(gpu()))",
        "loader.dataset.tensors[0]",
    ),
    "loader's iterator": (
        "batches_of = iter(torch.utils.data.DataLoader([1, 2], collate_fn=lambda b, t=gpu(): t))",
        "batches_of._collate_fn.<tuple>[0]",
    ),
    "property": (
        "class Made:\n    t = property(lambda self, x=gpu(): x)",
        "Made.t.fget.<tuple>[0]",
    ),
    "static method": (
        "class Static:\n    @staticmethod\n    def f(x=gpu()): pass",
        "Static.f.__func__.<tuple>[0]",
    ),
    "attribute of a dictionary's subclass": (
        "class Config(dict): pass\nconf = Config()\nconf.t = gpu()",
        "conf.t",
    ),
    "view of a dictionary": ("proxy = types.MappingProxyType({'a': gpu()})", "proxy.<dict>['a']"),
    "frame": (
        "def here():\n    v = gpu()\n    return sys._getframe()\nframe = here()",
        "frame.<Tensor>",
    ),
    "what %debug looks at": (
        "def stop():\n    w = gpu()\n    1 / 0\ntry:\n    stop()\nexcept ZeroDivisionError as e:\n"
        "    import IPython.terminal.debugger\n    pdb = IPython.terminal.debugger.Pdb()\n"
        "    pdb.reset()\n    pdb.setup(None, e.__traceback__)\n"
        "    get_ipython().InteractiveTB.pdb = pdb\n    del pdb",
        "%debug['curframe'].<Tensor>",
    ),
    "cell that failed earlier": (
        "gc.disable()\ndef broken():\n    inner = gpu()\n    1 / 0\nbroken()",
        r"the exception of In \[\d+\](\.<traceback>)+\.tb_frame\.<Tensor>",
    ),
    "cell that failed": (
        "def broken():\n    inner = gpu()\n    1 / 0\nbroken()",
        r"the exception of In \[\d+\]\.<traceback>\.<traceback>\.tb_frame\.<Tensor>",
    ),
    "reference cycle": (
        "def around():\n    a = Thing(gpu())\n    a.me = a\ngc.disable()\naround()",
        "a reference cycle that is not collected yet",
    ),
    "hook of a node": (
        "node = torch.ones(1, requires_grad=True).exp().grad_fn\n"
        "node.register_hook(lambda *g, t=gpu(): None); None",
        r"node\.<OrderedDict>\[\d+\]\.<dict>\['t'\]",
    ),
    "hook of a node in C++": (
        "out = torch.ones(1, requires_grad=True).exp()\n"
        "def hook(*g, t=gpu()): pass\n"
        "out.grad_fn.register_hook(hook)\ndel hook",
        OUTSIDE,
    ),
    "cycle through autograd": (
        "class Around(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n"
        "        ctx.mine = gpu()\n        return x.clone()\n"
        "around_it = Around.apply(torch.ones(1, requires_grad=True))\n"
        "around_it.grad_fn.output = around_it\ndel around_it",
        "a reference cycle that is not collected yet",
    ),
}


@pytest.fixture(scope="module")
def found():
    """The path to each that is planted, all in one notebook."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    from gpumagic import virtual

    gc.unfreeze()  # what conftest.py keeps from the collector is not looked through either
    virtual.enable(1, 2**30)
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    try:
        shell.run_cell(SET_UP).raise_error()
        sizes = {}
        for name, (cell, _) in PLANTED.items():
            result = shell.run_cell(cell, store_history=True)
            if "failed" not in name:
                result.raise_error()
            sizes[shell.user_ns["size"] * BLOCK] = name
        storages = find(shell.user_ns, paths=True)
        assert sum(s.nbytes for s in storages) == torch.cuda.memory_allocated()
        yield {sizes.get(s.nbytes, "".join(s.path)): s for s in storages}
    finally:
        shell.user_ns["go"].set()
        shell.run_cell("gc.enable()")
        shell.reset()
        sys.modules.pop("mine", None)
        for owner in (torch.nn.functional, torch.nn.Linear):
            if hasattr(owner, "_planted"):
                del owner._planted
        InteractiveShell.clear_instance()
        virtual.disable()
        gc.collect()
        gc.freeze()


@pytest.mark.parametrize("name", PLANTED)
def test_it_is_found_by_name(found, name):
    path = PLANTED[name][1]
    assert name in found, f"not found; others: {[k for k in found if k not in PLANTED]}"
    told = "".join(found[name].path)
    assert told == path or re.fullmatch(path, told), told
