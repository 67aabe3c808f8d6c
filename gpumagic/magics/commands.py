"""Define the magics: each parses its line, calls the library, and shows the result."""

from collections.abc import Callable
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
from IPython.display import display

from gpumagic.display.units import some
from gpumagic.errors import GpuError
from gpumagic.magics.arguments import answers_help, in_one_line, parse, timing_request
from gpumagic.magics.control_channel import ControlChannel
from gpumagic.magics.hooks import Explaining, MemoryHooks, MXNetEnded
from gpumagic.magics.ongpu import CellHooks, RunningCell, Watched
from gpumagic.magics.placing import placing_request

# By name, so that loading us does not import it.
_SNAPSHOT = ("gpumagic.telemetry.snapshot", "Snapshot")


class Once:
    """Displays in one shell what the magics return, each once in the cell of its magic."""

    def __init__(self, shell: Any, cell: Callable[[], object]) -> None:
        self._formatter = shell.display_formatter.ipython_display_formatter
        # A terminal writes "Out[1]:" before it knows whether anything follows.
        self._must_say_something = not hasattr(shell, "kernel")
        self._cell = cell
        self._shown: object = None
        self._shown_in: object = None

    def install(self) -> None:
        self._formatter.for_type_by_name(*_SNAPSHOT, self._display)

    def uninstall(self) -> None:
        self._formatter.deferred_printers.pop(_SNAPSHOT, None)
        for kind, printer in list(self._formatter.type_printers.items()):
            if printer == self._display:
                self._formatter.type_printers.pop(kind)

    def show(self, value: Any, **how: Any) -> Any:
        """Show it now, a Snapshot in a table made as `how` says; returns it."""
        # The class that is ours and common to all: of widgets each has one of its own below it.
        ours = [kind for kind in type(value).__mro__ if kind.__module__.startswith("gpumagic.")]
        self._formatter.for_type(ours[-1], self._display)
        _publish(value, **how)
        self._shown, self._shown_in = value, self._cell()
        return value

    def _display(self, value: Any) -> None:
        again = value is self._shown and self._shown_in is self._cell()
        self._shown = self._shown_in = None
        if not again:
            _publish(value)
        elif self._must_say_something:
            print(f"<{type(value).__name__}>")


def _publish(value: Any, **how: Any) -> None:
    if hasattr(value, "_ipython_display_"):
        value._ipython_display_()
        return
    shown = value
    if not hasattr(value, "_repr_html_"):
        from gpumagic.gputable.gpu_table import GpuTable

        shown = GpuTable(value, **how)
    display({"text/plain": repr(shown), "text/html": shown._repr_html_()}, raw=True)


@magics_class
class GpuMagics(Magics):
    """`%gpus`, `%ongpu`, `%gpuwatch` and `%%gputime`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.explaining = Explaining(shell, lambda: self.cells.current())
        self.cells = CellHooks(shell, display, self.explaining)
        self.watched = Watched(self.cells, display)
        self.once = Once(shell, self.cells.current)
        self.memory_hooks = MemoryHooks(shell)
        self.mxnet = MXNetEnded(shell)
        self.control = ControlChannel(shell)

    @no_var_expand
    @line_magic
    @answers_help
    def gpus(self, line: str) -> Any:
        """Show the GPUs: who holds their memory, how busy, hot and hungry they are.

        Usage::

            %gpus                      all GPUs; the value is a gpumagic.telemetry.Snapshot. Those
                                       of the hosts of a cluster stand below
            %gpus 1                    one of them, by any of its names
            %gpus --processes          with a line for each process
            %gpus --live               keeps drawing, also while a cell runs
            %gpus --doctor             what cannot be seen, why, and how to fix it
            %gpus --virtual 2          two virtual GPUs in this process (of at most 16 GiB)
            %gpus --virtual 2 --memory 2GiB
            %gpus --virtual off        take them away again

        Virtual GPUs are for trying things out where there is no GPU: tensors' devices, errors and
        memory limits are real, the numbers are the CPU's, and so is the speed.

        Examples::

            In [1]: %gpus --virtual 2
            In [2]: snapshot = %gpus
            In [3]: snapshot.gpus[0].memory_used
        """
        from gpumagic.magics import gpus

        args = parse("%gpus", line)
        with in_one_line("%gpus"):
            if args.virtual is not None and args.virtual.lower() == "off":
                return gpus.virtual_off(self.cells, force=args.force)
            if args.virtual is not None:
                gpus.virtual_on(args.virtual, args.memory, force=args.force)
                return self.once.show(gpus.gpus())
            if args.memory or args.force:
                raise GpuError("--memory and --force go with --virtual N; type %gpus --virtual 2")
            if args.doctor:
                return gpus.doctor()
            if args.live:
                monitor = gpus.live(args.where)
                return None if monitor is None else self.once.show(monitor)
            snapshot = gpus.gpus(args.where)
            others = () if args.where else gpus.of_cluster(snapshot)
            return self.once.show(snapshot, processes=args.processes, others=others)

    @no_var_expand
    @line_cell_magic
    @answers_help
    def ongpu(self, line: str, cell: str | None = None) -> Any:
        """Run this cell, or all cells from now on, on one device, or this cell on several.

        New tensors and modules are made there, a bare "cuda" means that GPU, batches of a
        DataLoader land there, and the tensors, modules and optimizers that the cell reads are
        brought there first, each staying the object it is. An explicit `device=` wins. A line
        under the cell says what moved, how long it took and the peak memory.

        Usage::

            %%ongpu WHERE [--back] [--no-move] [--quiet] [--report] [--strict] [--fix] [--dry-run]
                           [--memory [--save FILE]]

            WHERE        1   cuda:1   gpu:1   /gpu:1   cuda   xpu:1   cpu   mps   GPU-4f2a…
                         free   the GPU with the most free memory
                         1?     GPU 1, or else the CPU, and say so
            --back       bring home after the cell what it brought
            --no-move    leave variables and batches where they are
            --quiet      no report; gpumagic.last_report() has it
            --report     with a table of the copies between devices and the waits, by line, with
                         advice
            --strict     the first copy or wait that is implicit (no device is named: .item(),
                         print, a mask, an index on the CPU) is an error at its line
            --fix        bring operands on several devices to this one, and say so
            --memory     say what the peak of memory was made of, by kind, by line and over time;
                         --save peak.pickle keeps torch's own snapshot for its viewer
            --dry-run    compute nothing and change nothing: say what the cell would assign, copy
                         and need in memory, and where it would fail
            --dry-run --on 'H100 80GB, RTX 4090, 24GiB'
                         whether it would fit on cards that are not here, in the place of WHERE

            %%ongpu 0,1 --split NAMES [--gather NAMES] [--reduce NAME=mean] [--chunk N] [--quiet]

            0,1, all     several GPUs share the items of the variables in --split, a thread each;
                         those in --gather are put together, those in --reduce are their mean,
                         sum, min or max; with --chunk 4 whoever is free takes the next 4 items

            %ongpu 1        all cells run there from now on, this one included
            %ongpu off      no longer
            %ongpu home     bring home what any cell brought to a device
            %ongpu          say what holds

        Examples::

            %%ongpu 1
            net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
            loss = F.cross_entropy(net(X), y)      # X and y are brought to cuda:1

            %%ongpu free
            %%time
            train(net, loader)

        Peak memory is counted from the start of the cell, as after
        `torch.cuda.reset_peak_memory_stats()`. In a program: `with gpumagic.on(1):`.
        """
        return self._stand(line) if cell is None else self._run(line, cell)

    def _stand(self, line: str) -> None:
        cells, words = self.cells, line.partition("#")[0].split()
        if not words:
            holds = f"cells run on {cells.standing_on}; %ongpu off ends it"
            off = "cells run where their code says; %ongpu 1 runs all of them on GPU 1 from then on"
            print(holds if cells.standing else off)
        elif [word.lower() for word in words] == ["off"]:
            held = cells.standing is not None
            cells.end_standing()
            print(f"cells no longer run on {cells.standing_on}" if held else "%ongpu was not on")
        elif [word.lower() for word in words] == ["home"]:
            with in_one_line("%ongpu home"):
                from gpumagic.cell.begin import bring_all_home

                home, there = bring_all_home(cells.shell.user_ns)
                made = some(there)
            nothing = "nothing to bring home: all that cells brought to a device is back or gone"
            done = repr(home).replace("moved", "brought home", 1) if home.moved else nothing
            print(f"{done}; made on a GPU, and still there: {made}" if made else done)
        else:
            with in_one_line("%ongpu"):
                cells.stand(placing_request(line, "%ongpu"))
            print(f"cells run on {cells.standing_on} from now on; %ongpu off ends it")

    def _run(self, line: str, text: str) -> Any:
        """Run the text as a cell, which those that begin with `%%ongpu` are already."""
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

    @no_var_expand
    @line_magic
    @answers_help
    def gpuwatch(self, line: str) -> None:
        """Say under every cell what it copied between devices, and where it waited for one.

        Usage::

            %gpuwatch on               a line under each cell that did, this one included
            %gpuwatch on --report      a table by line, with advice
            %gpuwatch on --strict      the first copy or wait that is implicit is an error
            %gpuwatch off              no longer
            %gpuwatch                  say whether it is on

        `%%ongpu` cells are watched anyway. In a program: `with gpumagic.watch() as w:`.
        """
        args, watched = parse("%gpuwatch", line), self.watched
        if args.what == "on":
            with in_one_line("%gpuwatch"):
                watched.start(report=args.report, strict=args.strict)
            strict = ", and the first implicit one is an error" if args.strict else ""
            print(f"copies and waits are counted from now on{strict}; %gpuwatch off ends it")
        elif args.what == "off":
            off = "copies and waits are no longer counted"
            print(off if watched.on else "%gpuwatch was not on")
            watched.stop()
        else:
            print(f"%gpuwatch is {'on' if watched.on else 'off; %gpuwatch on starts it'}")

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    @answers_help
    def gputime(self, line: str, cell: str | None = None, local_ns: Any = None) -> None:
        """Time code on several devices, fairly, and compare them.

        On each device the variables that the code reads are copied there once, which is timed
        apart; then it warms up until it is steady and repeats until the median is certain or the
        time is over. Every device that it touches is waited for. The results of the devices are
        compared. Your variables and the random state are afterwards what they were before; what
        the code assigns is gone with the copies, as after %%timeit.

        Usage::

            %%gputime WHERE WHERE … [options]
            %gputime WHERE WHERE … [options] -- expression

            WHERE            cpu  0  cuda:1  free …  as of %%ongpu; none: the CPU and every GPU
                             0+1  both at the same time, a thread each
            --sweep n=64,256,1024
                             again with each value of that variable; n=pow2:64..8192 too;
                             how=mean,sum are words; given twice, with each pair of values
            --setup CODE     run before on each device, untimed
            --items N        what one run works through, for the throughput: 1000, or
                             'len(x)', or 'n * n' under a sweep
            --max-time S     seconds for each device and value (5); a slow run is timed once more
                             after its first, however long it takes
            --in-place       work on the variables themselves: they change
            -o NAME          keep the result in that variable, a gpumagic.Comparison
            --against last   what changed since the last one; or since NAME, or a saved FILE
            --quiet          show nothing

        Examples::

            %gputime cpu 0 -- torch.mm(a, a)

            %%gputime cpu 0 --sweep n=pow2:64..4096 -o result
            a = torch.randn(n, n)
            a @ a

            %%gputime 0 1 0+1
            run(x)                     # near twice as fast

            result.speedup("cuda:0", "cpu", n=4096)
            result.save("products.json")

        Ctrl-C keeps what is finished. In a program: `gpumagic.compare(code, ["cpu", 0])`.
        """
        from gpumagic.magics.gputime import time_cell

        asked, code = timing_request(line, cell)
        above = "" if cell is None else f"%%gputime {line}"
        with in_one_line("%%gputime" if above else "%gputime"):
            self.cells.set_aside()
            with self.watched.paused():
                time_cell(self.shell, asked, above, code, local_ns)
