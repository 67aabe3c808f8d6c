"""Other hosts of kernels: their GPUs are in the panel, below their names."""

from __future__ import annotations

import importlib.metadata

import pytest
from lab import Gateway, Lab
from playwright.sync_api import expect

HOST, GIB = "node-7", 2**30
GPU = {"gpus": 1, "gpu.0.uuid": "GPU-far", "gpu.0.name": "NVIDIA L40S"}
STATUS = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        tuple(map(int, importlib.metadata.version("jupyterlab").split(".")[:2])) < (4, 5),
        reason="before 4.5 JupyterLab takes any answer of a kernel for the end of its cell",
    ),
]


@pytest.fixture
def gateway(tmp_path, driver):
    """On another host, which has one GPU."""
    pytest.importorskip("kernel_gateway", reason="jupyter_kernel_gateway is not installed")
    made = Gateway(tmp_path, driver, HOST)
    made.machine(GPU)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def lab(request, tmp_path_factory, driver):
    """Its own host has two GPUs; kernels run behind the gateway of a test that has one."""
    behind = "gateway" in request.fixturenames
    options = request.getfixturevalue("gateway").options if behind else ()
    made = Lab(tmp_path_factory.mktemp("lab"), driver, *options)
    made.start()
    yield made
    made.stop()


def test_a_kernel_behind_a_gateway_brings_its_host(gateway, lab, new_view, tmp_path):
    view, pid = new_view, tmp_path / "pid"
    load = f"%load_ext gpumagic\nimport os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))"
    lab.write("far.ipynb", [load, "while True: time.sleep(0.05)"])
    view.load()
    view.open_panel()
    view.open_notebook("far.ipynb")
    view.run_cell(0)
    view.shows("L40S")
    names = view.panel.locator(".machine-head h2:visible").all_inner_texts()
    assert names[-1] == HOST != names[0]
    # This notebook is who holds memory there, also while its cell runs, which goes on running.
    view.run_cell(1)
    view.wait_until(lambda: view.page.evaluate(STATUS) == "busy")
    held = {"gpu.0.used": 4 * GIB, "gpu.0.compute": f"{pid.read_text()}:{3 * GIB}"}
    gateway.machine(GPU | held)
    view.shows("far.ipynb")
    expect(view.panel.locator(".who.own").first).to_be_visible()
    assert view.page.evaluate(STATUS) == "busy"
    view.close_documents()
    view.hides("L40S")
