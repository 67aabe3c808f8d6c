"""Keeps a dry run from the world: no file is written, no process or thread started, nothing sent.

Guarantees: what the code prints or shows is caught; the standard streams, random states, the
environment and the working folder are afterwards what they were; libraries that the code imports
stay imported, without fakes, and files of the user's own do not.
"""

import functools
import io
import logging
import multiprocessing.process
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from gpumagic.dryrun.fakes import suspended
from gpumagic.dryrun.running_line import is_users
from gpumagic.dryrun.unknown import Stopped
from gpumagic.placement.scope import suspended as unplaced

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_REFUSED = {
    "subprocess.Popen": "starting a program",
    "os.system": "starting a program",
    "os.exec": "starting a program",
    "os.posix_spawn": "starting a program",
    "os.fork": "starting a process",
    "os.forkpty": "starting a process",
    "socket.connect": "connecting to a network",
    "socket.bind": "opening a port",
    "socket.sendto": "sending to a network",
    "os.remove": "removing a file",
    "os.rename": "renaming a file",
    "os.rmdir": "removing a folder",
    "os.mkdir": "making a folder",
    "os.truncate": "changing a file",
    "os.link": "making a link",
    "os.symlink": "making a link",
    "os.chmod": "changing a file",
    "os.kill": "sending a signal",
    "shutil.rmtree": "removing a folder",
    "sqlite3.connect": "opening a database",
    "builtins.input": "asking for input",
}
_thread: int | None = None  # the one that a dry run is on
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _thread is None or threading.get_ident() != _thread:
        return
    if event == "open":
        path, mode, flags = args
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        if (writes or (mode is None and flags & _WRITES)) and path != os.devnull:
            raise Stopped(f"writing to {path!r}: a dry run writes no file")
    elif event in _REFUSED:
        raise Stopped(f"{_REFUSED[event]}: a dry run does not")


@contextmanager
def kept_out() -> Iterator[io.StringIO]:
    """A stretch of code that changes nothing outside; what it prints is in the value."""
    global _thread, _hooked
    printed = io.StringIO()
    with ExitStack() as stack:
        _keep_states(stack)
        _catch_displays(stack)
        stack.enter_context(redirect_stdout(printed))
        stack.enter_context(redirect_stderr(io.StringIO()))
        finder = _WithoutFakes()
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        stack.callback(_forget_files, set(sys.modules))
        if not _hooked:  # it cannot be taken away, and does nothing between dry runs
            sys.addaudithook(_audit)
            _hooked = True
        _thread = threading.get_ident()
        stack.callback(_let_go)
        yield printed


def _let_go() -> None:
    global _thread
    _thread = None


@contextmanager
def let_out() -> Iterator[None]:
    """For what is ours, such as showing how far a dry run is."""
    global _thread
    thread, _thread = _thread, None
    try:
        yield
    finally:
        _thread = thread


def _keep_states(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    stack.callback(_restore_environment, dict(os.environ))
    with suppress(OSError):
        stack.callback(os.chdir, os.getcwd())
    stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
    sys.dont_write_bytecode = True
    stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
    kinds: tuple[Any, ...] = (threading.Thread, multiprocessing.process.BaseProcess)
    for kind in kinds:
        stack.callback(setattr, kind, "start", kind.start)
        kind.start = _not_here(kind.start)
    _keep_logging(stack)
    # torch logs what it then raises.
    for name in ("torch._subclasses.fake_tensor", "torch._prims_common"):
        logger = logging.getLogger(name)
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None:  # its bars start a thread
        stack.callback(setattr, bars.tqdm, "monitor_interval", bars.tqdm.monitor_interval)
        bars.tqdm.monitor_interval = 0
    plots: Any = sys.modules.get("matplotlib._pylab_helpers")
    if plots is not None:
        stack.callback(_close_figures, set(plots.Gcf.figs))


def _keep_logging(stack: ExitStack) -> None:
    manager = logging.root.manager
    stack.callback(setattr, manager, "disable", manager.disable)
    for logger in (logging.root, *manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            stack.callback(_restore_logger, logger, logger.level, list(logger.handlers))
            for name in ("disabled", "propagate"):
                stack.callback(setattr, logger, name, getattr(logger, name))


def _restore_logger(logger: logging.Logger, level: int, handlers: list[logging.Handler]) -> None:
    logger.handlers[:] = handlers
    if logger.level != level:
        logger.setLevel(level)


def _not_here(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def refuse(self: Any) -> None:
        if threading.get_ident() == _thread:
            raise Stopped("starting a thread or a process: a dry run does not")
        start(self)

    return refuse


def _restore_environment(before: dict[str, str]) -> None:
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _close_figures(before: set[int]) -> None:
    helpers: Any = sys.modules["matplotlib._pylab_helpers"]
    for number in set(helpers.Gcf.figs) - before:
        helpers.Gcf.destroy(number)


def _catch_displays(stack: ExitStack) -> None:
    core: Any = sys.modules.get("IPython.core.interactiveshell")
    shell = core.InteractiveShell._instance if core is not None else None
    if shell is not None:
        from IPython.core.displaypub import CapturingDisplayPublisher

        stack.callback(setattr, shell, "display_pub", shell.display_pub)
        shell.display_pub = CapturingDisplayPublisher()


class _WithoutFakes(MetaPathFinder):
    """A library that is imported in a dry run is for ever: it must not hold a fake."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if threading.get_ident() != _thread:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or is_users(str(spec.origin)):
            return None
        if hasattr(spec.loader, "exec_module"):
            run: Callable[[Any], None] = spec.loader.exec_module

            def execute(module: Any) -> None:
                with suspended(), let_out(), unplaced():
                    run(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _forget_files(before: set[str]) -> None:
    """The user's own files were imported with fakes: the next import is the first."""
    for name in set(sys.modules) - before:
        if is_users(str(getattr(sys.modules[name], "__file__", None) or "<built-in>")):
            module = sys.modules.pop(name)
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)
