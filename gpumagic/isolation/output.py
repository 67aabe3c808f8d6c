"""Drop what timed code prints and displays: it is shown once, not ten thousand times."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
            sink = _Sink(before, self)
            self._before.append((sys, name, before, sink))
            setattr(sys, name, sink)
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None:
            # As IPython's own capture_output does.
            publisher = shell.display_pub
            self._before.append((shell, "display_pub", publisher, _Publisher(publisher, self)))
            shell.display_pub = self._before[-1][-1]

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
        if self._lifted:
            return False
        if here.ident != self._thread and not here.name.startswith(THREADS):
            return False
        self.dropped = True
        return True


class _Sink:
    """Stands for a stream, to all but those who write."""

    def __init__(self, stream: Any, quiet: Quiet) -> None:
        self._stream, self._quiet = stream, quiet

    def write(self, text: str) -> int:
        if self._quiet.drops():
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Publisher:
    """Stands for what publishes the notebook's displays."""

    def __init__(self, publisher: Any, quiet: Quiet) -> None:
        self._publisher, self._quiet = publisher, quiet

    def publish(self, *args: Any, **options: Any) -> None:
        if not self._quiet.drops():
            self._publisher.publish(*args, **options)

    def clear_output(self, *args: Any, **options: Any) -> None:
        if not self._quiet.drops():
            self._publisher.clear_output(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)
