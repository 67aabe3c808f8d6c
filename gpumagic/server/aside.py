"""Run work that may block on a thread of its own, away from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function on a thread of its own; cancelling the future only forgets the result.

    The thread is a daemon, unlike an executor's: a driver that never answers does not keep the
    server from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(how: Callable[[], None]) -> None:
        if not future.done():
            how()

    def run() -> None:
        try:
            how = partial(future.set_result, function())
        except Exception as error:  # noqa: BLE001  who awaits the future gets it
            how = partial(future.set_exception, error)
        try:
            loop.call_soon_threadsafe(finish, how)
        except RuntimeError:
            return  # the loop was closed meanwhile

    threading.Thread(target=run, name="gpumagic-aside", daemon=True).start()
    return future
