"""Answer JupyterLab's requests for GPU data on the control channel, even while a cell runs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from comm.base_comm import BaseComm

from gpumagic import faults

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gpumagic.telemetry.sampler import Subscription
    from gpumagic.telemetry.snapshot import Snapshot

REQUEST, REPLY = "gpumagic_request", "gpumagic_reply"
_PACE_S = 1.0  # seconds from one sample to the next
_IDLE_S = 5.0  # seconds from JupyterLab's last request until sampling ends


class Sign(BaseComm):
    """Announce gpumagic to front ends, which find this comm in the kernel's list of comms."""

    def publish_msg(self, *args: Any, **kwargs: Any) -> None:
        """Send nothing, because a front end without gpumagic would warn of an unknown comm."""


class ControlChannel:
    """Handle gpumagic's requests on the kernel's control channel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._sign = Sign("gpumagic", primary=False)
        self._subscription: Subscription | None = None
        self._asked_at = 0.0

    def install(self) -> None:
        self._kernel.control_handlers[REQUEST] = self._answer
        self._kernel.comm_manager.register_comm(self._sign)

    def uninstall(self) -> None:
        self._kernel.control_handlers.pop(REQUEST, None)
        self._kernel.comm_manager.comms.pop(self._sign.comm_id, None)
        self._stop()

    def _answer(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a request without waiting, because this thread also handles interrupts."""

        def reply(future: Future[Snapshot]) -> None:
            with faults.kept("sending this host's GPU data to JupyterLab"):
                snapshot = future.result().to_dict()
                content = {"status": "ok", "pid": os.getpid(), "snapshot": snapshot}
                # A ZMQ stream may be used only on its own thread, but `reply` may run on another.
                send, how = self._kernel.session.send, {"parent": parent, "ident": ident}
                stream.io_loop.add_callback(send, stream, REPLY, content, **how)

        with faults.kept("answering on the control channel"):
            from gpumagic.telemetry.sampler import shared_sampler

            sampler = shared_sampler()
            self._asked_at = time.monotonic()
            if self._subscription is None:
                self._subscription = sampler.subscribe(self._tick, period_s=_PACE_S, processes=True)
            sampler.fresh(processes=True, max_age_s=_PACE_S).add_done_callback(reply)

    def _tick(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._asked_at > _IDLE_S:
            self._stop()

    def _stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
