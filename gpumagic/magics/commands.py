"""Define the magics. Each magic parses its line, calls gpumagic, and shows the result."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from IPython.core import magic as ipython
from IPython.display import display

from gpumagic.errors import cluster_needed, torch_needed
from gpumagic.magics.hooks import DisplayOnce, in_one_line
from gpumagic.magics.ongpu import CellHooks
from gpumagic.magics.options import options


def magic(kind: Callable[[Any], Any], *, parsed: bool = True) -> Callable[[Any], Any]:
    """Make a method a magic. If `parsed`, parse the magic's line; show a GpuError in one line."""

    def decorate(method: Any) -> Any:
        name = method.__name__
        before, _, after = method.__doc__.partition("{options}")
        indent = before[before.rindex("\n") :]
        rows = (f"{', '.join([*o.flags[:-1], o.usage]):24} {o.does}" for o in options(name))
        method.__doc__ = before + indent.join(rows) + after

        @wraps(method)
        def run(self: Any, line: str, *cell: Any, **scope: Any) -> Any:
            words = line.partition("-- ")[0].split()  # the expression after `--` may end with -h
            if words == ["help"] or words[-1:] in (["-h"], ["--help"]):
                return print(inspect.getdoc(method))
            if not parsed:
                return method(self, line, *cell, **scope)
            from gpumagic.magics.arguments import checked

            typed = f"%%{name}" if cell else f"%{name}"
            asked = checked(typed, line)
            asked.line = line
            with in_one_line(typed):
                return method(self, asked, *cell, **scope)

        return ipython.no_var_expand(kind(run))

    return decorate


@ipython.magics_class
class GpuMagics(ipython.Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, cells: CellHooks, once: DisplayOnce) -> None:
        super().__init__(shell)
        self.cells, self.once = cells, once
        self._last_memory: Any = None  # the last full memory report, for `--since`

    @magic(ipython.line_magic)
    def gpus(self, asked: Namespace) -> Any:
        """Show each GPU's load, temperature, power and memory, and who holds the memory.

        Usage::

            %gpus                    all GPUs of this machine
            %gpus 1                  one GPU, by any of its names

            {options}

        `%gpus` returns a gpumagic.telemetry.Snapshot. Virtual GPUs have device names, errors
        and a memory limit, as real GPUs have. The CPU computes the results, at the CPU's speed.

        Examples::

            %gpus --virtual 2
            snapshot = %gpus
            snapshot.gpus[0].memory_used
        """
        from gpumagic.magics import gpus

        if asked.virtual is not None and asked.virtual.lower() == "off":
            return gpus.virtual_off(self.cells, force=asked.force)
        if asked.virtual is not None:
            gpus.virtual_on(asked.virtual, asked.memory, force=asked.force)
        if asked.doctor:
            return gpus.doctor()
        if asked.live:
            from gpumagic.widget import monitor

            if (made := monitor()) is None:
                return None
            self.once.show(made)
            print("live until the kernel ends; to end it earlier: m = %gpus --live, then m.close()")
            return made
        return self.once.show(gpus.gpus(asked.where), processes=asked.processes)

    @magic(ipython.line_cell_magic, parsed=False)
    def ongpu(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on one device or several (%%ongpu), or all cells on one device (%ongpu).

        Tensors, modules and optimizers that the cell reads are moved to the device first, and stay
        the same objects. New tensors and modules are created there, unless the code names another
        device. "cuda" without a number means this GPU. Batches of a DataLoader are copied to the
        device. A line under the cell shows the moved variables, the time, and the peak memory.

        Usage::

            %%ongpu WHERE [options]
            %%ongpu 0,1 --split x [--gather y] [--reduce loss=mean] [--chunk 4]
            %%ongpu --dry-run --on 'H100 80GB, RTX 4090, 24GiB'

            WHERE                    1  cuda:1  gpu:1  /gpu:1  cuda  xpu:1  cpu  mps  GPU-4f2a…
            free                     the GPU with the most free memory
            1?                       GPU 1, or the CPU if there is none; the report says which
            0,1  all                 several GPUs, one thread each; --split names what to divide
            @all  @0,1               engines of %gpucluster

            {options}

            %ongpu 1                 run this cell and all later cells on GPU 1
            %ongpu off               stop running cells on GPU 1
            %ongpu home              move back everything that cells moved
            %ongpu                   show where cells run

        Examples::

            %%ongpu 1
            net = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
            loss = F.cross_entropy(net(X), y)      # X and y are moved to cuda:1

            %%ongpu free --profile                 # which line takes the time
            train(net, loader)

        A copy or a wait is implicit if the code names no device. Examples are .item(), print, and a
        mask or an index on the CPU. `gpumagic.last_report()` returns the last report. In a program:
        `with gpumagic.on(1):`.
        """
        return self.cells.stand(line) if cell is None else self.cells.run(line, cell)

    @magic(ipython.line_magic)
    def gpuwatch(self, asked: Namespace) -> None:
        """Report each cell's copies between devices, and its waits for a device.

        Usage::

            %gpuwatch on             report on this cell and all later cells
            %gpuwatch off            end the reports
            %gpuwatch                show whether it is on

            {options}

        A copy or a wait is implicit if the code names no device. Examples are .item(), print, and a
        mask or an index on the CPU. `%%ongpu` cells are always watched. In a program:
        `with gpumagic.watch() as w:`, and for --check `with gpumagic.check():`.
        """
        on = self.cells.watching is not None
        if asked.verb is None:
            how = f"; %gpuwatch on {asked.line}".rstrip() + (" changes it" if on else " starts it")
            print(f"%gpuwatch is {'on' if on else 'off'}{how if asked.line or not on else ''}")
        elif asked.verb == "on":
            self.cells.watch(asked)
            strict = ", and the first implicit one raises an error" if asked.strict else ""
            strict += ", and values are checked" if asked.check is not None else ""
            print(f"copies and waits are counted from now on{strict}; %gpuwatch off ends it")
        else:
            print("copies and waits are no longer counted" if on else "%gpuwatch was not on")
            self.cells.watch(None)

    @ipython.needs_local_scope
    @magic(ipython.line_cell_magic, parsed=False)
    def gputime(self, line: str, cell: str | None = None, local_ns: Any = None) -> None:
        """Time code on several devices under the same conditions, and compare the times.

        Each device gets its own copy of the variables that the code reads. After a warm-up, the
        code repeats until the median is certain or the time limit is reached. The devices are
        synchronized for each measurement, and their results are compared. Your variables and the
        random state do not change. Assigned variables are discarded, as after %%timeit.

        Usage::

            %%gputime WHERE WHERE … [options]
            %gputime WHERE WHERE … [options] -- expression

            WHERE                    as for %%ongpu; by default the CPU and every GPU
            0+1                      GPUs 0 and 1 at the same time, with one thread each

            {options}

            --sweep n=pow2:64..8192  powers of two from 64 to 8192; or words: how=mean,sum
            --against NAME           compare with the result of an earlier -o NAME

        Examples::

            %gputime cpu 0 -- torch.mm(a, a)

            %%gputime cpu 0 --sweep n=pow2:64..4096 -o result
            a = torch.randn(n, n)
            a @ a

            result.speedup("cuda:0", "cpu", n=4096)

        Ctrl-C keeps the finished measurements. In a program: `gpumagic.compare(code, ["cpu", 0])`.
        """
        from gpumagic.magics.run_elsewhere import time_cell

        self._on_copies(time_cell, "gputime", line, cell, local_ns)

    @ipython.needs_local_scope
    @magic(ipython.line_cell_magic, parsed=False)
    def gpudiff(self, line: str, cell: str | None = None, local_ns: Any = None) -> None:
        """Find the first operation at which two devices, or two dtypes, give different numbers.

        The code runs once for each device or dtype, on copies of your variables, with the same
        random numbers. An operation is shown if its inputs agree, but its results differ by more
        than rounding errors. A backward operation is shown at the line of the forward pass.

        Usage::

            %%gpudiff WHERE WHERE [options]
            %gpudiff float32 bfloat16 [options] -- expression

            {options}

        Examples::

            %%gpudiff cpu 0
            loss = F.cross_entropy(net(X), y)
            loss.backward()

        In a program: `gpumagic.diff(code, "cpu", 0)`.
        """
        from gpumagic.magics.run_elsewhere import diff_cell

        self._on_copies(diff_cell, "gpudiff", line, cell, local_ns)

    def _on_copies(self, run: Any, name: str, line: str, cell: str | None, scope: Any) -> None:
        from gpumagic.magics.arguments import timing_request

        asked, code = timing_request(line, cell, name)
        above = "" if cell is None else f"%%{name} {line}"
        with in_one_line(f"%%{name}" if above else f"%{name}"), self.cells.timing():
            run(self.shell, asked, above, code, scope)

    @magic(ipython.line_magic)
    def gpumem(self, asked: Namespace) -> Any:
        """Show which variables and other objects hold the memory of the GPUs, the largest first.

        Holders are variables and their contents, modules, optimizers, tensors that autograd saved
        for a backward pass, results of cells, exceptions and other objects. Memory with several
        holders counts once, in a row that names all of them. Arrays of JAX, TensorFlow, CuPy and
        other libraries have rows too. torch is not needed.

        Usage::

            %gpumem                  all GPUs; the value is a gpumagic.MemoryReport
            %gpumem 1                one GPU, by any of its names
            %gpumem net              what one variable holds: a module layer by layer, with
                                     gradients, optimizer state, and what autograd saved
            %gpumem net.encoder      what a part of net holds
            %gpumem data["x"] batch  what these variables hold

            {options}

        --record takes about 2 µs per allocation on a real GPU. Virtual GPUs always record lines.

        Examples::

            report = %gpumem 0
            report.holders[0].path, report.holders[0].nbytes

        In a program: `gpumagic.memory()`.
        """
        from gpumagic.magics import gpus

        if asked.record:
            with torch_needed("%gpumem --record"):
                from gpumagic.memory.allocator import record
            return print(record(asked.record == "on"))
        shown, report = gpus.memory_of(asked.what)
        before, self._last_memory = self._last_memory, report or self._last_memory
        if asked.since and before and report:
            from gpumagic.memory.memory_changes import changes

            shown = changes(before, report)
        elif asked.since and report:
            print("This is the first %gpumem; --since will show what changes from now on.")
        return self.once.show(shown)

    @magic(ipython.line_magic)
    def gpufree(self, asked: Namespace) -> None:
        """Free the GPU memory that no variable holds, and print the amount in one line.

        An exception keeps the variables of the functions in its traceback. IPython keeps the
        results of cells. Exceptions and results that hold GPU memory are released, so `%debug` no
        longer works for these exceptions. Garbage is collected and torch's cache is emptied.
        Variables keep their values, even if a value is also a cell's result.

        Usage::

            %gpufree                 release exceptions and results (Out, _, __, ___, _5)
            %gpufree 1               release only exceptions and results that hold memory of GPU 1
            %gpufree batch net       also delete the variables batch and net

            {options}

        Examples::

            In [7]: %gpufree
            freed 3.2 GiB (the exception of In [6]: 2.1 GiB on cuda:0, Out[4]: 1.1 GiB on cuda:0)

        In a program, also in the `except` block of an error: `gpumagic.free_memory()`.
        """
        with torch_needed("%gpufree"):
            from gpumagic.memory.free import free_memory

            display(free_memory(*asked.names))

    @magic(ipython.cell_magic)
    def gpufit(self, asked: Namespace, cell: str) -> None:
        """Find the largest value of a variable, such as a batch size, that fits in GPU memory.

        Dry runs predict the memory of the tried values, without GPU time. A run on copies of your
        variables then confirms the largest value, unless --dry is given.

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

        For training, include the backward pass, because it needs memory too.
        Ctrl-C keeps finished results. In a program: `gpumagic.fit(step, 0, batch=range(1, 4097))`.
        """
        from gpumagic.magics.run_elsewhere import fit_cell

        with self.cells.timing():
            fit_cell(self.shell, asked, f"%%gpufit {asked.line}", cell)

    @magic(ipython.line_magic)
    def gpucluster(self, asked: Namespace) -> None:
        """Start an engine for each GPU, here or on other machines, for the cells of `%%ongpu @all`.

        Each engine is a process that sees one GPU, or one virtual GPU if there is no GPU. All
        engines join one torch.distributed group, and end when the notebook's kernel ends.

        Usage::

            %gpucluster start [options]      all GPUs of this machine
            %gpucluster start 2              two engines, on virtual GPUs if there is no GPU
            %gpucluster start 0,1            GPUs 0 and 1
            %gpucluster                      show each engine's rank, host and activity
            %gpucluster restart 1            replace the engine of rank 1
            %gpucluster pull loss net        turn loss and net into lists of the ranks' values
            %gpucluster checkpoint net,opt --to DIR  save these variables of the ranks
            %gpucluster restore DIR          load the last checkpoint, with any number of ranks
            %gpucluster stop                 end all engines

            {options}

        Examples::

            %gpucluster start 2

            %%ongpu @all --split prompts --gather images
            images = pipe(prompts).images

        In a program: `with gpumagic.cluster(2) as ranks:`.
        """
        with torch_needed("%gpucluster"), cluster_needed("%gpucluster"):
            from gpumagic.magics.gpus import drive_cluster

            drive_cluster(self.shell, asked)
