"""Start an engine: set its rank and its GPU before anything reads them, then serve.

Run as ``python -m gpumagic.cluster.start_engine``, with ipyparallel's options of an engine.
"""

import os
import sys
from collections.abc import MutableMapping

# How those who start many processes at once number them: all of them, and on one machine.
_RANK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL = "GPUMAGIC_LOCAL_RANK"
"""The number of the engine on its machine, where nobody else numbers them."""
_LOCAL = (LOCAL, "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
ONE_GPU = "GPUMAGIC_ONE_GPU"
"""Set where the engine is to see one GPU of its machine: that of its number there."""


def _first(names: tuple[str, ...], environment: MutableMapping[str, str], default: str) -> str:
    return next((environment[name] for name in names if name in environment), default)


def take_place(environment: MutableMapping[str, str]) -> None:
    """Write the rank as `torch.distributed` reads it, and leave one GPU visible."""
    environment.setdefault("RANK", _first(_RANK, environment, "0"))
    local = int(_first(_LOCAL, environment, "0"))
    # The only GPU that it sees is its first.
    environment["LOCAL_RANK"] = "0"
    if environment.pop(ONE_GPU, ""):
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        known = [each for each in visible.split(",") if each]
        environment["CUDA_VISIBLE_DEVICES"] = known[local % len(known)] if known else str(local)


def main() -> None:
    """Be an engine until the controller says otherwise."""
    take_place(os.environ)
    # ipyparallel would have its engines use mpi4py, for the rank that is known by now.
    sys.argv[:] = [each for each in sys.argv if each != "--mpi"]
    # Now, while the controller answers: the first cell is not to wait for it. Before IPython is
    # there, tqdm chooses lines of text: a rank has no notebook for its widgets.
    import torch  # noqa: F401
    import tqdm.auto  # noqa: F401
    from ipyparallel.engine import app
    from ipyparallel.engine.kernel import IPythonParallelKernel as Kernel

    import gpumagic.cluster.engine  # noqa: F401

    # An interrupt is for a cell, which sees to it: it is not to cut off an order or an answer.
    Kernel.pre_handler_hook = Kernel.post_handler_hook = lambda self: None
    app.main()


if __name__ == "__main__":
    main()
