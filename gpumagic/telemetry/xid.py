"""Explain Xid numbers in words, and remember which of them came lately.

The meanings and cures are after NVIDIA's "XID Errors", https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpumagic.telemetry.snapshot import GpuSample, Problem

TOLD_FOR_S = 600.0
"""How long an error stays among the problems."""

_PROGRAM = "find the fault in the program: run it under compute-sanitizer, or with " + (
    "CUDA_LAUNCH_BLOCKING=1"
)
_RESET = "stop what runs on it and reset it (sudo nvidia-smi --gpu-reset -i {index})"
_REPLACE = f"{_RESET}; if it comes again, the GPU has to be replaced"
_GSP = f"{_RESET}, or restart the machine; if it comes again, update the driver"

_MEANINGS = {
    13: ("a program made an illegal memory access or instruction", _PROGRAM),
    31: ("a program read or wrote memory that is not its own (page fault)", _PROGRAM),
    43: ("a program's work on the GPU was stopped after a fault of its own", _PROGRAM),
    45: ("work was cleaned up after a program had ended or failed", "see the error before it"),
    48: ("an ECC error in memory that could not be corrected", _REPLACE),
    63: ("a faulty row of memory is to be replaced by a spare one", _RESET),
    64: ("a faulty row of memory could not be replaced by a spare one", _REPLACE),
    74: ("an error on an NVLink", f"{_RESET}; if it comes again, check bridge and cables"),
    79: ("the GPU has fallen off the bus", "restart the machine; check power, heat and seating"),
    92: ("very many ECC errors that were corrected", _REPLACE),
    94: ("an ECC error that struck only the program that used that memory", "restart the program"),
    95: ("an ECC error that may have struck every program on the GPU", _RESET),
    119: ("the GPU's own processor (GSP) did not answer the driver in time", _GSP),
    120: ("the GPU's own processor (GSP) reported an error", _GSP),
}
_UNKNOWN = ("a critical error of the driver", "look the number up in NVIDIA's list of Xid errors")


class XidLog:
    """Errors with the seconds of Unix time at which they were seen."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def add(self, found: Iterable[tuple[str, int]], time: float) -> None:
        """UUID and number of each error that came since the last time."""
        for uuid, number in found:
            self._last[uuid] = (number, time)
            self._seen[uuid, number] = time

    def last(self, uuid: str) -> tuple[int | None, float | None]:
        """The last error of a GPU since watching began, and when."""
        return self._last.get(uuid, (None, None))

    def problems(self, gpus: Iterable[GpuSample], time: float) -> list[Problem]:
        """One for each number that a GPU reported in the last ten minutes."""
        # A clock that was set back must not keep them for ever.
        recent = {key: seen for key, seen in self._seen.items() if 0 <= time - seen <= TOLD_FOR_S}
        self._seen = recent
        known = {gpu.uuid: gpu for gpu in gpus}
        return [_problem(known[uuid], number) for uuid, number in recent if uuid in known]


def _problem(gpu: GpuSample, number: int) -> Problem:
    meaning, cure = _MEANINGS.get(number, _UNKNOWN)
    who = f"{gpu.name or 'a GPU'} (NVML {gpu.index})"
    cause = f"{who} reported Xid {number}: {meaning}"
    return Problem("xid", cause, cure.format(index=gpu.index), gpu.uuid)
