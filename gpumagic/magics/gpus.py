"""Run the magics for GPUs, GPU memory, virtual GPUs and the cluster."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from IPython.display import display

from gpumagic import device, faults
from gpumagic.display.units import both, many, some
from gpumagic.errors import GpuError
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.usercode.files import user_namespace
from gpumagic.usercode.values import torch_here


def gpus(where: str | None = None) -> Snapshot:
    """Return a Snapshot of the machine, or of the GPUs that `where` names."""
    if torch_here() is not None:  # torch may know the GPUs' ordinals
        from gpumagic.placement.torch_devices import tell_cuda_order

        tell_cuda_order()
    if not where:
        return collect.snapshot()
    wanted = {each.uuid for each in device.resolve(where, device.here(), cpu=False)}
    if None in wanted:
        raise GpuError(f"{where} has no UUID; type %gpus for all GPUs")
    snapshot = collect.snapshot()
    return replace(
        snapshot,
        gpus=tuple(gpu for gpu in snapshot.gpus if gpu.uuid in wanted),
        processes=tuple(each for each in snapshot.processes if each.uuid in wanted),
    )


def doctor() -> None:
    """Show the checks of `%gpus --doctor`, and gpumagic's internal errors in this kernel."""
    from gpumagic.gputable.gpu_table import DoctorTable
    from gpumagic.telemetry.doctor import Check, Doctor

    checks, failed = Doctor().checks(), faults.all_kept()
    if (death := device.cuda_state.death()) is not None:
        checks.append(Check("CUDA", False, death.said, death.cure))
    for fault in failed:
        checks.append(Check("gpumagic", False, str(fault), "report it, with the traceback below"))
    if not failed:
        checks.append(Check("gpumagic", True, "no internal errors in this kernel"))
    display(DoctorTable(checks))
    for fault in failed:
        print(f"{fault}\n{fault.traceback}")


def virtual_on(
    number: str, memory: str | None, *, force: bool = False, quiet: bool = False
) -> None:
    from gpumagic import virtual
    from gpumagic.frameworks.known import make_virtual

    if not number.isdecimal():
        raise GpuError(f"--virtual {number}: neither a number nor off; type %gpus --virtual 2")
    before = virtual.enabled()
    virtual.enable(int(number), memory, force=force)
    if not before and not quiet:
        print("virtual GPUs compute on the CPU: results and memory are as on a GPU, times are not")
    for line in make_virtual(len(device.here(memory=False))):  # errors of started frameworks
        print(line)


def virtual_off(cells: Any, *, force: bool = False) -> None:
    """Move variables back, and turn virtual GPUs off if they hold no tensor, or if `force`."""
    from gpumagic import virtual
    from gpumagic.frameworks.public import bring_home, with_outputs

    if not virtual.enabled():
        print("virtual GPUs were not on")
        return
    home, made = bring_home(cells.shell.user_ns, created=force, whole=not force)
    if home.moved:
        print(home if force else home.back)
    results: list[str] = []
    if force and torch_here() is not None:
        from gpumagic.frameworks.torch_framework import bring_results

        results = bring_results(with_outputs(cells.shell.user_ns))
    alive = virtual.live_tensors()
    if alive and not force:
        raise GpuError(_why_not_off(made))
    ended = f"; %ongpu {cells.standing.where} has ended" if cells.standing else ""
    cells.end_all()
    virtual.disable()
    lost = f"; moved without their graphs: {some(results)}" if results else ""
    if alive:
        lost += f"; unusable until virtual GPUs are on again: {many(alive, 'tensor')}"
    print(f"virtual GPUs are off{ended}{lost}")


def _why_not_off(made: Iterable[str]) -> str:
    """Return why virtual GPUs stay on: the variables `made`, or other tensors, are on them."""
    if made:
        force_it = "to move everything to the CPU first, type %gpus --virtual off --force"
        return f"--virtual off would leave no GPU for {some(made)}; {force_it}"
    from gpumagic.memory.holders_by_name import memory

    names = some(row.path for row in memory().holders)
    cure = "type %gpufree (if a graph holds them: x = x.detach()), or %gpus --virtual off --force"
    return f"--virtual off would destroy the tensors of {names}; {cure}"


def move_back(namespace: dict[str, Any]) -> str:
    """Move variables back to where they were before cells moved them; return the line to print."""
    from gpumagic.frameworks.public import bring_home
    from gpumagic.ledger.attribute import uncounted

    with uncounted():
        home, there = bring_home(namespace)
    done = home.back if home.moved else "nothing to move back"
    for moved in home.moved:
        # If a variable was moved back from a GPU but is still on that GPU, a part of it stayed.
        if (gpus := there.pop(moved.name, set())).intersection(moved.sources):
            there[f"part of {moved.name}"] = gpus
    return f"{done}; still on a GPU: {some(there)}" if there else done


def memory_of(asked: Sequence[str]) -> tuple[Any, Any]:
    """Return the object that `%gpumem` shows, and the full memory report if one was made."""
    from gpumagic.frameworks.known import started

    if torch_here() is None and not started():
        print("Neither torch nor JAX is in use here: this notebook has nothing on a GPU.")
        return gpus(), None
    from gpumagic.memory.holders_by_name import memory, names_and_gpus
    from gpumagic.memory.memory_tree import tree

    namespace = user_namespace()
    names, named = names_and_gpus(asked, namespace)
    if len(asked) == len(names) == 1:
        return tree(names[0], namespace), None
    report = memory(*names)
    whole = None if names else report
    if names and not any(device.holders for device in report.of(named).devices):
        on = f"on {both(named)}" if named else "on a GPU"
        raise GpuError(f"{both(names)} hold{'s' * (len(names) == 1)} nothing {on}")
    if not report.devices and not all(gpu.virtual for gpu in gpus().gpus):
        print("torch can use none of these GPUs; %gpus --doctor says why.")
        return gpus(), whole
    return report.of(named), whole


# Verbs that need an argument, each with an example.
_NEEDED = {"restart": "restart 1", "pull": "pull net", "restore": "restore DIR"}


def drive_cluster(shell: Any, asked: Namespace) -> None:
    from gpumagic.cluster import gpu_cluster

    verb, what = asked.verb or "status", asked.what
    if verb in ("pull", "restart", "checkpoint"):
        what = [*filter(None, ",".join(what).split(","))]
    _check_arguments(verb, what)
    if verb == "start":
        ways = ("slurm", "partition", "ssh", "ip", "python")
        gpu_cluster.cluster(next(iter(what), None), **{name: getattr(asked, name) for name in ways})
    ranks = gpu_cluster.current()
    if verb == "restart":
        ranks.restart(*map(int, what))
        lost = "the new rank has none of the variables of %%ongpu @all cells"
        print(f"{lost}; run those cells again, then %gpucluster restore DIR")
    elif verb == "pull":
        found = ranks.pull(*what)
        shell.user_ns.update(found)
        ranks.pulled.update(found)
        print(f"{some(what)}: {'each ' * (len(found) > 1)}a list with an item for each rank")
    elif verb == "checkpoint":
        print(f"{some(what)} saved to {ranks.checkpoint(*what, to=asked.to)}")
    elif verb == "restore":
        loaded = ranks.restore(what[0])
        print(f"{some(loaded.variables)} loaded from {loaded.path}")
    elif verb == "stop":
        ranks.stop()
        print("the cluster has ended")
    if verb in ("start", "restart", "status"):
        display(ranks.status())


def _check_arguments(verb: str, what: Sequence[str]) -> None:
    many_allowed = verb in ("restart", "pull", "checkpoint")
    most = 0 if verb in ("status", "stop") else len(what) if many_allowed else 1
    if len(what) > most:
        raise GpuError(f"{verb} takes {most or 'no'} argument; leave out {what[most]}")
    if verb in _NEEDED and not what:
        raise GpuError(f"{verb} needs an argument; type %gpucluster {_NEEDED[verb]}")
    if verb == "restart" and not all(word.isdecimal() for word in what):
        raise GpuError(f"{' '.join(what)} is not a rank; type %gpucluster restart 1")
