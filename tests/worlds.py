"""What the tests of copies share: a notebook's variables, and whether they are as they were."""

import ast
import gc
import random
import types
from collections import deque

import numpy
import torch

from gpumagic.copies.trial import CopiedVariables
from gpumagic.isolation.settings import Randomness
from gpumagic.placement import swap
from gpumagic.usercode.variables import names_read

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
_IMPORTS = """
import collections, dataclasses, enum, functools, itertools, random, threading, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
"""


def notebook(code):
    """Variables, as a notebook has them after a cell."""
    namespace = {"__name__": "__main__"}
    exec(compile(_IMPORTS + code, "<cell>", "exec"), namespace)
    return namespace


class Seen:
    """Bytes and identities of all that variables hold. Equal means untouched."""

    def __init__(self, values):
        self.kept = {}
        self.state = [(name, self._of(values[name])) for name in sorted(values)]

    def __eq__(self, other):
        return self.state == other.state

    def _of(self, value):
        if type(value) in (int, float, str, bytes, bool, type(None)):
            return repr(value)
        if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            return repr(value)
        if id(value) in self.kept:
            return id(value)
        self.kept[id(value)] = value
        return id(value), type(value).__name__, *self._parts(value)

    def _parts(self, value):
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().clone().numpy().tobytes()
            where = str(value.device), value.data_ptr(), value._version, tuple(value.shape)
            grad = self._of(value.grad) if value.is_leaf else id(value.grad_fn)
            return (data, where, value.requires_grad, grad, self._named(vars(value)))
        if isinstance(value, numpy.ndarray):
            return value.shape, value.tobytes(), value.ctypes.data
        if isinstance(value, torch.Generator):
            return (value.get_state().numpy().tobytes(),)
        if isinstance(value, dict):
            return [(self._of(k), self._of(v)) for k, v in value.items()]
        if isinstance(value, (list, tuple, deque)):
            return [self._of(item) for item in value]
        if isinstance(value, types.FunctionType):
            cells = [self._of(c.cell_contents) for c in value.__closure__ or ()]
            kept = value.__defaults__, value.__kwdefaults__
            return cells, self._named(vars(value)), [self._of(k) for k in kept]
        if isinstance(value, type):
            if value.__module__ != "__main__":
                return ()
            return self._named(vars(value))
        if type(value).__module__ in ("random", "numpy.random.mtrand"):
            state = value.getstate() if hasattr(value, "getstate") else value.get_state()
            return (str(state),)
        return self._named(getattr(value, "__dict__", {}))

    def _named(self, held):
        return [(k, self._of(v)) for k, v in held.items() if "__" not in k]


def random_state():
    """All random states, as something that can be compared."""
    devices = [torch.default_generator, *torch.cuda.default_generators]
    states = [generator.get_state().tolist() for generator in devices]
    return states, random.getstate(), str(numpy.random.get_state())


def run(namespace, code, device=CPU):
    """Run code on copies, the way an engine does; gives the copied variables, still alive."""
    names = names_read(ast.parse(code))
    before, kept = Seen(namespace), Randomness()
    drawn = random_state()
    memory = allocated()
    world = CopiedVariables(namespace, names, device)
    held = swap.enter(device, namespace=world.globals) if device != CPU else None
    try:
        exec(compile(code, "<timed>", "exec"), world.globals)
    finally:
        if held is not None:
            swap.leave(held)
        kept.restore()
        result = dict(world.globals)
        world.close()
        after = Seen(namespace)
        assert after == before
        assert random_state() == drawn
    return result, memory


def runs_untouched(namespace, code, device=CPU):
    """Run code on copies and let go of them: memory must be back too."""
    result, memory = run(namespace, code, device)
    result.clear()
    del result
    gc.collect()
    assert allocated() == memory


def allocated():
    """Bytes on each device."""
    return [torch.cuda.memory_allocated(n) for n in range(2)]
