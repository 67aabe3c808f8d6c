"""Read GPM, the counters of Hopper and newer: what its multiprocessors did between two samples.

The sample before is kept, so that nothing has to sleep; samples live until NVML is shut down.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.nvml.library import Library

# Two samples closer than this tell little; further apart, they tell of a time long past.
_LEAST_S, _LONGEST_S = 0.1, 30.0
_SUCCESS = 0


@dataclass
class _Pair:
    """Two of NVML's samples of one GPU: the one before, and the one to be overwritten next."""

    before: Any
    spare: Any
    at: float | None = None
    metrics: dict[int, float] | None = None


class Gpm:
    """Metrics of GPUs by their number in ``nvmlGpmMetricId_t``."""

    def __init__(self, library: Library, clock: Callable[[], float]) -> None:
        self._library = library
        self._clock = clock
        self._pairs: dict[str, _Pair | None] = {}
        # No sample may be let go, or overwritten, while another thread compares it.
        self._lock = threading.RLock()

    def metrics(self, uuid: str, handle: Any, numbers: Sequence[int]) -> dict[int, float]:
        """What is known since the question before; empty at the first, or where unsupported."""
        with self._lock:
            if uuid not in self._pairs:
                self._pairs[uuid] = self._pair(handle)
            pair = self._pairs[uuid]
            return {} if pair is None else self._advance(pair, handle, numbers)

    def _advance(self, pair: _Pair, handle: Any, numbers: Sequence[int]) -> dict[int, float]:
        now = self._clock()
        if pair.at is not None and now - pair.at < _LEAST_S:
            return pair.metrics or {}
        if self._library.call("nvmlGpmSampleGet", handle, pair.spare) is None:
            pair.at = pair.metrics = None
            return {}
        recent = pair.at is not None and now - pair.at <= _LONGEST_S
        pair.metrics = self._compare(pair.before, pair.spare, numbers) if recent else {}
        pair.before, pair.spare, pair.at = pair.spare, pair.before, now
        return pair.metrics

    def keep(self, uuids: set[str]) -> None:
        """Let go of what belongs to other GPUs than these: of all before NVML is shut down."""
        with self._lock:
            for uuid in [uuid for uuid in self._pairs if uuid not in uuids]:
                pair = self._pairs.pop(uuid)
                for sample in (pair.before, pair.spare) if pair else ():
                    self._library.call("nvmlGpmSampleFree", sample)

    def _pair(self, handle: Any) -> _Pair | None:
        support = self._library.call("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return None
        before = self._library.call("nvmlGpmSampleAlloc")
        spare = self._library.call("nvmlGpmSampleAlloc")
        if before is None or spare is None:
            if before is not None:
                self._library.call("nvmlGpmSampleFree", before)
            return None
        return _Pair(before, spare)

    def _compare(self, before: Any, after: Any, numbers: Sequence[int]) -> dict[int, float]:
        module = self._library.module
        try:
            asked = module.c_nvmlGpmMetricsGet_t()
            asked.version = module.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(numbers)
            asked.sample1, asked.sample2 = before, after
            for n, number in enumerate(numbers):
                asked.metrics[n].metricId = number
            module.nvmlGpmMetricsGet(asked)
        except self._library.errors:
            return {}
        answers = [asked.metrics[n] for n in range(len(numbers))]
        return {
            int(answer.metricId): float(answer.value)
            for answer in answers
            if answer.nvmlReturn == _SUCCESS and math.isfinite(answer.value)
        }
