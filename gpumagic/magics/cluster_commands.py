"""Offer `%gpucluster`: it parses its line, calls the library, and shows what that returns."""

from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.display import display

from gpumagic.display.units import some
from gpumagic.errors import GpuError, cluster_needed, torch_needed
from gpumagic.magics.arguments import answers_help, in_one_line, parse
from gpumagic.magics.commands import GpuMagics
from gpumagic.magics.memory_commands import MemoryMagics

_NEW = (
    "the new rank starts with the notebook's variables, the others keep theirs; "
    "to make them equal, restore a checkpoint or broadcast"
)


@magics_class
class ClusterMagics(Magics):
    """`%gpucluster`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell

    @no_var_expand
    @line_magic
    @answers_help
    def gpucluster(self, line: str) -> Any:
        """Start an engine for each GPU, here or on other machines, for the cells of `%%ongpu @all`.

        Each engine is a process that sees one GPU (a virtual one if there is no other). All join
        one torch.distributed group. They end with the notebook's kernel.

        Usage::

            %gpucluster start                 all GPUs of this machine
            %gpucluster start 2               two GPUs; virtual ones if there is none
            %gpucluster start 0,1             these GPUs
            %gpucluster start --slurm 2x8 [--partition P]
                                              nodes and GPUs on each, as a job of Slurm
            %gpucluster start --ssh host1,host2:4 [--python PATH]
                                              a GPU on each host, or four; the path of Python there
                                              if it differs from this one
            %gpucluster start --mpi 4         by mpiexec
            %gpucluster start … --ip ADDRESS  this machine's address for the others
            %gpucluster                       the table of ranks: host, GPU, memory, state
            %gpucluster restart 1             replace rank 1 by a new engine
            %gpucluster pull loss net         variables of the ranks: lists of their values, by rank
            %gpucluster push net              send the notebook's variable with the next cell, and
                                              replace the ranks'
            %gpucluster checkpoint net,opt --to DIR [--every 10min]
                                              save them now, or after cells
            %gpucluster checkpoint off        stop saving after cells
            %gpucluster restore DIR           load the last one, also into another number of ranks
            %gpucluster stop

        Examples::

            In [1]: %gpucluster start 2
            In [2]: %%ongpu @all
               ...: loss = train(net)
               ...: loss
            Out[2]: [0.31, 0.29]
            In [3]: %%ongpu @all --split prompts --gather images
               ...: images = pipe(prompts).images

        In a program: `with gpumagic.cluster(2) as ranks:`.
        """
        asked = parse("%gpucluster", line)
        with in_one_line("%gpucluster"), torch_needed("%gpucluster"), cluster_needed("%gpucluster"):
            from gpumagic.cluster import gpu_cluster

            if asked.verb == "start":
                return display(_start(asked))
            _check(asked)
            ranks = gpu_cluster.current()
            if asked.verb == "status":
                return display(ranks.status())
            if asked.verb == "restart":
                ranks.restart(*map(int, asked.what))
                print(_NEW)
                return display(ranks.status())
            if asked.verb == "push":
                ranks.push(*asked.what)
                return print(f"the next cell that reads {some(asked.what)} gets the notebook's")
            if asked.verb == "pull":
                found = ranks.pull(*asked.what)
                self._shell.user_ns.update(found)
                ranks.keep(*found)
                return print(f"{some(asked.what)}: {'each ' * (len(found) > 1)}a list by rank")
            if asked.verb == "checkpoint":
                return print(_checkpoint(asked, ranks))
            if asked.verb == "restore":
                return print(ranks.restore(asked.what[0]).loaded())
            ranks.stop()
            return print("the cluster has ended")


_HOW = ("slurm", "partition", "ssh", "mpi", "ip", "python")


def _start(asked: Namespace) -> Any:
    from gpumagic.cluster import gpu_cluster

    if len(asked.what) > 1:
        raise GpuError(f"start {' '.join(asked.what)}: type start 2, or start 0,1")
    if asked.partition and not asked.slurm:
        raise GpuError(f"--partition is for Slurm; type --slurm 2x8 --partition {asked.partition}")
    if asked.python and not asked.ssh:
        raise GpuError(f"--python is for SSH; type --ssh host1,host2 --python {asked.python}")
    where = asked.what[0] if asked.what else None
    given = [f"--{name}" for name in ("slurm", "ssh", "mpi") if getattr(asked, name)]
    if len(given) + bool(where) > 1:
        raise GpuError(f"start {' '.join(filter(None, [where, *given]))}: type one of them")
    how = {name: getattr(asked, name) for name in _HOW}
    return gpu_cluster.cluster(where, **how).status()


def _checkpoint(asked: Namespace, ranks: Any) -> str:
    if asked.what == ["off"]:
        ranks.checkpoints.off()
        return "no more checkpoints are saved"
    names = [name for word in asked.what for name in word.split(",") if name]
    made = ranks.checkpoint(*names, to=asked.to, every=asked.every)
    return str(made or f"after a cell of @all, every {asked.every}: {some(names)} to {asked.to}")


def _check(asked: Namespace) -> None:
    """Refuse what the verb does not take."""
    if asked.verb in ("status", "stop") and asked.what:
        raise UsageError(f"%gpucluster {asked.verb}: it takes no argument")
    if asked.verb == "restart" and not (asked.what and all(w.isdecimal() for w in asked.what)):
        raise UsageError("%gpucluster restart: which rank? type %gpucluster restart 1")
    if asked.verb in ("pull", "push") and not asked.what:
        verb = asked.verb
        raise UsageError(f"%gpucluster {verb}: which variable? type %gpucluster {verb} net")
    if asked.verb == "restore" and len(asked.what) != 1:
        raise UsageError("%gpucluster restore: from where? type %gpucluster restore DIR")


OFFERED: tuple[type[Magics], ...] = (GpuMagics, MemoryMagics, ClusterMagics)
"""All magics of gpumagic."""
