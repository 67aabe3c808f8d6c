"""Confine the code that a forked child follows: no file written, no program run, nothing sent.

Guarantees: what would reach out of the child ends the dry run at the user's line, in words, and the
kernel refuses the same to code that Python does not see; what the code prints or shows is caught.
Only for a child that will end by itself: nothing here can be undone.
"""

import builtins
import getpass
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from gpumagic.dryrun.fakes import suspended
from gpumagic.dryrun.landlock import write_nothing
from gpumagic.dryrun.unknown import Stopped
from gpumagic.placement.scope import suspended as unplaced
from gpumagic.usercode.files import is_users

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_REFUSED = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec"), "starting a program"),
    "os.posix_spawn": "starting a program",
    **dict.fromkeys(("os.fork", "os.forkpty"), "starting a process"),
    "socket.connect": "connecting to a network",
    "socket.bind": "opening a port",
    **dict.fromkeys(("socket.sendto", "socket.sendmsg"), "sending to a network"),
    **dict.fromkeys(("os.remove", "os.rename"), "removing a file"),
    **dict.fromkeys(("os.rmdir", "shutil.rmtree"), "removing a folder"),
    "os.mkdir": "making a folder",
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime"), "changing a file"),
    **dict.fromkeys(("os.setxattr", "os.removexattr"), "changing a file"),
    **dict.fromkeys(("os.link", "os.symlink"), "making a link"),
    **dict.fromkeys(("os.kill", "os.killpg", "signal.pthread_kill"), "sending a signal"),
    "sqlite3.connect": "opening a database",
    "builtins.input": "asking for input",
}


class Confinement:
    """What the child's code may not do, from `begin` on; made, it catches what is printed."""

    def __init__(self) -> None:
        self.printed = io.StringIO()
        self._on = False
        self._importing = 0
        for name, sink in (("stdout", self.printed), ("stderr", io.StringIO())):
            with suppress(TypeError):  # a handler of logging may hold the notebook's own
                vars(getattr(sys, name)).update(write=sink.write, flush=sink.flush)
            setattr(sys, name, sink)
        warnings.simplefilter("ignore")
        _catch_displays()

    def begin(self) -> None:
        """Refuse from now on."""
        write_nothing()
        sys.dont_write_bytecode = True
        # torch logs what it then raises.
        for name in ("torch._subclasses.fake_tensor", "torch._prims_common"):
            logging.getLogger(name).disabled = True
        bars: Any = sys.modules.get("tqdm.std")
        if bars is not None:  # its bars start a thread
            bars.tqdm.monitor_interval = 0
        setattr(threading.Thread, "start", self._refused("starting a thread"))  # noqa: B010
        builtins.input = getpass.getpass = self._refused("asking for input")
        sys.meta_path.insert(0, _WithoutFakes(self))
        sys.addaudithook(self._audit)
        self._on = True

    def end(self) -> None:
        """Refuse no longer: the code has ended."""
        self._on = False

    def _refused(self, what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **options: Any) -> Any:
            raise Stopped(f"{what}: a dry run does not")

        return refuse

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        reason = ""
        if event == "open":
            path, mode, flags = args
            writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & _WRITES
            if writes and path != os.devnull and not isinstance(path, int):
                reason = f"writing to {path!r}: a dry run writes no file"
        elif event in _REFUSED:
            reason = f"{_REFUSED[event]}: a dry run does not"
        if reason and self._importing:
            raise PermissionError(reason)  # a library can do without its cache
        if reason:
            raise Stopped(reason)


def _catch_displays() -> None:
    core: Any = sys.modules.get("IPython.core.interactiveshell")
    shell = core.InteractiveShell._instance if core is not None else None
    if shell is not None:
        from IPython.core.displaypub import CapturingDisplayPublisher

        shell.display_pub = CapturingDisplayPublisher()


class _WithoutFakes(MetaPathFinder):
    """Imports libraries without the modes: they may compute with tensors of their own."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or is_users(spec.origin):
            return None
        if hasattr(spec.loader, "exec_module"):
            run: Callable[[Any], None] = spec.loader.exec_module

            def execute(module: Any) -> None:
                self._confinement._importing += 1
                try:
                    with suspended(), unplaced():
                        run(module)
                finally:
                    self._confinement._importing -= 1

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
