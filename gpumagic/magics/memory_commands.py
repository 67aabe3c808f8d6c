"""Define the magics about memory: `%gpumem`, `%gpufree`, `%%gpufit`."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from gpumagic.errors import GpuError, meant, torch_needed
from gpumagic.magics.arguments import answers_help, in_one_line, parse
from gpumagic.magics.commands import GpuMagics


class Memories:
    """Makes the reports of one shell, and keeps the last one for `--since`."""

    def __init__(self) -> None:
        self.last: Any = None

    def changes(self, asked: Sequence[str]) -> Any:
        """What changed since the last report; that report itself where it is the first one."""
        if asked:
            raise GpuError(f"--since is about all GPUs; leave out {asked[0]}")
        before, now = self.last, self.held(())
        if before is None or self.last is None:
            print("There was no %gpumem before this one; what changes from now on, --since says.")
            return now
        from gpumagic.memory.memory_changes import changes

        return changes(before, now)

    def held(self, asked: Sequence[str]) -> Any:
        """A report of all GPUs, of those named, or of some variables; of one name what is in it.

        A Snapshot of who holds the GPUs where nothing is in use that could hold them, or what is
        can use none of them.
        """
        from gpumagic.frameworks.known import started
        from gpumagic.magics.gpus import gpus

        if "torch" not in sys.modules and not started():
            print("Neither torch nor JAX is in use here: this notebook has nothing on a GPU.")
            return gpus()
        from gpumagic.memory import ask
        from gpumagic.memory.memory_tree import first_name, tree
        from gpumagic.usercode.files import user_namespace

        variables = user_namespace()
        names = [word for word in asked if first_name(word) in variables]
        others = [word for word in asked if word not in names]
        ordinals = {str(device) for word in others for device in _gpus(word, variables)}
        if len(asked) == len(names) == 1:
            return tree(names[0], variables)
        report = ask.memory(*names)
        if not names:
            self.last = report
        if not report.devices and (snapshot := gpus()).gpus:
            print("torch can use none of these GPUs; %gpus --doctor says why.")
            return snapshot
        if not ordinals:
            return report
        return replace(report, devices=tuple(d for d in report.devices if d.device in ordinals))


def _gpus(word: str, variables: Iterable[str]) -> list[Any]:
    """The GPUs that a word names; a GpuError says that it names neither one nor a variable."""
    from gpumagic.device import resolve

    try:
        found = resolve(word, _here(memory=word == "free"))
    except GpuError as error:
        if not word.isidentifier():
            raise
        question = meant(word, variables)
        why = question or f"and it is no GPU: {error}"
        raise GpuError(f"there is no variable {word!r}; {why}".rstrip()) from None
    if any(device.kind == "cpu" for device in found):
        raise GpuError(f"{word} is not a GPU; type %gpumem 0, or %gpumem for all of them")
    return found


def _here(memory: bool) -> list[Any]:
    """The GPUs of this process; those that torch can use, where it is imported."""
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
        self.once = others.once
        self.others = others
        self.memories = Memories()

    @no_var_expand
    @line_magic
    @answers_help
    def gpumem(self, line: str) -> Any:
        """Show who holds the memory of the GPUs: by name, the most first, to the last byte.

        Variables with all that is in them, modules, optimizers, what autograd saved for a backward
        that has not come, outputs, exceptions, …: each piece of memory counts once, by the first
        way to it, and the other ways are named beside it. Arrays of JAX, TensorFlow, CuPy and
        others have rows, too, and torch need not be there.

        Usage::

            %gpumem                    all GPUs; the value is a gpumagic.MemoryReport
            %gpumem 1                  one of them, by any of its names
            %gpumem net                what one variable holds: a module layer by layer, with its
                                       gradients, optimizer's state, and what autograd saved
            %gpumem data["x"] batch    what these variables hold
            %gpumem --since            what grew, came and went since the last %gpumem
            %gpumem --record on        also say which line made it, from now on: real GPUs then
                                       need about 2 µs more for each allocation; virtual ones
                                       always know

        Examples::

            In [1]: %gpumem
            In [2]: report = %gpumem 0
            In [3]: report.holders[0].path, report.holders[0].nbytes

        In a program: `gpumagic.memory()`.
        """
        args, memories = parse("%gpumem", line), self.memories
        if args.record and (others := [*args.what, *["--since"] * args.since]):
            raise UsageError(f"%gpumem: --record stands on a line of its own, without {others[0]}")
        if args.record:
            with torch_needed("%gpumem"), in_one_line("%gpumem"):
                from gpumagic.memory.made_in import record

                return print(record(args.record == "on"))
        with in_one_line("%gpumem"):
            answer = memories.changes if args.since else memories.held
            return self.once.show(answer(args.what))

    @no_var_expand
    @line_magic
    @answers_help
    def gpufree(self, line: str) -> None:
        """Give back the GPU memory that no variable holds, and say in a line how much it was.

        An exception keeps the frames that it passed with all their tensors, and IPython keeps what
        cells gave. Those that hold GPU memory are let go: tracebacks stay on the page, `%debug`
        then has nothing to look into. Garbage is collected and torch's cache emptied. What a
        variable holds stays, also where it is `Out[5]` too.

        Usage::

            %gpufree                   exceptions' frames, outputs (Out, _, __, ___, _5)
            %gpufree batch net         these variables too
            %gpufree --grads           the gradients of the notebook's modules too

        Examples::

            In [7]: %gpufree
            freed 3.2 GiB (the exception of In [6]: 2.1 GiB on cuda:0, Out[4]: 1.1 GiB on cuda:0)

        In a program, also in the `except` block of an error: `gpumagic.free_memory()`.
        """
        asked = parse("%gpufree", line)
        with torch_needed("%gpufree"), in_one_line("%gpufree"):
            from gpumagic.memory.free import free_memory

            display(free_memory(*asked.names, grads=asked.grads))

    @no_var_expand
    @cell_magic
    @answers_help
    def gpufit(self, line: str, cell: str) -> None:
        """Find the largest value of a variable, such as a batch, with which this cell fits a GPU.

        Dry runs foretell what each value needs, which takes no GPU time; then a run on copies
        confirms it, and leads up or down where it measures something else. Your variables, the
        random state and the memory are afterwards what they were before; files that the cell
        writes are written, unless --dry is typed.

        Usage::

            %%gpufit [WHERE] batch=1..4096 [options]

            WHERE            0  cuda:1  free …  as of %%ongpu; none: the current GPU
            batch=1..4096    the variable, and its values: 8..512:8, pow2:1..4096, 16,24,32
            --margin 5       percent of what is free that stay free
            --target 4096    say in how many steps of accumulated gradients that batch is worked
                             through
            --dry            foretell only
            --on 'H100 80GB, RTX 4090, 24GiB'
                             the largest on cards that are not here, in the place of WHERE
            -o NAME          keep the result in that variable, a gpumagic.Fit
            --quiet          show nothing

        Examples::

            %%gpufit 0 batch=1..4096 --target 4096
            X, y = torch.randn(batch, 784), torch.randint(10, (batch,))
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            optimizer.step()

        Whether it trains decides: without a backward pass a larger batch fits. Ctrl-C keeps what is
        known. In a program: `gpumagic.fit(step, 0, batch=range(1, 4097))`.
        """
        from gpumagic.magics.gputime import fit_cell

        asked = parse("%%gpufit", line)
        with in_one_line("%%gpufit"):
            self.others.cells.set_aside()
            with self.others.watched.paused():
                fit_cell(self.shell, asked, f"%%gpufit {line}", cell)
