"""Drop what timed code prints and displays: it is shown once, not ten thousand times."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumagic.usercode.files import shell

THREADS = "gputime"
"""How the threads are named that run timed code besides the one that asked for it."""


class Quiet:
    """Within, what timed code prints and displays is dropped; other threads do so as ever."""

    def __init__(self) -> None:
        self.dropped = False  # whether there was anything
        self._lifted = False
        self._thread = threading.get_ident()
        self._before: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        for name in ("stdout", "stderr"):
            before = getattr(sys, name)
            sink = _Dropping(before, self)
            self._before.append((sys, name, before, sink))
            setattr(sys, name, sink)
        if (ipython := shell()) is not None:
            # As IPython's own capture_output does.
            publisher = ipython.display_pub
            ipython.display_pub = _Dropping(publisher, self)
            self._before.append((ipython, "display_pub", publisher, ipython.display_pub))

    def __exit__(self, *error: object) -> None:
        while self._before:
            owner, name, before, sink = self._before.pop()
            # Another may have been put there since, which stays.
            if getattr(owner, name) is sink:
                setattr(owner, name, before)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For what is ours, such as showing how far it is: nothing is dropped."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def drops(self) -> bool:
        """Whether what this thread prints now is dropped."""
        here = threading.current_thread()
        timed = here.ident == self._thread or here.name.startswith(THREADS)
        self.dropped |= timed and not self._lifted
        return timed and not self._lifted


class _Dropping:
    """Stands for a stream, or for what publishes the notebook's displays, to all who write."""

    def __init__(self, target: Any, quiet: Quiet) -> None:
        self._target, self._quiet = target, quiet

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._target, name)
        if name not in ("write", "writelines", "publish", "clear_output"):
            return real

        def unless_dropped(*args: Any, **options: Any) -> Any:
            if self._quiet.drops():
                return len(args[0]) if args else 0
            return real(*args, **options)

        return unless_dropped
