"""JAX on two virtual GPUs, for the tests of a process of its own: with_jax/ and libraries/."""

import linecache
from dataclasses import dataclass
from itertools import count

import pytest

from gpumagic import device
from gpumagic.device import Device
from gpumagic.ledger.entry import Tally

GPUS = [Device("cuda", k, f"GPU-virtual-{k}", virtual=True) for k in range(2)]
_numbers = count(1)


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
        return [e for e in self.ledger if e.implicit]


@pytest.fixture(scope="session")
def framework():
    """JAX of this process, whose virtual GPUs are devices 1 and 2 of its CPU."""
    import jax  # noqa: F401

    from gpumagic.frameworks.known import imported

    made = next(one for one in imported() if one.name == "JAX")
    made.make_virtual(len(GPUS))
    device.set_virtual(lambda: GPUS)
    yield made
    device.set_virtual(None)


@pytest.fixture
def names(framework):
    """What the cells see, made anew: 32 bytes each, on GPU 0 and 1, committed and not; NumPy's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    gpu = jax.devices("gpu")
    ones = np.ones(8, np.float32)
    found = {"jax": jax, "jnp": jnp, "np": np, "gpu": gpu, "n": ones}
    found |= {"a": jax.device_put(ones, gpu[0]), "b": jax.device_put(ones, gpu[1])}
    for k, name in enumerate(("loose_a", "loose_b")):
        with jax.default_device(gpu[k]):
            found[name] = jnp.arange(8.0)
    mesh = jax.sharding.Mesh(np.array(gpu), ("x",))
    for name, axes in {"halves": ("x",), "both": ()}.items():
        found[name] = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return found


@pytest.fixture
def counted(framework, names):
    """Run a cell while its copies are counted, as `%%ongpu` does; on the CPU by default."""

    def run(code, where=device.CPU, strict=False):
        file = f"<ipython-input-{next(_numbers)}-0>"
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        tally, error = Tally(virtual=True), None
        with framework.count(tally, strict), framework.place(where):
            try:
                exec(compile(code, file, "exec"), names)
            except Exception as raised:  # noqa: BLE001  the cell's own
                error = raised
        return Ran(tally.ledger(), names, error)

    return run
