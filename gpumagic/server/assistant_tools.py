"""Define tools for jupyter-server-mcp, so that AI assistants can ask about the GPUs.

Every local process can call the tools, because the port of jupyter-server-mcp has no token. For
this reason the tools only read. They also do not name notebooks or processes of other users. The
tools use a kernel's control channel, so that they do not interrupt a running cell.
"""

from collections import Counter
from pathlib import PurePosixPath
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session
from jupyter_server.serverapp import ServerApp

from gpumagic.display.units import share
from gpumagic.errors import GpuError
from gpumagic.server.hub import Hub
from gpumagic.server.routes import HUB
from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

TOOLS = [
    f"{__name__}:{name}"
    for name in ("gpu_status", "gpu_memory", "gpu_last_report", "gpu_last_error")
]
"""Paths of the tools. The entry point in the group ``jupyter_server_mcp.tools`` is this list."""

ANSWER_S = 5.0  # seconds to wait for a kernel's answer


async def gpu_status() -> dict[str, Any]:
    """List the GPUs of this machine: memory, load, temperature, and this server's notebooks on
    them. Read-only."""
    hub = _hub()
    snapshot = await hub.fresh()
    gpus = [_gpu(gpu, snapshot.processes, hub) for gpu in snapshot.gpus]
    problems = [problem.cause for problem in snapshot.problems]
    lines = [
        f"{gpu.name}: {share(gpu.memory_used, gpu.memory_total)}"
        + ("" if gpu.utilization is None else f", {gpu.utilization:.0f} %")
        for gpu in snapshot.gpus
    ]
    text = "; ".join([*lines, *problems]) or "this machine has no GPU"
    return {"gpus": gpus, "problems": problems, "text": text}


async def gpu_memory(notebook: str = "") -> dict[str, Any]:
    """List the variables of a notebook that hold GPU memory, with their bytes, the largest first.

    `notebook` is the notebook's path or name, such as "train.ipynb"; optional if only one notebook
    is open. There is no list while a cell runs. Read-only.
    """
    return await _ask(notebook, "memory")


async def gpu_last_report(notebook: str = "") -> dict[str, Any]:
    """Describe the last %%ongpu cell of a notebook: its device, seconds, peak memory, and its
    copies and waits by line. `notebook` is as for gpu_memory. Read-only."""
    return await _ask(notebook, "report")


async def gpu_last_error(notebook: str = "") -> dict[str, Any]:
    """Explain the last GPU error of a notebook (tensors on different devices, or out of memory)
    and suggest a fix. `notebook` is as for gpu_memory. Read-only."""
    return await _ask(notebook, "error")


def _hub() -> Hub:
    app = ServerApp.instance() if ServerApp.initialized() else None
    hub: Hub | None = app.web_app.settings.get(HUB) if app else None
    if hub is None:
        raise GpuError(
            "gpumagic is off in this server; type jupyter server extension enable gpumagic"
        )
    return hub


def _gpu(gpu: GpuSample, processes: tuple[ProcessSample, ...], hub: Hub) -> dict[str, Any]:
    held = Counter[str]()  # bytes by notebook of this server; "" for all other processes
    for process in processes:
        if process.uuid == gpu.uuid and process.memory is not None:
            held[hub.kernels.notebook(process.kernel or "") or ""] += process.memory
    others = held.pop("", 0)
    return {
        "index": gpu.virtual_ordinal if gpu.virtual else gpu.index,
        "name": gpu.name,
        "virtual": gpu.virtual,
        "memory_used_bytes": gpu.memory_used,
        "memory_total_bytes": gpu.memory_total,
        "utilization_percent": gpu.utilization,
        "temperature_celsius": gpu.temperature,
        "power_watts": gpu.power,
        "notebooks": [{"notebook": name, "memory_bytes": size} for name, size in held.items()],
        "others_memory_bytes": others,
    }


async def _ask(notebook: str, about: str) -> dict[str, Any]:
    hub = _hub()
    await hub.kernels.refresh()
    managers = hub.kernels.managers()
    names = {kernel: hub.kernels.notebook(kernel) or kernel for kernel in managers}
    found = [k for k, n in names.items() if n == notebook] or [
        k for k, n in names.items() if notebook in ("", PurePosixPath(n).name)
    ]
    if len(found) != 1:
        there = ", ".join(names.values()) or "none"
        raise GpuError(f"{len(found)} notebooks match {notebook!r}; open notebooks: {there}")
    name, manager = names[found[0]], managers[found[0]]
    # Ask for comms first, because a kernel without gpumagic logs an error for "gpumagic_request".
    loaded = await _reply(name, manager, "comm_info_request", {"target_name": "gpumagic"})
    if not loaded["comms"]:
        raise GpuError(f"{name} has not loaded gpumagic; type %load_ext gpumagic there")
    return {"notebook": name, **await _reply(name, manager, "gpumagic_request", {"about": about})}


async def _reply(name: str, manager: Any, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a kernel's reply on its control channel."""
    # `manager.client()` may block. A new session receives only the replies to its own requests.
    session = Session(config=manager.session.config, key=manager.session.key)
    client = AsyncKernelClient(session=session)
    client.load_connection_info(manager.get_connection_info())
    client.start_channels(shell=False, iopub=False, stdin=False, hb=False)
    try:
        request = session.msg(kind, content)
        client.control_channel.send(request)
        while True:
            reply = await client.get_control_msg(timeout=ANSWER_S)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                answer: dict[str, Any] = reply["content"]
                return answer
    except Empty:
        raise GpuError(f"{name} did not answer within {ANSWER_S:.0f} s; ask again") from None
    finally:
        client.stop_channels()
