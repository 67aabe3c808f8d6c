"""Let faulthandler write the stack of a crashed kernel to a file that the Jupyter server reads."""

import atexit
import faulthandler
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import IO

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input")


class CrashFile:
    """Turns on faulthandler for this kernel, unless faulthandler is on already."""

    _file: IO[bytes] | None = None

    def install(self) -> None:
        """Turn faulthandler on; do nothing if the file cannot be written."""
        from ipykernel.connect import get_connection_file

        self._pid = os.getpid()
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no connection file
            if not faulthandler.is_enabled():
                self._path = _path(get_connection_file())
                self._file = self._path.open("wb", buffering=0)
                faulthandler.enable(file=self._file, all_threads=False)
                atexit.register(self.uninstall)

    def uninstall(self) -> None:
        file, self._file = self._file, None
        # A forked child must not touch its parent's file.
        if file is not None and os.getpid() == self._pid:
            faulthandler.disable()
            atexit.unregister(self.uninstall)
            file.close()
            self._path.unlink(missing_ok=True)


def frames_of_crash(connection_file: str) -> tuple[str, ...]:
    """Return a crash's frames (``"a cell, line 3"``), innermost first. Delete the crash file."""
    path = _path(connection_file)
    try:
        with path.open("rb") as file:
            text = file.read(65536).decode(errors="replace")
        path.unlink()  # a later crash must not show this old stack
    except OSError:
        return ()
    frames = []
    # Forked children that crash write to the same file. The last stack in the file is the kernel's.
    for source, line, function in _FRAME.findall(text.rpartition("Fatal Python error")[2]):
        if source.endswith("interactiveshell.py"):  # later frames belong to IPython or ipykernel
            break
        where = "a cell" if _CELL.search(source) else "/".join(Path(source).parts[-2:])
        inside = "" if function.startswith("<") else f", in {function}"
        frames.append(f"{where}, line {line}{inside}")
    return tuple(frames[:6])


def _path(connection_file: str) -> Path:
    return Path(connection_file).with_suffix(".crash")
