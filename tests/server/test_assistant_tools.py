"""The tools for assistants, on a real server with a real kernel; an MCP client where there is one.

They tell what the magics tell, read-only, while a cell runs too, and name nobody else.
"""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from waiting import ANSWER_S

from gpumagic.errors import GpuError
from gpumagic.server import assistant_tools
from gpumagic.server.assistant_tools import TOOLS, gpu_last_error, gpu_last_report, gpu_memory
from gpumagic.telemetry import ProcessSample

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
CELLS = [
    "%load_ext gpumagic",
    "%gpus --virtual 2 --memory 1GiB\nimport torch\nfrom gpumagic import last_report, memory",
    "%%ongpu 1\nx = torch.ones(2**20)\nfor _ in range(3): x.sum().item()",
    "torch.ones(3) @ x[:3]",
]
OWN_REPORT = "r = last_report(); print([r.seconds, r.ledger.waits, r.memory[0].peak])"


class Notebook:
    """A notebook of the server with a kernel that runs cells."""

    def __init__(self, app, model, client):
        self.app, self.model, self.client = app, model, client

    async def run(self, code):
        """Run a cell and return what it printed."""
        printed = []
        await self.client.execute_interactive(
            code, timeout=ANSWER_S, output_hook=lambda message: printed.append(message["content"])
        )
        return "".join(content.get("text", "") for content in printed)


@pytest.fixture
def blocking_server(jp_server_config):
    """A server whose kernel managers have clients that block."""
    manager = "jupyter_server.services.kernels.kernelmanager.MappingKernelManager"
    jp_server_config["ServerApp"]["kernel_manager_class"] = manager


@pytest.mark.filterwarnings("ignore:The synchronous MappingKernelManager")
async def test_a_server_with_blocking_clients_is_answered_too(
    blocking_server, jp_serverapp, jp_asyncio_loop
):
    model = await jp_serverapp.session_manager.create_session(
        "work/train.ipynb", "train.ipynb", "notebook", "python3"
    )
    try:
        with pytest.raises(GpuError, match=r"train.ipynb has not loaded gpumagic; type %load_ext"):
            await gpu_memory()
    finally:
        await jp_serverapp.session_manager.delete_session(model["id"])


@pytest.fixture
def notebook(jp_serverapp, jp_asyncio_loop):
    """``work/train.ipynb``, where no cell has run."""
    sessions = jp_serverapp.session_manager

    async def begin():
        made = await sessions.create_session(
            "work/train.ipynb", "train.ipynb", "notebook", "python3"
        )
        client = jp_serverapp.kernel_manager.get_kernel(made["kernel"]["id"]).client()
        client.start_channels()
        await client.wait_for_ready(timeout=ANSWER_S)
        return Notebook(jp_serverapp, made, client)

    found = jp_asyncio_loop.run_until_complete(begin())
    yield found
    found.client.stop_channels()
    jp_asyncio_loop.run_until_complete(sessions.delete_session(found.model["id"]))


async def test_they_tell_what_the_magics_tell(notebook):
    with pytest.raises(GpuError, match=r"train.ipynb has not loaded gpumagic; type %load_ext"):
        await gpu_memory()
    await notebook.run(CELLS[0])
    assert (await gpu_last_report())["text"] == "no %%ongpu cell has run in this notebook"
    assert (await gpu_memory())["text"].endswith("this notebook has nothing on a GPU")
    for cell in CELLS[1:]:
        await notebook.run(cell)

    report = await gpu_last_report("train.ipynb")
    own = json.loads(await notebook.run(OWN_REPORT))
    (entry,), (memory,) = report["ledger"]["entries"], report["memory"]
    assert own == [report["seconds"], entry["count"], memory["peak_bytes"]]
    assert report["notebook"] == "work/train.ipynb"
    assert report["text"].startswith("cuda:1 (virtual) · ")
    assert "\n" not in report["text"]

    held = await gpu_memory("work/train.ipynb")
    own = json.loads(await notebook.run("print([d.allocated for d in memory().devices])"))
    assert [gpu["allocated_bytes"] for gpu in held["devices"]] == own == [0, 2**22]
    assert [(row["path"], row["bytes"]) for row in held["devices"][1]["holders"]] == [("x", 2**22)]
    assert held["text"].endswith("cuda:1 4.0 MiB of 1.0 GiB allocated: x 4.0 MiB")

    error = await gpu_last_error()
    assert [operand["name"] for operand in error["operands"]] == ["torch.ones(3)", "x"]
    assert error["text"].startswith(
        "between devices · In [4], line 1: torch.ones(3) @ x[:3] · fix:"
    )

    # The cell waits for a file, so that it runs while it is asked.
    gate = Path(notebook.app.root_dir) / "gate"
    waits = (
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('on')"
    )
    running = asyncio.ensure_future(notebook.run(waits))
    while not (busy := await gpu_memory())["text"].startswith("a cell is running"):
        pass
    assert busy["record"] is None
    assert (await gpu_last_report())["seconds"] == report["seconds"]
    gate.touch()
    assert await running == "on\n"

    with pytest.raises(GpuError, match=r"0 notebooks match 'x'; open notebooks: work/train.ipynb"):
        await gpu_memory("x")


async def test_a_path_is_that_notebook_even_if_another_has_its_name(hub, monkeypatch):
    paths = {"1": "train.ipynb", "2": "old/train.ipynb", "3": "other.ipynb"}
    asked = []

    async def reply(name, *_):
        asked.append(name)
        return {"comms": {"id": {}}}

    monkeypatch.setattr(assistant_tools, "_reply", reply)
    monkeypatch.setattr(hub.kernels, "managers", lambda: dict.fromkeys(paths))
    monkeypatch.setattr(hub.kernels, "notebook", paths.get)
    monkeypatch.setattr(hub.kernels, "refresh", AsyncMock())
    for name in ("train.ipynb", "old/train.ipynb", "other.ipynb"):
        assert (await gpu_memory(name))["notebook"] == name
    with pytest.raises(GpuError, match="3 notebooks match ''"):
        await gpu_memory()
    paths["1"] = "new/train.ipynb"
    with pytest.raises(GpuError, match="2 notebooks match"):
        await gpu_memory("train.ipynb")


async def test_the_status_names_this_servers_notebooks_only(machine, hub, monkeypatch):
    own = ProcessSample("GPU-0", 7, 2**30, kernel="mine", notebook="train.ipynb")
    other = ProcessSample(
        "GPU-0", 8, 2**31, name="secret.py", user="alice", notebook="secret.ipynb"
    )
    machine.processes = (own, other)
    monkeypatch.setattr(hub.kernels, "notebook", {"mine": "train.ipynb"}.get)
    status = await assistant_tools.gpu_status()
    (gpu,) = status["gpus"]
    assert gpu["notebooks"] == [{"notebook": "train.ipynb", "memory_bytes": 2**30}]
    assert (gpu["others_memory_bytes"], gpu["memory_total_bytes"]) == (2**31, 80 * 2**30)
    assert status["text"] == "H100: 1.0 / 80.0 GiB"
    assert not {"alice", "secret"} & set(json.dumps(status).replace(".", '"').split('"'))


def test_the_entry_point_names_functions():
    group = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    (target,) = group["jupyter_server_mcp.tools"].values()
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is TOOLS
    for tool in TOOLS:
        module, _, name = tool.partition(":")
        assert "Read-only" in getattr(importlib.import_module(module), name).__doc__


@pytest.mark.slow
async def test_an_mcp_client_lists_and_calls_them(jp_serverapp, notebook):
    reason = "jupyter_server_mcp is not installed: pip install jupyter-server-mcp"
    mcp = pytest.importorskip("jupyter_server_mcp.extension", reason=reason)
    from fastmcp import Client

    extension = mcp.MCPExtensionApp(mcp_port=0, serverapp=jp_serverapp, use_tool_discovery=False)
    extension.mcp_tools = TOOLS
    for cell in CELLS:
        await notebook.run(cell)
    await extension.start_extension()
    try:
        async with Client(f"http://127.0.0.1:{extension.mcp_server_instance.port}/mcp") as client:
            names = {tool.name for tool in await client.list_tools()}
            assert names == {tool.partition(":")[2] for tool in TOOLS}
            for name in names:
                told = (await client.call_tool(name, {})).data
                assert told["text"]
            held = (await client.call_tool("gpu_memory", {"notebook": "train.ipynb"})).data
            assert held["devices"][1]["allocated_bytes"] == 2**22
            with pytest.raises(Exception, match="0 notebooks match 'x'"):
                await client.call_tool("gpu_memory", {"notebook": "x"})
    finally:
        await extension.stop_extension()
