"""Have `gpumagic.watch` count the copies of other frameworks than torch too."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpumagic import faults
from gpumagic.device import here
from gpumagic.frameworks.known import imported
from gpumagic.ledger.counts import Tally
from gpumagic.ledger.watch import BESIDE
from gpumagic.ledger.watch import watch as watch


@contextmanager
def _counting(tally: Tally, strict: bool) -> Iterator[None]:
    """Count what the frameworks do that this process has imported."""
    with ExitStack() as stack:
        others = imported()
        tally.virtual |= bool(others) and any(gpu.virtual for gpu in here(memory=False))
        for framework in others:
            with faults.kept(f"starting the ledger of {framework.name}"):
                stack.enter_context(framework.count(tally, strict))
        yield


BESIDE.append(_counting)
