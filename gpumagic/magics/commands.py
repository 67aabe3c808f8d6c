"""Define the magics: each parses its line, calls the library, and shows the result."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)

from gpumagic.errors import GpuError
from gpumagic.magics.hooks import Once
from gpumagic.magics.ongpu import CellHooks, RunningCell, Watched
from gpumagic.magics.options import options


def magic(kind: Callable[[Any], Any], *, parsed: bool = True) -> Callable[[Any], Any]:
    """Make a method a magic; `kind` is IPython's `line_magic`, `cell_magic` or `line_cell_magic`.

    If `parsed`, the method gets the parsed line, and its GpuError becomes an error of one line. A
    line of only `-h`, `--help` or `help` prints what `%magic?` shows. ``{options}`` in the method's
    docstring is replaced by the options.
    """

    def decorate(method: Any) -> Any:
        name = method.__name__
        method.__doc__ = _with_options(method.__doc__, name)

        @wraps(method)
        def run(self: Any, line: str, *cell: Any, **scope: Any) -> Any:
            if line.strip() in ("-h", "--help", "help"):
                return print(inspect.getdoc(method))
            if not parsed:
                return method(self, line, *cell, **scope)
            from gpumagic.magics.arguments import in_one_line, parse

            typed = f"%%{name}" if cell else f"%{name}"
            asked = parse(typed, line)
            asked.line = line
            with in_one_line(typed):
                return method(self, asked, *cell, **scope)

        return no_var_expand(kind(run))

    return decorate


def _with_options(text: str, magic: str) -> str:
    """Return a docstring with the options of its magic in place of ``{options}``."""
    before, _, after = text.partition("{options}")
    indent = before[before.rindex("\n") :]
    return (
        before
        + indent.join(f"{', '.join([*o.flags[:-1], o.usage]):24} {o.does}" for o in options(magic))
        + after
    )


@magics_class
class GpuMagics(Magics):
    """`%gpus`, `%ongpu`, `%gpuwatch` and `%%gputime`."""

    def __init__(self, shell: Any, cells: CellHooks, watched: Watched, once: Once) -> None:
        super().__init__(shell)
        self.cells, self.watched, self.once = cells, watched, once

    @magic(line_magic)
    def gpus(self, asked: Namespace) -> Any:
        """Show the GPUs: who holds their memory, how busy, how hot, and their power.

        Usage::

            %gpus                    all GPUs of this machine
            %gpus 1                  one of them, by any of its names

            {options}

        The value is a gpumagic.telemetry.Snapshot. Virtual GPUs are for trying things out without
        a GPU. Devices of tensors, errors and memory limits are real; numbers and speed are those
        of the CPU.

        Examples::

            In [1]: %gpus --virtual 2
            In [2]: snapshot = %gpus
            In [3]: snapshot.gpus[0].memory_used
        """
        from gpumagic.magics import gpus

        if asked.virtual is not None and asked.virtual.lower() == "off":
            return gpus.virtual_off(self.cells, force=asked.force)
        if asked.virtual is not None:
            gpus.virtual_on(asked.virtual, asked.memory, force=asked.force, asserts=asked.asserts)
            return self.once.show(gpus.gpus())
        if asked.memory or asked.force or asked.asserts:
            raise GpuError("--memory, --force and --asserts need --virtual; type %gpus --virtual 2")
        if asked.doctor:
            return gpus.doctor()
        if asked.live:
            return self._live(asked.where)
        return self.once.show(gpus.gpus(asked.where), processes=asked.processes)

    def _live(self, where: str | None) -> Any:
        """Show the monitor; in a terminal, which has none, it prints the table."""
        from gpumagic.widget import monitor

        if where:
            raise GpuError(f"{where}: the monitor shows all GPUs; type %gpus --live")
        made = monitor()
        return None if made is None else self.once.show(made)

    @magic(line_cell_magic, parsed=False)
    def ongpu(self, line: str, cell: str | None = None) -> Any:
        """Run this cell, or all cells from now on, on one device, or this cell on several.

        New tensors and modules are created on the device, a bare "cuda" means that GPU, and
        batches of a DataLoader are copied to it. Tensors, modules and optimizers that the cell
        reads are moved to it first, and stay the same objects. An explicit `device=` wins. A line
        under the cell says what was moved, the time, and the peak memory.

        Usage::

            %%ongpu WHERE [options]
            %%ongpu 0,1 --split x [--gather y] [--reduce loss=mean] [--chunk 4]
            %%ongpu --dry-run --on 'H100 80GB, RTX 4090, 24GiB'

            WHERE                    1  cuda:1  gpu:1  /gpu:1  cuda  xpu:1  cpu  mps  GPU-4f2a…
            free                     the GPU with the most free memory
            1?                       GPU 1, or the CPU if there is none, and say so
            0,1  all                 several GPUs, each with a thread, share what --split names

            {options}

            %ongpu 1                 run all cells there from now on, this one included
            %ongpu off               stop that
            %ongpu home              move back what any cell moved to a device
            %ongpu                   say where cells run

        Examples::

            %%ongpu 1
            net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
            loss = F.cross_entropy(net(X), y)      # X and y are moved to cuda:1

            %%ongpu free
            %%time
            train(net, loader)

            %%ongpu 1 --check
            loss = F.cross_entropy(net(X), y)      # an error that names the bad label
            %%ongpu 1 --profile trace.json         # which line takes the time
            train(net, loader)

        A copy or wait is implicit if the code names no device: .item(), print, a mask, an index on
        the CPU. Peak memory is counted from the start of the cell, as after
        `torch.cuda.reset_peak_memory_stats()`. gpumagic.last_report() returns the last report,
        also after --quiet. In a program: `with gpumagic.on(1):`.
        """
        return self._stand(line) if cell is None else self._run(line, cell)

    def _stand(self, line: str) -> None:
        from gpumagic.magics.arguments import in_one_line
        from gpumagic.magics.ongpu_arguments import placing_request

        cells, words = self.cells, line.partition("#")[0].lower().split()
        holds = f"cells run on {cells.standing_on}; %ongpu off ends it"
        if not words:
            off = "cells run where their code says; %ongpu 1 runs all of them on GPU 1 from then on"
            print(holds if cells.standing else off)
        elif words == ["off"]:
            held = cells.standing is not None
            cells.end_standing()
            print(f"cells no longer run on {cells.standing_on}" if held else "%ongpu was not on")
        elif words == ["home"]:
            with in_one_line("%ongpu home"):
                print(_moved_back(cells.shell.user_ns))
        else:
            with in_one_line("%ongpu"):
                cells.stand(placing_request(line, "%ongpu"))
            print(f"cells run on {cells.standing_on} from now on; %ongpu off ends it")

    def _run(self, line: str, text: str) -> Any:
        """Run the text as a cell of its own, under another magic such as `%%time`."""
        if not text.strip():
            raise UsageError("%%ongpu: the cell is empty; put the code to run below that line")
        from gpumagic.usercode.program import awaits, compile_cell

        shell, cell = self.cells.shell, RunningCell()
        code = shell.transform_cell(f"%%ongpu {line}\n{text}")
        name = shell.compile.cache(code, raw_code=text)
        self.cells.stack.append(cell)
        error: BaseException | None = None
        try:
            tree = shell.transform_ast(shell.compile.ast_parse(code, filename=name))
            if awaits(tree):
                raise UsageError("%%ongpu: it awaits; put it on the first line, or run it again")
            body, value = compile_cell(tree, name, shell.compile.flags)
            exec(body, shell.user_ns)
            return None if value is None else eval(value, shell.user_ns)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.cells.stack.remove(cell)
            self.cells.finish(cell, error)

    @magic(line_magic)
    def gpuwatch(self, asked: Namespace) -> None:
        """Say under every cell what it copied between devices, and where it waited for one.

        Usage::

            %gpuwatch on             from now on, this cell included
            %gpuwatch off            no longer
            %gpuwatch                say whether it is on

            {options}

        A copy or wait is implicit if the code names no device: .item(), print, a mask, an index on
        the CPU. `%%ongpu` cells are watched anyway. In a program: `with gpumagic.watch() as w:`,
        and for --check `with gpumagic.check():`.
        """
        watched = self.watched
        if asked.verb == "on":
            watched.start(report=asked.report, strict=asked.strict, check=asked.check)
            strict = ", and the first implicit one is an error" if asked.strict else ""
            strict += ", and values are checked" if asked.check is not None else ""
            print(f"copies and waits are counted from now on{strict}; %gpuwatch off ends it")
        elif asked.verb == "off":
            off = "copies and waits are no longer counted"
            print(off if watched.on else "%gpuwatch was not on")
            watched.stop()
        else:
            print(f"%gpuwatch is {'on' if watched.on else 'off; %gpuwatch on starts it'}")

    @needs_local_scope
    @magic(line_cell_magic, parsed=False)
    def gputime(self, line: str, cell: str | None = None, local_ns: Any = None) -> None:
        """Time code on several devices, fairly, and compare them.

        The variables that the code reads are copied once to each device, which is timed
        separately. The code runs until its times are steady, then repeatedly until the median is
        certain or the time is over. Every device that it uses is synchronized. The results of the
        devices are compared. Afterwards your variables and the random state are as before; what
        the code assigns is discarded, as after %%timeit.

        Usage::

            %%gputime WHERE WHERE … [options]
            %gputime WHERE WHERE … [options] -- expression

            WHERE                    as for %%ongpu; by default the CPU and every GPU
            0+1                      both at the same time, each with a thread

            {options}

            --sweep n=pow2:64..8192  powers of two; how=mean,sum are words
            --against NAME           an earlier -o NAME

        Examples::

            %gputime cpu 0 -- torch.mm(a, a)

            %%gputime cpu 0 --sweep n=pow2:64..4096 -o result
            a = torch.randn(n, n)
            a @ a

            %%gputime 0 1 0+1
            run(x)                     # nearly twice as fast

            result.speedup("cuda:0", "cpu", n=4096)

        Ctrl-C keeps what is finished. In a program: `gpumagic.compare(code, ["cpu", 0])`.
        """
        from gpumagic.magics.arguments import in_one_line, timing_request
        from gpumagic.magics.gputime import time_cell

        asked, code = timing_request(line, cell)
        above = "" if cell is None else f"%%gputime {line}"
        with in_one_line("%%gputime" if above else "%gputime"), self.timing():
            time_cell(self.shell, asked, above, code, local_ns)

    def timing(self) -> Any:
        """Return a context without placement and ledger in the running cell."""
        self.cells.set_aside()
        return self.watched.paused()


def _moved_back(namespace: dict[str, Any]) -> str:
    """Move back what cells moved to a device, and return the line that says so."""
    from gpumagic.display.units import some
    from gpumagic.frameworks.public import bring_home

    home, there = bring_home(namespace)
    nothing = "nothing to move back: all that cells moved to a device is back or gone"
    done = home.back if home.moved else nothing
    made = some(there)
    return f"{done}; created on a GPU, and still there: {made}" if made else done
