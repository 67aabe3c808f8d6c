"""Send one client the newest of each kind of message, and never a queue of them.

One message is under way at a time. What comes meanwhile replaces what waits, so that a client on a
slow line gets fewer snapshots and not older ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from gpumagic.server.kernel_cells import KernelCells
from gpumagic.server.wants import Want

# A tick that is this part of its period early is one's own.
_TOLERANCE = 0.1


class Outbox:
    """Sends to one client. On the event loop.

    ``write`` begins to send a message; its future is done when the message has left this process.
    """

    def __init__(
        self,
        write: Callable[[bytes], asyncio.Future[None]],
        cells: KernelCells,
        monotonic: Callable[[], float],
    ) -> None:
        self._write = write
        self._cells = cells
        self._monotonic = monotonic
        self._snapshot: bytes | None = None
        self._history: bytes | None = None
        self._told = cells.revision
        self._due = -math.inf
        self._under_way = False
        self._closed = False
        self.want = Want()

    def ask(self, want: Want) -> None:
        """The client asked for something else."""
        # Who becomes impatient does not wait until the longer period is over.
        self._due = min(self._due, self._monotonic() + want.period_s)
        self.want = want

    def snapshot(self, message: bytes) -> None:
        """There is a new snapshot, which this client may not want yet."""
        now = self._monotonic()
        period = self.want.period_s
        if now < self._due - _TOLERANCE * period:
            return
        # In step with the ticks, and never a burst after a pause.
        self._due = max(self._due + period, now + period / 2)
        self._snapshot = message
        self.flush()

    def history(self, message: bytes) -> None:
        """The past, as it was asked for."""
        self._history = message
        self.flush()

    def flush(self) -> None:
        """Send what waits, if nothing is under way."""
        if self._under_way or self._closed:
            return
        message = self._next()
        if message is None:
            return
        self._under_way = True
        self._write(message).add_done_callback(self._written)

    def close(self) -> None:
        """The client is gone: send nothing more and keep nothing."""
        self._closed = True
        self._snapshot = self._history = None

    def _next(self) -> bytes | None:
        if self._snapshot is not None:
            message, self._snapshot = self._snapshot, None
            return message
        if self._history is not None:
            message, self._history = self._history, None
            return message
        if self._told < self._cells.revision:
            told, self._told = self._told, self._cells.revision
            return self._cells.news(told)
        return None

    def _written(self, future: asyncio.Future[None]) -> None:
        self._under_way = False
        # Asked for even if it is not looked at: an unread error is logged, with a traceback.
        if future.cancelled() or future.exception() is not None:
            self.close()
        self.flush()
