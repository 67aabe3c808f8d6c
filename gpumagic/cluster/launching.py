"""Plan how ipyparallel's launchers start the engines: here, by SSH, Slurm or MPI; start one.

An engine is ``python -m gpumagic.cluster.launching``, with ipyparallel's options of an engine. It
sets its rank and its GPU before anything reads them.
"""

import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from gpumagic import device
from gpumagic.display.units import many
from gpumagic.errors import GpuError
from gpumagic.virtual import part_of_the_host

LOOPBACK = "127.0.0.1"
_MODULE = ["-m", "gpumagic.cluster.launching"]
# Seconds an engine waits for the controller's file and answer, on a busy machine.
_PATIENT = ["--IPEngine.wait_for_url_file=60", "--IPEngine.timeout=30"]

# The launchers' variables for the rank, and for the rank on a machine.
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL = "GPUMAGIC_LOCAL_RANK"
"""The number of the engine on its machine, where nobody else numbers them."""
_LOCALS = (LOCAL, "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
ONE_GPU = "GPUMAGIC_ONE_GPU"
"""Set where the engine is to see one GPU of its machine: that of its number there."""

FIRST = "GPUMAGIC_FIRST_ENGINE"
"""The number that the engine of rank 0 of this start has, or would have, for ipyparallel."""


@dataclass(frozen=True)
class EngineSet:
    """Engines that are started, signalled and stopped together."""

    ranks: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of ipyparallel's launcher

    @property
    def key(self) -> str:
        """Its name for ipyparallel."""
        return f"ranks-{self.ranks[0]}"


@dataclass(frozen=True)
class Plan:
    """The engines to start, and their launcher."""

    launcher: str  # ipyparallel's name: "local", "ssh", "slurm", "mpi"
    sets: tuple[EngineSet, ...]
    address: str = LOOPBACK  # where the controller and the store listen
    description: str = ""  # "on 2 GPUs of this machine"
    directory: str | None = None  # a directory that all machines see

    @property
    def count(self) -> int:
        return sum(len(each.ranks) for each in self.sets)

    @property
    def local(self) -> bool:
        return self.address == LOOPBACK


def _command(python: str) -> dict[str, Any]:
    return {"engine_cmd": [python, *_MODULE, *_PATIENT]}


def local(where: str | None) -> Plan:
    """Plan an engine for each named GPU; without GPUs, the given number, or two."""
    gpus = [gpu for gpu in device.here(memory=False) if gpu.kind == "cuda" and not gpu.virtual]
    if gpus:
        count = _count(where, gpus)
        wanted = gpus[:count] if count else device.resolve(where or "all")
        names = [gpu.uuid or str(gpu.ordinal) for gpu in wanted]
    else:
        names = [""] * _virtual_count(where)
    command = _command(sys.executable)
    # HIP's variable takes no UUIDs.
    shows = "ROCR_VISIBLE_DEVICES" if device.torch_build().hip else "CUDA_VISIBLE_DEVICES"
    sets = tuple(
        EngineSet((rank,), {shows: name, "RANK": str(rank)}, command)
        for rank, name in enumerate(names)
    )
    what = many(len(names), "GPU" if gpus else "virtual GPU")
    return Plan("local", sets, description=f"{what} of this machine")


def _count(where: str | None, gpus: Sequence[device.Device]) -> int:
    """Return the number of engines in `%gpucluster start 2`; 0 for a list such as `0,1`."""
    if where is None or not where.isdecimal():
        return 0
    if not 0 < int(where) <= len(gpus):
        there = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        raise GpuError(f"{where} engines: this machine has {there}; type %gpucluster start")
    return int(where)


_MOST_VIRTUAL = 64


def _virtual_count(where: str | None) -> int:
    if where is None or where == "all":
        return 2
    if where.isdecimal():
        if not 0 < int(where) <= _MOST_VIRTUAL:
            most = f"1 to {_MOST_VIRTUAL} virtual GPUs are possible"
            raise GpuError(f"{where} engines: {most}; type %gpucluster start 2")
        return int(where)
    parts = where.split(",")
    if all(part.strip().isdecimal() for part in parts):
        return len(parts)
    raise GpuError(f"{where}: this machine has no GPU; type %gpucluster start 2 for virtual ones")


def ssh(hosts: str, ip: str | None, python: str | None) -> Plan:
    """Plan an engine on each host, or the number after its colon, with a GPU each."""
    sets: list[EngineSet] = []
    for part in hosts.split(","):
        host, _, number = part.strip().partition(":")
        if not host or (number and not number.isdecimal()):
            raise GpuError(f"--ssh {hosts}: hosts are needed; type --ssh host1,host2:4")
        for local_rank in range(int(number or 1)):
            environment = {"RANK": str(len(sets)), ONE_GPU: "1", LOCAL: str(local_rank)}
            command = _command(python or sys.executable)
            options: dict[str, Any] = {"engines": {host: 1}, **command}
            options["remote_python"] = python or sys.executable
            sets.append(EngineSet((len(sets),), environment, options))
    names = [part.strip().partition(":")[0].rpartition("@")[2] for part in hosts.split(",")]
    return Plan("ssh", tuple(sets), ip or _address(names), f"{len(sets)} engines on {hosts}")


def slurm(size: str, partition: str | None, ip: str | None) -> Plan:
    """Plan NODESxGPUS engines as one job of Slurm."""
    nodes, _, each = size.partition("x")
    if not (nodes.isdecimal() and each.isdecimal() and int(nodes) * int(each)):
        raise GpuError(f"--slurm {size}: nodes x GPUs is needed; type --slurm 2x8")
    count = int(nodes) * int(each)
    asked = [f"--nodes={nodes}", f"--ntasks={count}", f"--gpus-per-node={each}"]
    asked += [f"--partition={partition}"] if partition else []
    options = {"options": "\n".join(f"#SBATCH {line}" for line in asked)}
    one = EngineSet(tuple(range(count)), {ONE_GPU: "1"}, {**options, **_command(sys.executable)})
    description = f"{count} engines of Slurm"
    return Plan("slurm", (one,), ip or _address([""]), description, os.path.expanduser("~"))


def mpi(number: str, ip: str | None) -> Plan:
    """Plan engines that `mpiexec` starts."""
    if not number.isdecimal() or not int(number):
        raise GpuError(f"--mpi {number}: a number is needed; type --mpi 4")
    one = EngineSet(tuple(range(int(number))), {ONE_GPU: "1"}, _command(sys.executable))
    return Plan("mpi", (one,), ip or LOOPBACK, f"{number} engines of MPI")


async def stop_elsewhere(cluster: Any) -> None:
    """End the launchers' engines, and remove our files on other machines."""
    sets = cluster.engines.values()
    hosts = {each.location: each for one in sets for each in getattr(one, "launchers", {}).values()}
    await cluster.stop_cluster()
    for each in hosts.values():
        each.ssh_sender.check_output(f"rm -rf {quote(each.remote_profile_dir)}")


def _address(hosts: Sequence[str]) -> str:
    """Return this machine's address for others; loopback if all ranks are here."""
    if all(host in ("localhost", LOOPBACK, "::1") for host in hosts):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only looks up the route.
            probe.connect((hosts[0] or socket.getfqdn(), 9))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise GpuError(f"{hosts[0] or 'this machine'} has no address ({error})") from None


def connections(address: str) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL to the loopback, if all ranks are here."""
    if address != LOOPBACK:
        return {}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def threads(count: int) -> dict[str, str]:
    """Return each engine's share of the processors; `torchrun` would give it one thread."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(count, 1)))}


def virtual_memory(plan: Plan) -> int:
    """Return the bytes of an engine's virtual GPU: this process's, or its share."""
    virtual = [gpu for gpu in device.here() if gpu.virtual]
    return (virtual and virtual[0].memory_total) or part_of_the_host(plan.count)


def _first(names: tuple[str, ...], environment: MutableMapping[str, str], default: str) -> str:
    return next((environment[name] for name in names if name in environment), default)


def take_place(environment: MutableMapping[str, str]) -> None:
    """Set the rank for `torch.distributed`, and leave one GPU visible."""
    environment.setdefault("RANK", _first(_RANKS, environment, "0"))
    local = int(_first(_LOCALS, environment, "0"))
    # It sees one GPU, the first.
    environment["LOCAL_RANK"] = "0"
    if environment.pop(ONE_GPU, ""):
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        known = [each for each in visible.split(",") if each]
        environment["CUDA_VISIBLE_DEVICES"] = known[local % len(known)] if known else str(local)


def main() -> None:
    """Run as an engine until the controller ends it."""
    take_place(os.environ)
    # ipyparallel would use mpi4py, only for the rank, which is already known.
    sys.argv[:] = [each for each in sys.argv if each != "--mpi"]
    number = int(os.environ.pop(FIRST, "0")) + int(os.environ["RANK"])
    sys.argv.append(f"--IPEngine.id={number}")
    # Import while the controller answers, so that the first cell need not wait. Before IPython is
    # loaded, tqdm chooses text: a rank has no notebook for widgets.
    import torch  # noqa: F401
    import tqdm.auto  # noqa: F401
    from ipyparallel.engine import app
    from ipyparallel.engine.kernel import IPythonParallelKernel as Kernel

    import gpumagic.cluster.engine  # noqa: F401

    # Only cells handle interrupts: none must cut off an order or an answer.
    Kernel.pre_handler_hook = Kernel.post_handler_hook = lambda self: None
    app.main()


if __name__ == "__main__":
    main()
