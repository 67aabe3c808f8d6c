"""Define `%gpucluster`: it parses its line, calls the library, and shows what that returns."""

from argparse import Namespace
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import display

from gpumagic.errors import GpuError, cluster_needed, torch_needed
from gpumagic.magics.commands import magic

_NEW = (
    "what cells of %%ongpu @all had made is lost on the new rank, the others keep theirs; "
    "run those cells again, or type %gpucluster restore DIR"
)


@magics_class
class ClusterMagics(Magics):
    """`%gpucluster`."""

    @magic(line_magic)
    def gpucluster(self, asked: Namespace) -> Any:
        """Start an engine for each GPU, here or on other machines, for the cells of `%%ongpu @all`.

        Each engine is a process that sees one GPU, or a virtual one if there is none. All engines
        join one torch.distributed group. They end with the notebook's kernel.

        Usage::

            %gpucluster start [options]      all GPUs of this machine
            %gpucluster start 2              two; virtual ones if there is no GPU
            %gpucluster start 0,1            these
            %gpucluster                      show the ranks, their hosts, and what they do
            %gpucluster restart 1            replace the engine of rank 1
            %gpucluster pull loss net        set variables to the lists of their values by rank
            %gpucluster checkpoint net,opt --to DIR
            %gpucluster restore DIR          load the last one, also with another number of ranks
            %gpucluster stop

            {options}

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
        with torch_needed("%gpucluster"), cluster_needed("%gpucluster"):
            from gpumagic.cluster import gpu_cluster
        from gpumagic.display.units import some

        verb = asked.verb or "status"
        if verb == "start":
            return display(_start(asked))
        _check(verb, asked.what)
        ranks = gpu_cluster.current()
        if verb == "status":
            return display(ranks.status())
        if verb == "restart":
            ranks.restart(*map(int, asked.what))
            print(_NEW)
            return display(ranks.status())
        if verb == "pull":
            found = ranks.pull(*asked.what)
            shell: Any = self.shell
            shell.user_ns.update(found)
            ranks.keep(*found)
            return print(f"{some(asked.what)}: {'each ' * (len(found) > 1)}a list by rank")
        if verb == "checkpoint":
            names = [name for word in asked.what for name in word.split(",") if name]
            return print(f"{some(names)} saved to {ranks.checkpoint(*names, to=asked.to)}")
        if verb == "restore":
            loaded = ranks.restore(asked.what[0])
            return print(f"{some(loaded.variables)} loaded from {loaded.path}")
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


def _check(verb: str, what: list[str]) -> None:
    """Refuse arguments that the verb does not take."""
    if verb in ("status", "stop") and what:
        raise GpuError(f"{verb} takes no argument; leave out {what[0]}")
    if verb == "restart" and not (what and all(word.isdecimal() for word in what)):
        raise GpuError("restart: which rank? type %gpucluster restart 1")
    if verb == "pull" and not what:
        raise GpuError("pull: which variable? type %gpucluster pull net")
    if verb == "restore" and len(what) != 1:
        raise GpuError("restore: from where? type %gpucluster restore DIR")
