"""Report a fault of the monitor: keep it for the doctor, and log it once."""

from __future__ import annotations

import logging
from functools import lru_cache

from gpumagic import faults

_log = logging.getLogger(__name__)


def report_once(doing: str, error: Exception) -> None:
    """Keep a fault that came while `doing` something; what comes at each tick is logged once."""
    faults.keep(doing, error)
    _warn(f"gpumagic failed while {doing}: {error!r}")


@lru_cache(64)
def _warn(text: str) -> None:
    _log.warning(text)
