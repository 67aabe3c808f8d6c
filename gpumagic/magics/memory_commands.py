"""Define the magics about memory: `%gpumem`, `%gpufree`, `%%gpufit`."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display

from gpumagic.errors import GpuError, meant, torch_needed
from gpumagic.magics.commands import GpuMagics, magic


class Memories:
    """Makes the reports of one shell, and stores the last one for `--since`."""

    def __init__(self) -> None:
        self.last: Any = None

    def changes(self, asked: Sequence[str]) -> Any:
        """Return what changed since the last report; the report itself if it is the first one."""
        if asked:
            raise GpuError(f"--since is about all GPUs; leave out {asked[0]}")
        before, now = self.last, self.held(())
        if before is None or self.last is None:
            print("This is the first %gpumem; --since will show what changes from now on.")
            return now
        from gpumagic.memory.memory_changes import changes

        return changes(before, now)

    def held(self, asked: Sequence[str]) -> Any:
        """Return a report of all GPUs, of those named, of variables, or a tree of one variable.

        A Snapshot of the GPUs if no framework here uses them.
        """
        from gpumagic.frameworks.known import started
        from gpumagic.magics.gpus import gpus

        if "torch" not in sys.modules and not started():
            print("Neither torch nor JAX is in use here: this notebook has nothing on a GPU.")
            return gpus()
        from gpumagic.memory.holders_by_name import memory
        from gpumagic.memory.memory_tree import first_name, tree
        from gpumagic.usercode.files import user_namespace

        variables = user_namespace()
        names = [word for word in asked if first_name(word) in variables]
        others = [word for word in asked if word not in names]
        ordinals = {str(device) for word in others for device in _gpus(word, variables)}
        if len(asked) == len(names) == 1:
            return tree(names[0], variables)
        report = memory(*names)
        if not names:
            self.last = report
        if not report.devices and (snapshot := gpus()).gpus:
            print("torch can use none of these GPUs; %gpus --doctor says why.")
            return snapshot
        if not ordinals:
            return report
        return replace(report, devices=tuple(d for d in report.devices if d.device in ordinals))


def _gpus(word: str, variables: Iterable[str]) -> list[Any]:
    """Return the GPUs that a word names; GpuError if it names neither a GPU nor a variable."""
    from gpumagic.device import is_where, resolve

    try:
        return resolve(word, _here(memory=word == "free"), cpu=False)
    except GpuError as error:
        if is_where(word) or not word.isidentifier():
            raise
        question = meant(word, variables)
        why = question or f"and it is no GPU: {error}"
        raise GpuError(f"there is no variable {word!r}; {why}".rstrip()) from None


def _here(memory: bool) -> list[Any]:
    """Return the GPUs of this process, or the ones torch can use, if it is imported."""
    if "torch" in sys.modules:
        from gpumagic.placement.torch_devices import devices

        return devices(memory=memory)
    from gpumagic.device import here

    return here(memory=memory)


@magics_class
class MemoryMagics(Magics):
    """`%gpumem`, `%gpufree` and `%%gpufit`."""

    def __init__(self, shell: Any, others: GpuMagics) -> None:
        super().__init__(shell)
        self.others = others
        self.memories = Memories()

    @magic(line_magic)
    def gpumem(self, asked: Namespace) -> Any:
        """Show who holds the memory of the GPUs, by name, the largest first, to the last byte.

        Holders are variables with all that they contain, modules, optimizers, tensors that
        autograd saved for a backward pass, outputs, exceptions and others. Memory with several
        holders counts once, for the first one; the others are named in its row. Arrays of JAX,
        TensorFlow, CuPy and others have rows too. torch is not needed.

        Usage::

            %gpumem                  all GPUs; the value is a gpumagic.MemoryReport
            %gpumem 1                one of them, by any of its names
            %gpumem net              what one variable holds: a module layer by layer, with
                                     gradients, optimizer state, and what autograd saved
            %gpumem net.encoder      what a part of it holds
            %gpumem data["x"] batch  what these variables hold

            {options}

        To record lines takes about 2 µs for each allocation on a real GPU. Virtual GPUs always
        record them.

        Examples::

            In [1]: %gpumem
            In [2]: report = %gpumem 0
            In [3]: report.holders[0].path, report.holders[0].nbytes

        In a program: `gpumagic.memory()`.
        """
        if asked.record and (others := [*asked.what, *["--since"] * asked.since]):
            raise GpuError(f"--record is for a line of its own; leave out {others[0]}")
        if asked.record:
            with torch_needed("%gpumem --record"):
                from gpumagic.memory.allocator import record

            return print(record(asked.record == "on"))
        answer = self.memories.changes if asked.since else self.memories.held
        return self.others.once.show(answer(asked.what))

    @magic(line_magic)
    def gpufree(self, asked: Namespace) -> None:
        """Free the GPU memory that no variable holds, and say in a line how much it was.

        An exception keeps the frames of its traceback with their tensors, and IPython keeps the
        values of cells. If they hold GPU memory, they are released. Tracebacks stay on the page,
        but `%debug` has no frames afterwards. Garbage is collected and torch's cache is emptied.
        The values of variables stay, also if they are `Out[5]` too.

        Usage::

            %gpufree                 exceptions' frames, outputs (Out, _, __, ___, _5)
            %gpufree 1               only if they hold memory of this GPU
            %gpufree batch net       these variables too

            {options}

        Examples::

            In [7]: %gpufree
            freed 3.2 GiB (the exception of In [6]: 2.1 GiB on cuda:0, Out[4]: 1.1 GiB on cuda:0)

        In a program, also in the `except` block of an error: `gpumagic.free_memory()`.
        """
        with torch_needed("%gpufree"):
            from gpumagic.device import is_where
            from gpumagic.memory.free import free_memory
        from gpumagic.usercode.files import user_namespace

        variables = user_namespace()
        gpus = [word for word in asked.names if word not in variables and is_where(word)]
        on = {str(device) for word in gpus for device in _gpus(word, variables)}
        names = [word for word in asked.names if word not in gpus]
        display(free_memory(*names, grads=asked.grads, on=on))

    @magic(cell_magic)
    def gpufit(self, asked: Namespace, cell: str) -> None:
        """Find the largest value of a variable, such as a batch, with which this cell fits a GPU.

        Dry runs predict the memory for each value, which takes no GPU time. A run on copies then
        confirms it; where it measures something else, the search continues. Afterwards your
        variables, the random state and the memory are as before. Files that the cell writes are
        written, unless --dry is given.

        Usage::

            %%gpufit [WHERE] batch=1..4096 [options]

            WHERE                    as for %%ongpu; by default the current GPU
            batch=1..4096            the variable and its values: 8..512:8, pow2:1..4096, 16,24,32

            {options}

        Examples::

            %%gpufit 0 batch=1..4096
            X, y = torch.randn(batch, 784), torch.randint(10, (batch,))
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            optimizer.step()

        A cell with a backward pass is fitted for training; without one, a larger batch fits.
        Ctrl-C keeps what is known. In a program: `gpumagic.fit(step, 0, batch=range(1, 4097))`.
        """
        from gpumagic.magics.gputime import fit_cell

        with self.others.timing():
            fit_cell(self.shell, asked, f"%%gpufit {asked.line}", cell)
