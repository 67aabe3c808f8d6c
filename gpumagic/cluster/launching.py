"""Plan and run a cluster's engines (processes). End them when the notebook's process ends.

An engine sets its rank and its GPU in its environment before it imports torch. Each process of a
cluster has a *mark* (an id) in its environment. A separate process (`watch`) ends these processes.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

import psutil

from gpumagic import device
from gpumagic.display.units import many
from gpumagic.errors import GpuError
from gpumagic.virtual import part_of_the_host

_LOOPBACK = "127.0.0.1"
_ENGINE = ["-m", "gpumagic.cluster.launching"]
# Timeouts in seconds. The timeouts are long, because engines are slow on a busy machine.
_ENGINE += ["--IPEngine.wait_for_url_file=60", "--IPEngine.timeout=30"]

# By launcher: the environment variables with the rank and the local rank. The local rank selects
# the GPU on the host. The variables of other launchers, such as torchrun, are ignored.
_LAUNCHER, _LOCAL = "GPUMAGIC_LAUNCHER", "GPUMAGIC_LOCAL_RANK"
_RANKS = {
    "local": ("RANK", ""),
    "ssh": ("RANK", _LOCAL),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID"),
}
_HERE = "GPUMAGIC_RANKS_HERE"  # the number of ranks on the host
FIRST = "GPUMAGIC_FIRST_ENGINE"
"""The environment variable with ipyparallel's id for rank 0. Rank n has this id plus n."""
MARK = "GPUMAGIC_CLUSTER"  # the environment variable with the mark of a cluster's processes


@dataclass(frozen=True)
class EngineSet:
    """Engines that are started, signalled and stopped together."""

    ranks: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # for ipyparallel's launcher

    @property
    def key(self) -> str:
        return f"ranks-{self.ranks[0]}"


@dataclass(frozen=True)
class Plan:
    """The engines to start, and their launcher."""

    launcher: str  # ipyparallel's name: "local", "ssh", "slurm"
    sets: tuple[EngineSet, ...]
    address: str = _LOOPBACK  # the controller and the `TCPStore` listen here
    description: str = ""  # "2 GPUs of this machine"
    directory: str | None = None  # a directory that all machines see

    @property
    def count(self) -> int:
        return sum(len(each.ranks) for each in self.sets)

    @property
    def local(self) -> bool:
        return self.address == _LOOPBACK

    @property
    def environment(self) -> dict[str, str]:
        found = {"WORLD_SIZE": str(self.count), "MASTER_ADDR": self.address}
        found[_LAUNCHER] = self.launcher
        if self.local:  # gloo and NCCL must listen on loopback only
            name = "lo0" if sys.platform == "darwin" else "lo"
            found |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
        return found

    @property
    def virtual_memory(self) -> int:
        """Bytes of each engine's virtual GPU."""
        here = (gpu.memory_total for gpu in device.here() if gpu.virtual)
        return next(here, None) or part_of_the_host(self.count)


def _command(python: str = sys.executable) -> dict[str, Any]:
    return {"engine_cmd": [python, *_ENGINE]}


def local(asked: str) -> Plan:
    """Plan an engine for each requested GPU, or virtual GPU if the machine has no GPU."""
    gpus = [gpu for gpu in device.here(memory=False) if gpu.kind == "cuda" and not gpu.virtual]
    most, kind = (len(gpus), "GPU") if gpus else (64, "virtual GPU")
    if asked.isdecimal() and not 0 < int(asked) <= most:
        there = f"there can be 1 to {many(most, 'engine')}, one for each {kind}"
        raise GpuError(f"{asked} engines: {there}; type %gpucluster start")
    names = _names(asked, gpus) if gpus else [""] * _virtual(asked)
    # ROCR_VISIBLE_DEVICES accepts UUIDs; HIP_VISIBLE_DEVICES does not.
    shows = "ROCR_VISIBLE_DEVICES" if device.torch_build().hip else "CUDA_VISIBLE_DEVICES"
    sets = tuple(
        EngineSet((rank,), {shows: name, "RANK": str(rank), _HERE: str(len(names))}, _command())
        for rank, name in enumerate(names)
    )
    return Plan("local", sets, description=f"{many(len(names), kind)} of this machine")


def _names(asked: str, gpus: list[device.Device]) -> list[str]:
    wanted = gpus[: int(asked)] if asked.isdecimal() else device.resolve(asked, gpus, cpu=False)
    return [gpu.uuid or str(gpu.ordinal) for gpu in wanted]


def _virtual(asked: str) -> int:
    """Return the number of virtual GPUs: for example, 2 for ``2``, ``0,1`` or ``all``."""
    names = [part.strip() for part in asked.split(",")]
    if asked != "all" and not all(map(str.isdecimal, names)):
        raise GpuError(f"{asked} is no number, and no GPU is here; type %gpucluster start 2")
    return 2 if asked == "all" else int(asked) if asked.isdecimal() else len(names)


def ssh(hosts: str, ip: str | None, python: str | None) -> Plan:
    """Plan one engine for each host; ``host2:4`` requests four engines on host2."""
    sets: list[EngineSet] = []
    names = []
    for part in hosts.split(","):
        host, _, number = part.strip().partition(":")
        if not host or (number and not (number.isdecimal() and int(number))):
            raise GpuError(f"--ssh {hosts}: hosts are needed; type --ssh host1,host2:4")
        names.append(host.rpartition("@")[2])
        if names[-1] in names[:-1]:
            raise GpuError(f"--ssh {hosts}: {host} is given twice; type --ssh {host}:NUMBER")
        there = python or sys.executable
        options = {"engines": {host: 1}, "remote_python": there, **_command(there)}
        for local_rank in range(int(number or 1)):
            environment = {"RANK": str(len(sets)), _LOCAL: str(local_rank), _HERE: number or "1"}
            sets.append(EngineSet((len(sets),), environment, options))
    said = f"{many(len(sets), 'engine')} on {hosts}"
    return Plan("ssh", tuple(sets), ip or _address(names), said)


def slurm(size: str, partition: str | None, ip: str | None) -> Plan:
    """Plan NODESxGPUS engines as one Slurm job."""
    nodes, _, each = size.partition("x")
    if not (nodes.isdecimal() and each.isdecimal() and int(nodes) * int(each)):
        raise GpuError(f"--slurm {size}: nodes x GPUs is needed; type --slurm 2x8")
    count = int(nodes) * int(each)
    asked = [f"--nodes={nodes}", f"--ntasks={count}", f"--gpus-per-node={each}"]
    asked += [f"--partition={partition}"] if partition else []
    options = {"options": "\n".join(f"#SBATCH {line}" for line in asked), **_command()}
    one = EngineSet(tuple(range(count)), {_HERE: each}, options)
    description = f"{many(count, 'engine')} started by Slurm"
    return Plan("slurm", (one,), ip or _address([""]), description, os.path.expanduser("~"))


def _address(hosts: Sequence[str]) -> str:
    """Return the address at which hosts reach this machine; loopback if all hosts are local."""
    if all(host in ("localhost", _LOOPBACK, "::1") for host in hosts):
        return _LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a UDP socket sends nothing; the call only looks up the route to the host.
            probe.connect((hosts[0] or socket.getfqdn(), 9))
            found = str(probe.getsockname()[0])
        except OSError as error:
            raise GpuError(f"{hosts[0] or 'this machine'} has no address ({error})") from None
    if hosts[0] or not found.startswith("127."):
        return found
    from jupyter_client.localinterfaces import public_ips  # engines do not need this module

    # Debian maps a machine's own name to 127.0.1.1, which other machines cannot reach.
    return next(iter(public_ips()), found)


async def stop_elsewhere(cluster: Any) -> None:
    """End a cluster's engines, and remove ipyparallel's profile directories on SSH hosts."""
    sets = cluster.engines.values()
    hosts = {each.location: each for one in sets for each in getattr(one, "launchers", {}).values()}
    await cluster.stop_cluster()
    for each in hosts.values():
        each.ssh_sender.check_output(f"rm -rf {quote(each.remote_profile_dir)}")


def take_place(environment: MutableMapping[str, str]) -> None:
    """Set the rank, the number of CPU threads and the only GPU in an engine's environment."""
    rank, local = _RANKS[environment[_LAUNCHER]]
    environment["RANK"], environment["LOCAL_RANK"] = environment[rank], "0"  # one GPU is visible
    share = (os.cpu_count() or 1) // int(environment[_HERE])
    environment.setdefault("OMP_NUM_THREADS", str(max(1, share)))  # torchrun would set 1
    environment.pop("LOCAL_WORLD_SIZE", None)
    if local in environment:
        known = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        number = int(environment[local])
        environment["CUDA_VISIBLE_DEVICES"] = known[number % len(known)] if known else str(number)


def main() -> None:
    """Run this process as an engine until the controller ends the engine."""
    take_place(os.environ)
    number = int(os.environ.pop(FIRST, "0")) + int(os.environ["RANK"])
    sys.argv.append(f"--IPEngine.id={number}")
    # Import torch now, so that the first cell need not wait for the import. Import tqdm before
    # IPython, so that tqdm draws text, because a rank cannot show widgets.
    import torch  # noqa: F401
    import tqdm.auto  # noqa: F401
    from ipyparallel.engine import app
    from ipyparallel.engine.kernel import IPythonParallelKernel as Kernel

    # An interrupt outside a cell could cut a message, so remove the hooks that enable interrupts.
    Kernel.pre_handler_hook = Kernel.post_handler_hook = lambda self: None
    app.main()


_LOOK_S = 0.3  # seconds between checks whether the notebook's process runs
_GONE_S = 1.0  # maximum seconds to wait until killed processes are gone


def start_watch(mark: str, directory: str) -> subprocess.Popen[bytes]:
    """Start a process that ends the cluster after this process has ended."""
    command = [sys.executable, "-m", __name__, "--watch", str(os.getpid()), mark, directory]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def marked(mark: str) -> list[psutil.Process]:
    """Return this host's processes whose mark begins with `mark`, except this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            its = process.environ().get(MARK)
            if its is not None and its.startswith(mark) and process.pid != os.getpid():
                found.append(process)
    return found


def end(mark: str) -> None:
    until = time.monotonic() + _GONE_S
    # A killed process may remain as a zombie. `marked` omits zombies, so the loop ends.
    while (left := marked(mark)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_GONE_S / 50)


def watch(pid: str, mark: str, directory: str) -> None:
    """Wait until the parent process has ended, then end the cluster."""
    while os.getppid() == int(pid):
        time.sleep(_LOOK_S)
    for _ in range(10):  # repeat, because processes may start in the meantime
        end(mark)
        time.sleep(_LOOK_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(*sys.argv[2:])
    else:
        main()
