"""Answer JupyterLab and AI assistants on the kernel's control channel, even while a cell runs.

The control thread must not wait, so a sampler reads the GPUs on other threads. The sampler runs
only while a JupyterLab page sends requests. If the driver stalls, pages get the last snapshot.
Holders of memory are listed on the main thread, between two cells. A request never runs user
code or changes variables. No answer names a program or notebook of another user.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
_IDLE_S = 5.0  # seconds from a page's last request until sampling ends
_NAMED = 3  # maximum number of memory holders per GPU in the text for an assistant
_RUNNING = "a cell is running; ask gpu_memory after it, or gpu_status for the totals now"


class Sign(BaseComm):
    """Announce gpumagic to front ends, which find this comm in the kernel's list of comms."""

    def publish_msg(self, *args: Any, **kwargs: Any) -> None:
        """Send nothing, because a front end without gpumagic would warn of an unknown comm."""


class ControlChannel:
    """Handle gpumagic's requests on the kernel's control channel."""

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
        self._stop()

    def _answer(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a request without waiting, because this thread also handles interrupts."""

        def reply(content: dict[str, Any]) -> None:
            # A ZMQ stream may be used only on its own thread. `reply` may run on another thread.
            send = self._kernel.session.send
            stream.io_loop.add_callback(send, stream, REPLY, content, parent=parent, ident=ident)

        with faults.kept("answering on the control channel"):
            if not (about := parent["content"].get("about")):
                self._answer_page(reply)
            elif about == "report":
                reports = sys.modules.get("gpumagic.cell.report")
                last = reports.last_report() if reports else None
                reply(_record(last, "no %%ongpu cell has run in this notebook"))
            elif about == "error":
                reply(_explained(self._last_error()))
            else:
                self._answer_memory(reply)

    def _answer_page(self, reply: Callable[[dict[str, Any]], None]) -> None:
        """Send a JupyterLab page a snapshot of this host's GPUs."""
        from gpumagic.telemetry.sampler import shared_sampler

        sampler = shared_sampler()
        self._asked_at = time.monotonic()
        if self._subscription is None:
            self._subscription = sampler.subscribe(self._tick, period_s=_PERIOD_S, processes=True)

        def taken(future: Future[Snapshot]) -> None:
            with faults.kept("sending a page the GPUs of this host"):
                reply({"status": "ok", "pid": os.getpid(), "snapshot": future.result().to_dict()})

        sampler.fresh(processes=True, max_age_s=_PERIOD_S).add_done_callback(taken)

    def _answer_memory(self, reply: Callable[[dict[str, Any]], None]) -> None:
        """Send the holders of GPU memory. While a cell runs, send the text `_RUNNING` instead."""

        def read() -> None:
            with faults.kept("listing the holders of memory"):
                running = self._kernel.shell.displayhook.exec_result is not None
                reply(_record(None, _RUNNING) if running else _holders())

        if self._kernel.shell.displayhook.exec_result is None:
            self._kernel.io_loop.add_callback(read)
        else:
            read()

    def _tick(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._asked_at > _IDLE_S:
            self._stop()

    def _stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()


def _explained(found: Any) -> dict[str, Any]:
    """Return the answer about the last error: an explanation, or advice on a CUDA error."""
    from gpumagic.display.units import some

    if isinstance(found, str):
        return {"record": "CudaError", "text": found}
    if (device := getattr(found, "device", None)) is not None:
        named = some(name for name, _ in device.others_by_name)
        reason = found.reason.replace(f": {named}", "") if named else found.reason
        found = replace(found, device=replace(device, others_by_name=()), reason=reason)
    return _record(found, "gpumagic has explained no error in this notebook")


def _holders() -> dict[str, Any]:
    """Return an answer that lists the holders of this kernel's GPU memory, the largest first."""
    from gpumagic.display.units import size
    from gpumagic.frameworks.known import started

    if "torch" not in sys.modules and not started():
        return _record(None, "neither torch nor JAX is in use: this notebook has nothing on a GPU")
    from gpumagic.memory.holders_by_name import memory

    report = memory()
    lines = []
    for device in report.devices:
        rows = [f"{row.path} {size(row.nbytes)}" for row in device.holders[:_NAMED]]
        more = f": {', '.join(rows)}" if rows else ""
        allocated = f"{size(device.allocated)} of {size(device.total)} allocated"
        lines.append(f"{device.device} {allocated}{more}")
    return _record(report, "") | {"text": "; ".join(lines) or "no GPU in this notebook"}


def _record(record: Any, without: str) -> dict[str, Any]:
    """Return a record as JSON, with a short text. If `record` is None, the text is `without`."""
    from gpumagic.display.table import as_json

    if record is None:
        return {"record": None, "text": without}
    first, *more = map(str.strip, str(record).splitlines())
    fixes = [line for line in more if line.startswith(("fix:", "→"))]
    return as_json(record) | {"text": " · ".join([first, *fixes])}
