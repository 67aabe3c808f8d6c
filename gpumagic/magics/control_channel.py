"""Answer pages and assistants on the kernel's control channel, also while a cell runs.

The control thread must not wait. The sampler takes the snapshots on its own threads, only while a
page asks; if the driver stalls it returns the last one. Variables are read on
the main thread, between two cells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comm.base_comm import BaseComm

from gpumagic import faults

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gpumagic.telemetry.sampler import Subscription
    from gpumagic.telemetry.snapshot import Snapshot

REQUEST, REPLY = "gpumagic_request", "gpumagic_reply"
TARGET = "gpumagic"
_PERIOD_S = 1.0
# Sampling ends this long after the last request.
_IDLE_S = 5.0


class Sign(BaseComm):
    """A comm in the kernel's list, which shows a front end that gpumagic is loaded.

    A kernel would log a request that it does not know as an error.
    """

    def publish_msg(self, *args: Any, **kwargs: Any) -> None:
        """Send nothing: a front end without gpumagic would warn of an unknown comm."""


class ControlChannel:
    """A handler of the kernel's control channel."""

    def __init__(self, kernel: Any, last_error: Callable[[], Any] = lambda: None) -> None:
        self._kernel = kernel
        self._last_error = last_error
        self._sign = Sign(TARGET, primary=False)
        self._subscription: Subscription | None = None
        self._asked_at = 0.0

    def install(self) -> None:
        self._kernel.control_handlers[REQUEST] = self._answer
        self._kernel.comm_manager.register_comm(self._sign)

    def uninstall(self) -> None:
        self._kernel.control_handlers.pop(REQUEST, None)
        self._kernel.comm_manager.comms.pop(self._sign.comm_id, None)
        self._rest()

    def _answer(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a request, without waiting: this thread also handles interrupts."""
        from gpumagic.telemetry.sampler import shared_sampler

        if about := parent["content"].get("about"):
            with faults.kept("answering an assistant"):
                self._answer_assistant(stream, ident, parent, about)
            return
        with faults.kept("answering a page about the GPUs of this host"):
            sampler = shared_sampler()
            self._asked_at = time.monotonic()
            if self._subscription is None:
                self._subscription = sampler.subscribe(
                    self._tick, period_s=_PERIOD_S, processes=True
                )

            def taken(future: Future[Snapshot]) -> None:
                # Called on the sampler's thread; a stream is written on its own.
                stream.io_loop.add_callback(self._send, stream, ident, parent, future.result())

            sampler.fresh(processes=True, max_age_s=_PERIOD_S).add_done_callback(taken)

    def _answer_assistant(self, stream: Any, ident: Any, parent: Any, about: str) -> None:
        """Answer a tool of `server/assistant_tools.py`."""
        from gpumagic.magics import assistant_answers as answers

        def reply(content: dict[str, Any]) -> None:
            send = self._kernel.session.send
            stream.io_loop.add_callback(send, stream, REPLY, content, parent=parent, ident=ident)

        def read_variables() -> None:
            with faults.kept("answering an assistant"):
                reply(answers.between_cells(self._kernel.shell, answers.held))

        if about == "report":
            reply(answers.last_report())
        elif about == "error":
            reply(answers.last_error(self._last_error()))
        elif self._kernel.shell.displayhook.exec_result is None:
            self._kernel.io_loop.add_callback(read_variables)
        else:
            reply(answers.between_cells(self._kernel.shell, answers.held))

    def _send(self, stream: Any, ident: Any, parent: Any, snapshot: Snapshot) -> None:
        """Send a snapshot of this host."""
        with faults.kept("sending a page the GPUs of this host"):
            content = {
                "status": "ok",
                "pid": os.getpid(),
                "snapshot": snapshot.to_dict(),
            }
            self._kernel.session.send(stream, REPLY, content, parent=parent, ident=ident)

    def _tick(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._asked_at > _IDLE_S:
            self._rest()

    def _rest(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
