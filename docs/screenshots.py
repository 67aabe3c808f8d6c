"""Make the README's pictures from a real JupyterLab in a real Chromium: `make screenshots`.

Two notebooks run on virtual GPUs; the first one's `%gpus` sees the second as another holder. Each
picture is taken in JupyterLab's light and in its dark theme.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
TRAIN = [
    "%load_ext gpumagic",
    "import torch",
    "%gpus --virtual 1 --memory 8GiB",
    "weights = torch.ones(700 * 2**20 // 4, device='cuda')",
]
MAIN = [
    "%load_ext gpumagic",
    "%gpus --virtual 2",
    "import torch\nfrom torch import nn\n"
    "X, y = torch.randn(4096, 784), torch.randint(10, (4096,))\n"
    "net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))\n"
    "optimizer = torch.optim.AdamW(net.parameters())",
    "%%ongpu 1\n"
    "for epoch in range(20):\n"
    "    optimizer.zero_grad()\n"
    "    loss = nn.functional.cross_entropy(net(X), y)\n"
    "    loss.backward()\n"
    "    optimizer.step()\n"
    "loss",
    "activations = [torch.empty(2**30 // 4, device='cuda:0') for _ in range(5)]\n%gpus",
    "%%ongpu 7\nnet(X)",
]
GPUS, REPORT = 4, 3
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def write(path: Path, cells: list[str]) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    nbformat.write(book, path)


@contextmanager
def jupyterlab(folder: Path, theme: str):
    """A JupyterLab of its own in `folder`; yields its address."""
    token, port = secrets.token_hex(16), 8800 + os.getpid() % 1000
    settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    overrides = {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
        "@jupyterlab/apputils-extension:themes": {"theme": theme},
    }
    settings.write_text(json.dumps(overrides))
    home = folder / "notebooks"
    home.mkdir()
    write(home / "train.ipynb", TRAIN)
    write(home / "gpus.ipynb", MAIN)
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "GPUMAGIC_RUNTIME_DIR": str(folder / "state"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    server = subprocess.Popen(command, cwd=home, env=env, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api?token={token}").close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"{address}/lab?token={token}"
    finally:
        server.terminate()
        server.wait()


def run_notebook(page: Page, name: str, cells: int) -> None:
    page.evaluate(
        """async name => {
            const app = window.jupyterapp;
            const panel = await app.commands.execute('docmanager:open', {path: name});
            await panel.context.ready;
            await panel.sessionContext.ready;
            void app.commands.execute('notebook:run-all-cells');
        }""",
        name,
    )
    page.wait_for_function(
        """([name, cells]) => {
            const panel = [...window.jupyterapp.shell.widgets('main')]
                .find(w => w.context && w.context.path === name);
            const done = [...panel.content.widgets]
                .filter(c => c.model.type === 'code' && c.model.executionCount !== null);
            return done.length === cells;
        }""",
        arg=[name, cells],
        timeout=120_000,
    )


def shoot(page: Page, name: str, theme: str, first: int, last: int) -> Path:
    """A picture of the cells from `first` to `last`."""
    boxes = []
    for n in (first, last):
        cell = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").nth(n)
        cell.scroll_into_view_if_needed()
        boxes.append(cell.bounding_box())
    top, bottom = boxes[0]["y"], boxes[1]["y"] + boxes[1]["height"]
    path = IMAGES / f"{name}-{theme}.png"
    clip = {"x": boxes[0]["x"], "y": top, "width": boxes[0]["width"], "height": bottom - top}
    page.screenshot(path=path, clip=clip)
    return path


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
        for theme in ("light", "dark"):
            with (
                tempfile.TemporaryDirectory() as folder,
                jupyterlab(Path(folder), f"JupyterLab {theme.capitalize()}") as address,
            ):
                page = browser.new_page(
                    viewport={"width": 1180, "height": 1500}, device_scale_factor=2
                )
                page.goto(address)
                page.wait_for_function("window.jupyterapp && window.jupyterapp.restored")
                page.evaluate("window.jupyterapp.restored")
                page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
                run_notebook(page, "train.ipynb", len(TRAIN))
                run_notebook(page, "gpus.ipynb", len(MAIN))
                page.wait_for_timeout(1500)
                page.locator(".gpumagic-report summary").first.click()
                print(shoot(page, "report", theme, REPORT, REPORT))
                print(shoot(page, "gpus", theme, GPUS, GPUS))
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
