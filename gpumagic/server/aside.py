"""Run work that may block on a thread of its own, away from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function on a thread of its own; cancelling the future only forgets the result.

    The thread is a daemon, unlike an executor's: a driver that never answers does not keep the
    server from ending.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  who awaits the future gets it
            future.set_exception(error)

    threading.Thread(target=run, name="gpumagic-aside", daemon=True).start()
    return asyncio.wrap_future(future)
