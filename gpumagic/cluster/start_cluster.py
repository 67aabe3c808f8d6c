"""Start the cluster of this notebook, of which there is one at a time."""

from gpumagic.cluster import launching
from gpumagic.cluster.engines import Engines
from gpumagic.cluster.gpu_cluster import GpuCluster
from gpumagic.display.progress_line import ProgressLine
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell

_current: GpuCluster | None = None


def cluster(
    where: str | int | None = None,
    *,
    slurm: str | None = None,
    partition: str | None = None,
    ssh: str | None = None,
    mpi: int | str | None = None,
    ip: str | None = None,
    python: str | None = None,
) -> GpuCluster:
    """Start an engine for each GPU, and have them join one process group.

    Parameters
    ----------
    where : str or int, optional
        Which GPUs of this machine, or how many: ``"0,1"``, ``"all"``, 2. Where there is no GPU each
        engine has a virtual one.
    slurm, partition : str, optional
        Nodes and GPUs on each, ``"2x8"``, from Slurm.
    ssh : str, optional
        Hosts, ``"host1,host2:4"``, with the number of GPUs after a colon.
    mpi : int, optional
        As many engines as `mpiexec` is to start.
    ip : str, optional
        The address of this machine at which the engines reach it; else the one that leads to them.
    python : str, optional
        Python on the hosts of `ssh`; else the path that it has here.

    Returns
    -------
    GpuCluster
        The ranks; it is also the one that ``%%ongpu @all`` runs on.

    Raises
    ------
    GpuError
        One is running already, or it cannot be started.
    """
    global _current
    if is_running():
        raise GpuError(f"a cluster runs already ({_current!r}); type %gpucluster stop")
    if slurm is not None:
        plan = launching.slurm(slurm, partition, ip)
    elif ssh is not None:
        plan = launching.ssh(ssh, ip, python)
    elif mpi is not None:
        plan = launching.mpi(str(mpi), ip)
    else:
        plan = launching.local(None if where is None else str(where))
    engines = Engines(plan, launching.virtual_memory(plan))
    try:
        with ProgressLine(shell()) as line:
            engines.start(line.update)
        _current = GpuCluster(engines)
    except BaseException:
        engines.stop()
        raise
    return _current


def current() -> GpuCluster:
    """The cluster of this notebook; raises `GpuError` where there is none."""
    if _current is None or _current.stopped:
        raise GpuError("no cluster runs; type %gpucluster start")
    return _current


def is_running() -> bool:
    """Whether there is one."""
    return _current is not None and not _current.stopped
