"""Offer the magics about memory: each parses its line, calls the library, shows what it returns."""

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from gpumagic.magics.arguments import answers_help, in_one_line, parse
from gpumagic.magics.commands import GpuMagics
from gpumagic.magics.gpumem import Memories


@magics_class
class MemoryMagics(Magics):
    """`%gpumem`."""

    def __init__(self, shell: Any, others: GpuMagics) -> None:
        super().__init__(shell)
        self.once = others.once
        self.memories = Memories()

    @no_var_expand
    @line_magic
    @answers_help
    def gpumem(self, line: str) -> Any:
        """Show who holds the memory of the GPUs: by name, the most first, to the last byte.

        Variables with all that is in them, modules, optimizers, what autograd saved for a backward
        that has not come, outputs, exceptions, …: each piece of memory counts once, by the first
        way to it, and the other ways are named beside it.

        Usage::

            %gpumem                    all GPUs; the value is a gpumagic.MemoryReport
            %gpumem 1                  one of them, by any of its names
            %gpumem net                what one variable holds
            %gpumem --since            what grew, came and went since the last %gpumem

        Examples::

            In [1]: %gpumem
            In [2]: report = %gpumem 0
            In [3]: report.holders[0].path, report.holders[0].nbytes

        In a program: `gpumagic.memory()`.
        """
        args, memories = parse("%gpumem", line), self.memories
        with in_one_line("%gpumem"):
            answer = memories.changes if args.since else memories.held
            return self.once.show(answer(args.what))


OFFERED: tuple[type[Magics], ...] = (GpuMagics, MemoryMagics)
"""All magics of gpumagic."""
