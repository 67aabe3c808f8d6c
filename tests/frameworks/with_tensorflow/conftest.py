"""TensorFlow on two virtual GPUs, in a process that has no torch: make test-frameworks."""

import linecache
from dataclasses import dataclass
from itertools import count

import pytest

from gpumagic import device
from gpumagic.device import Device
from gpumagic.ledger.entry import Tally

GPUS = [Device("cuda", k, f"GPU-virtual-{k}", virtual=True) for k in range(2)]
_numbers = count(1)


def compiled(code):
    """A cell's code, as IPython compiles it."""
    file = f"<ipython-input-{next(_numbers)}-0>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    return compile(code, file, "exec")


@dataclass
class Ran:
    """What became of a cell."""

    ledger: object
    names: dict
    error: BaseException | None

    @property
    def moved(self):
        """Bytes by where from and where to."""
        found = {}
        for entry in self.ledger.copies:
            ends = entry.source, entry.destination
            found[ends] = found.get(ends, 0) + entry.nbytes
        return found

    @property
    def implicit(self):
        """What the cell did in silence; what a library reads by itself is none of it."""
        return [e for e in self.ledger if e.implicit and not e.within]


@pytest.fixture(scope="session")
def framework():
    """TensorFlow of this process, whose virtual GPUs are logical devices 1 and 2 of its CPU."""
    import tensorflow  # noqa: F401

    from gpumagic.frameworks.known import imported

    made = next(one for one in imported() if one.name == "TensorFlow")
    made.make_virtual(len(GPUS))
    device.set_virtual(lambda: GPUS)
    yield made
    device.set_virtual(None)


@pytest.fixture
def names(framework):
    """What the cells see, made anew: `c` on the CPU, `a` and `b` on GPU 0 and 1, 32 bytes each."""
    import keras
    import numpy as np
    import tensorflow as tf

    found = {"tf": tf, "np": np, "keras": keras, "n": np.ones(8, np.float32)}
    for name, where in {"c": "/CPU:0", "a": "/GPU:0", "b": "/GPU:1"}.items():
        with tf.device(where):
            found[name] = tf.ones(8)
            found[f"v_{name}"] = tf.Variable(tf.ones(8))
    return found


@pytest.fixture
def counted(framework, names):
    """Run a cell while its copies are counted, as `%%ongpu` does; on GPU 1 by default."""

    def run(code, where=GPUS[1], strict=False):
        tally, error = Tally(virtual=True), None
        with framework.place(where), framework.count(tally, strict):
            try:
                exec(compiled(code), names)
            except Exception as raised:  # noqa: BLE001  the cell's own
                error = raised
        return Ran(tally.ledger(), names, error)

    return run
