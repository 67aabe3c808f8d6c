"""Answer on the kernel's control channel what the GPUs of its host do, also while a cell runs.

The control thread only passes a request on: the sampler takes the snapshots, on its own threads and
only while somebody asks, and where the driver stalls it has the last one. So it is with the hosts
on which the notebook's cluster has ranks: they were heard before.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from comm.base_comm import BaseComm

from gpumagic import faults
from gpumagic.magics.hand_over import running_cluster

if TYPE_CHECKING:
    from gpumagic.telemetry.sampler import Subscription
    from gpumagic.telemetry.snapshot import Snapshot

REQUEST, REPLY = "gpumagic_request", "gpumagic_reply"
TARGET = "gpumagic"
_PERIOD_S = 1.0
# Who has not asked for so long asks no more.
_PATIENCE_S = 5.0


class Sign(BaseComm):
    """A comm that is only listed: there a front end sees that gpumagic is loaded, and need not ask
    a kernel for what it may not know, which the kernel would log as an error."""

    def publish_msg(self, *args: Any, **kwargs: Any) -> None:
        """Tell nobody: a front end without gpumagic would wonder at it."""


class ControlChannel:
    """A handler more among those of the kernel; does nothing where the shell has no kernel."""

    def __init__(self, shell: Any) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        self._able = hasattr(self._kernel, "control_handlers")
        self._sign = Sign(TARGET, primary=False)
        self._subscription: Subscription | None = None
        self._asked_at = 0.0

    def install(self) -> None:
        """Begin to answer."""
        if self._able:
            self._kernel.control_handlers[REQUEST] = self._answer
            self._kernel.comm_manager.register_comm(self._sign)

    def uninstall(self) -> None:
        """Answer no more."""
        if self._able:
            self._kernel.control_handlers.pop(REQUEST, None)
            self._kernel.comm_manager.comms.pop(self._sign.comm_id, None)
            self._rest()

    def _answer(self, stream: Any, ident: Any, parent: Any) -> None:
        """On the control thread, which interrupts and debugs too and so must not wait."""
        from gpumagic.telemetry.sampler import shared_sampler

        with faults.kept("telling a page what the GPUs of this host do"):
            if not parent["content"].get("own", True):
                self._send(stream, ident, parent, None)
                return
            sampler = shared_sampler()
            self._asked_at = time.monotonic()
            if self._subscription is None:
                self._subscription = sampler.subscribe(
                    self._tick, period_s=_PERIOD_S, processes=True
                )

            def taken(future: Future[Snapshot]) -> None:
                # On the sampler's thread; a stream is written to on its own.
                stream.io_loop.add_callback(self._send, stream, ident, parent, future.result())

            sampler.fresh(processes=True, max_age_s=_PERIOD_S).add_done_callback(taken)

    def _send(self, stream: Any, ident: Any, parent: Any, snapshot: Snapshot | None) -> None:
        """Of this host, unless only those of ranks are asked for."""
        with faults.kept("sending a page what the GPUs of this host do"):
            ranks = running_cluster()
            content = {
                "status": "ok",
                "pid": os.getpid(),
                "snapshot": snapshot and snapshot.to_dict(),
                "hosts": ranks.hosts.heard() if ranks else None,
            }
            self._kernel.session.send(stream, REPLY, content, parent=parent, ident=ident)

    def _tick(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._asked_at > _PATIENCE_S:
            self._rest()

    def _rest(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
