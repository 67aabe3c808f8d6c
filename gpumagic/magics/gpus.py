"""Collect what `%gpus` shows: a Snapshot, the doctor's checks; switch virtual GPUs."""

import sys
from dataclasses import replace
from typing import Any

from IPython.display import display

from gpumagic import device, faults
from gpumagic.display.units import many, size, some
from gpumagic.errors import GpuError
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.usercode.values import torch_here


def gpus(where: str | None = None) -> Snapshot:
    """Return a Snapshot of the machine, or of the GPUs that `where` names."""
    if torch_here() is not None:  # the order of ordinals is known to torch once CUDA is initialized
        from gpumagic.placement.torch_devices import tell_cuda_order

        tell_cuda_order()
    if not where:
        return collect.snapshot()
    found = device.resolve(where, device.here(), cpu=False)
    if any(each.kind != "cuda" or each.uuid is None for each in found):
        raise GpuError(f"{where} has no UUID; type %gpus 0, or %gpus for all of them")
    wanted = {each.uuid for each in found}
    snapshot = collect.snapshot()
    return replace(
        snapshot,
        gpus=tuple(gpu for gpu in snapshot.gpus if gpu.uuid in wanted),
        processes=tuple(each for each in snapshot.processes if each.uuid in wanted),
    )


def doctor() -> None:
    """Show the doctor's checks, and the faults of gpumagic itself in this kernel."""
    from gpumagic.gputable.gpu_table import DoctorTable
    from gpumagic.telemetry.doctor import Check, Doctor

    checks, failed = Doctor().checks(), faults.all_kept()
    if (death := device.cuda_state.death()) is not None:
        checks.append(Check("CUDA", False, death.said, death.cure))
    for fault in failed:
        checks.append(Check("gpumagic", False, str(fault), "its traceback is below; report it"))
    if not failed:
        checks.append(Check("gpumagic", True, "nothing of its own has failed in this kernel"))
    display(DoctorTable(checks))
    for fault in failed:
        print(f"{fault}\n{fault.traceback}")


def virtual_on(
    number: str,
    memory: str | None = None,
    *,
    force: bool = False,
    quiet: bool = False,
    asserts: bool = False,
) -> None:
    """Turn `number` virtual GPUs on."""
    from gpumagic import virtual
    from gpumagic.frameworks.known import too_late
    from gpumagic.virtual import LARGEST

    if not number.isdecimal():
        raise GpuError(f"--virtual {number}: a number or off is needed; type %gpus --virtual 2")
    before = virtual.enabled()
    virtual.enable(int(number), memory, force=force, asserts=asserts)
    each = device.here()[0].memory_total or 0
    if not before and not quiet:
        print("virtual GPUs compute on the CPU: results and memory are as on a GPU, times are not")
    if memory is None and not before and each < LARGEST:
        print(f"{size(each)} each, as this machine has no more; --memory 4GiB sets another size")
    for line in too_late():
        print(line)


def virtual_off(cells: Any, *, force: bool = False) -> None:
    """Move back what cells moved, turn virtual GPUs off, and say so.

    GpuError where tensors that were made there would be lost; not with `force`.
    """
    from gpumagic import virtual
    from gpumagic.frameworks.public import bring_home

    if not virtual.enabled():
        print("there were no virtual GPUs")
        return
    if checks := sys.modules.get("gpumagic.virtual.checks"):
        checks.revive()
    home, made = bring_home(cells.shell.user_ns)
    if home.moved:
        print(home.back)
    alive = virtual.live_tensors()
    if alive and not force:
        held = some(made) if made else f"{many(alive, 'tensor')} of no variable"
        cure = "bring them to the CPU" if made else "%gpufree releases what IPython keeps"
        raise GpuError(
            f"--virtual off would lose what was made there: {held}; {cure}, or type "
            "%gpus --virtual off --force"
        )
    ended = f"; %ongpu {cells.standing.where} has ended" if cells.standing else ""
    cells.end_all()
    virtual.disable()
    lost = f"; {many(alive, 'tensor')} that lived there can no longer be used" if alive else ""
    print(f"virtual GPUs are off{ended}{lost}")
