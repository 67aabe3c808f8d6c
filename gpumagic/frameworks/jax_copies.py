"""Count JAX's copies between devices."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def JaxCopies(devices: Any, tally: Any, strict: bool) -> AbstractContextManager[object]:
    return nullcontext()
