"""Begin a dry run: measure what this process has, follow the code in a copy of it, and answer.

Guarantees: one answer, also where the copy had to be killed; nothing of this process is changed.
"""

import importlib
from collections.abc import Callable

from gpumagic.device import Device
from gpumagic.dryrun import engine_after_fork
from gpumagic.dryrun.follow_code import Subject, follow
from gpumagic.dryrun.forked import Overdue, run_forked
from gpumagic.dryrun.peaks import measure
from gpumagic.dryrun.result import DryRun, Unknown
from gpumagic.errors import GpuError
from gpumagic.placement.scope import in_force, placement
from gpumagic.placement.torch_devices import as_torch
from gpumagic.virtual import switch

LIMIT_S = 60.0
_GRACE_S = 5.0  # past the limit, to end by itself with what it knows by then
_following = False


def dry(subject: Subject, waiting: Callable[[float], object] | None = None) -> DryRun:
    """Follow the code of `subject` in a copy of this process, or raise `GpuError`.

    `waiting` is called with the seconds so far, once a second after the first two.
    """
    if _following:
        raise GpuError("a dry run is under way, and follows no other")
    importlib.import_module("torch._dynamo")  # else each copy would load it anew
    device = subject.device
    before = measure(None if device is None else as_torch(device))
    outer, flags = placement(), engine_after_fork.flags()

    def work() -> DryRun:
        global _following
        _following = True
        if before.real:
            switch.stand_in(before.real)
        engine_after_fork.restore(flags)
        if outer is not None:
            in_force.set(outer)  # a fork leaves it
        return follow(subject, before)

    try:
        result: DryRun = run_forked(work, subject.limit + _GRACE_S, waiting)
    except Overdue:
        return _nothing_known(device, subject.limit)
    return result


def _nothing_known(device: Device | None, limit: float) -> DryRun:
    reason = f"the time limit of {limit:g} s, in code that does not let itself be interrupted"
    return DryRun(
        device="" if device is None else str(device),
        unknown=(Unknown(None, reason, True),),
        seconds=limit + _GRACE_S,
        virtual=device is not None and device.virtual,
    )
