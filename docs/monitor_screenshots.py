"""Make the pictures of the live monitor: `make screenshots`.

A real JupyterLab in a real Chromium. The GPUs are played: by the stand-in for NVIDIA's library that
the tests have, and in the widget's notebook by virtual ones.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from played_machines import instincts, many, training, two_cards, workstation
from playwright.sync_api import Browser, Page
from studio import (
    IMAGES,
    ROOT,
    Gateway,
    Lab,
    View,
    driver,
    in_both_themes,
    laboratory,
    opened,
    run,
    run_notebook,
    running,
    theme,
)

TRAIN = [
    "import time, torch\nfrom torch import nn\nnet = nn.TransformerEncoderLayer(512, 8)",
    "for epoch in range(3):\n    time.sleep(3.2)  # train(net)\n    print('epoch', epoch)",
    "time.sleep(4)  # evaluate(net)",
    "time.sleep(300)  # train(net, epochs=90)",
]
# Both run torch's CUDA code, on the stand-in CUDA runtime.
NETWORK = [
    "%load_ext gpumagic\nimport torch\nfrom torch import nn\n"
    "from sklearn.datasets import load_digits",
    "images, labels = map(torch.tensor, load_digits(return_X_y=True))\n"
    "tokens = images.long() + 17 * torch.arange(64)\n"
    "layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)\n"
    "net = nn.Sequential(nn.Embedding(17 * 64, 64), layer)\n"
    "head = nn.Linear(64, 10)\n"
    "bank = torch.rand(420_000, 1024, device='cuda:1')",
    "def train(net, epochs, batch=64):\n"
    "    adam = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)\n"
    "    for epoch in range(epochs):\n"
    "        for x, y in zip(tokens.split(batch), labels.split(batch)):\n"
    "            loss = nn.functional.cross_entropy(head(net(x).mean(1)), y)\n"
    "            adam.zero_grad()\n            loss.backward()\n            adam.step()\n"
    "        print(f'epoch {epoch + 1}: loss {loss:.3f}')",
    "%%ongpu 1\ntrain(net, epochs=3)",
    "%%ongpu 1\ntrain(net, epochs=90)",
]
EXPLORING = ["import torch\nfeatures = torch.rand(90_000, 1024, device='cuda:0')"]
EXPLORE = ["import torch\nframe = torch.zeros(1000)"]
FIRST = (
    "%%ongpu 1\nimport torch\nimages = torch.randn(64, 3, 224, 224)\n"
    "filters = torch.randn(16, 3, 7, 7)\ntorch.conv2d(images, filters).shape"
)
LIVE = [
    "%load_ext gpumagic",
    "%gpus --virtual 2",
    "m = %gpus --live",
    "%%ongpu 1\nimport torch\na = torch.randn(1500, 1500)\nkept = []\n"
    "for step in range(60):\n    a = torch.tanh(a @ a.T / 1500)\n"
    "    if step % 6 == 0: kept.append(torch.zeros(2**28))",
    "%%ongpu 0\nb = torch.randn(1200, 1200)\nfor step in range(60):\n    b = b @ b.T / b.norm()",
]

HELD = [
    "%load_ext gpumagic\n%gpus --virtual 1 --memory 4GiB\nimport torch\nfrom torch import nn",
    "layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)\n"
    "net = nn.TransformerEncoder(layer, 6).cuda()\n"
    "optimizer = torch.optim.AdamW(net.parameters())",
    "batches = [torch.randn(8, 64, 512, device='cuda') for _ in range(24)]",
    "history = []\nfor batch in batches[:2]:\n    loss = net(batch).pow(2).mean()\n"
    "    loss.backward()\n    optimizer.step()\n    history.append(net(batch))",
    "%gpumem",
]


def pid_of(lab: Lab, notebook: str) -> int:
    """The pid of a notebook's kernel, by its connection file."""
    sessions = json.loads(lab.request("api/sessions"))
    kernel = next(s["kernel"]["id"] for s in sessions if s["path"] == notebook)
    found = subprocess.run(["pgrep", "-f", f"kernel-{kernel}"], capture_output=True, check=True)
    return int(found.stdout.split()[0])


def the_panel(view: View, height: int | None = None) -> Callable[[Path], object]:
    def shoot(path: Path) -> None:
        box = view.panel.bounding_box()
        assert box is not None
        box["height"] = min(box["height"], height or box["height"])
        view.page.screenshot(path=path, clip=box)

    return shoot


def widen(page: Page, pixels: int) -> None:
    """Drag the panel's edge."""
    handle = page.locator("#jp-main-split-panel > .lm-SplitPanel-handle:not(.lm-mod-hidden)").last
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - pixels, y, steps=8)
    page.mouse.up()


@contextmanager
def somebody_else(user: str = "alice") -> Iterator[int]:
    """The pid of another user's process; needs root, and that user: `useradd alice`."""
    with subprocess.Popen(["sleep", "600"], user=user) as other:
        try:
            yield other.pid
        finally:
            other.kill()


def play(lab: Lab, view: View, seconds: float, machine: Callable[[float], dict[str, object]]):
    """Let the machine live for a while."""
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds:
        lab.machine(machine(now))
        view.page.wait_for_timeout(200)


@contextmanager
def busy_lab(
    browser: Browser, count: int, width: int, height: int, seconds: float = 25
) -> Iterator[tuple[Lab, View]]:
    """A page with the panel open and three holders at work, after some time."""
    nobody = dict.fromkeys(("train", "explore", "other"), 1)
    with (
        laboratory(many(count, nobody)(0)) as lab,
        opened(lab, browser, width, height, f"pictures-{count}-{width}") as view,
        somebody_else() as other,
    ):
        for name, cells in (("train", TRAIN), ("explore", EXPLORE)):
            lab.write(f"{name}.ipynb", cells)
        view.open_panel()
        view.set(period=0.25, history=0.5, memoryAlert=False)
        view.page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        for name in ("explore.ipynb", "train.ipynb"):
            view.open_notebook(name)
            view.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        pids = {name: pid_of(lab, f"{name}.ipynb") for name in ("train", "explore")}
        play(lab, view, seconds, many(count, pids | {"other": other}))
        yield lab, view


def to_width(view: View, pixels: int) -> None:
    """Make the panel so wide."""
    box = view.panel.bounding_box()
    assert box is not None
    widen(view.page, pixels - box["width"])
    view.page.wait_for_timeout(600)


@contextmanager
def cuda_laboratory(machine: dict[str, object]) -> Iterator[Lab]:
    """A JupyterLab whose kernels have torch for CUDA, on the stand-in CUDA runtime."""
    python = ROOT / ".venv-cuda" / "bin" / "python"
    spec = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {
            "STANDIN_CUDA_DEVICES": "2",
            "STANDIN_CUDA_MEMORY": str(12 * 1024),
            "OMP_NUM_THREADS": "2",
        },
    }
    with driver() as (folder, library):
        kernel = folder / "first" / "kernels" / "python3" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        kernel.write_text(json.dumps(spec))
        path = os.pathsep.join([str(folder / "first"), os.environ.get("JUPYTER_PATH", "")])
        with patch.dict(os.environ, JUPYTER_PATH=path):
            made = Lab(folder, library, host="ml-box")
        with running(made, machine) as lab:
            yield lab


def monitor(browser: Browser) -> None:
    """The first picture of the README: a network trains on a GPU; somebody else has the other."""
    with (
        cuda_laboratory(two_cards({})(0)) as lab,
        opened(lab, browser, 1320, 800, "pictures-monitor") as view,
        somebody_else() as other,
    ):
        page = view.page
        lab.write("train.ipynb", NETWORK)
        lab.write("explore.ipynb", EXPLORING)
        view.open_panel()
        widen(page, 100)
        view.set(period=0.5, history=1)
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        run_notebook(view, "explore.ipynb", len(EXPLORING))
        view.open_notebook("train.ipynb")
        pids = {name: pid_of(lab, f"{name}.ipynb") for name in ("train", "explore")}
        machine = two_cards(pids | {"other": other})
        lab.machine(machine(0))
        last = len(NETWORK) - 1
        page.evaluate(f"window.jupyterapp.shell.currentWidget.content.activeCellIndex = {last}")
        page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-above')")
        play(lab, view, 40, machine)
        view.panel.get_by_role("button", name="Variables").first.click()
        view.panel.get_by_text("as of In").wait_for()
        page.evaluate("void window.jupyterapp.commands.execute('notebook:run-cell')")
        play(lab, view, 14, lambda now: machine(now + 40))
        in_both_themes(page, "monitor", lambda path: page.screenshot(path=path))


def sidebar(browser: Browser) -> None:
    with (
        laboratory(training(1, 1, 1)(0)) as lab,
        opened(lab, browser, 1320, 800, "pictures") as view,
        somebody_else() as other,
    ):
        page = view.page
        lab.write("train.ipynb", TRAIN)
        lab.write("explore.ipynb", EXPLORE)
        view.open_panel()
        widen(page, 80)
        view.set(period=0.25, history=0.5)
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        for name in ("explore.ipynb", "train.ipynb"):
            view.open_notebook(name)
            page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        machine = training(pid_of(lab, "train.ipynb"), pid_of(lab, "explore.ipynb"), other)
        play(lab, view, 34, machine)
        view.panel.get_by_role("button", name="Details").nth(1).click()
        page.set_viewport_size({"width": 1320, "height": 830})
        play(lab, view, 4, machine)
        in_both_themes(page, "sidebar", the_panel(view))
        status = page.locator("#jp-main-statusbar")
        in_both_themes(page, "status", lambda path: status.screenshot(path=path))


def counts(browser: Browser) -> None:
    for count, height in ((1, 285), (2, 480), (4, 480), (8, 620), (64, 876)):
        with busy_lab(browser, count, 1100, 940) as (_, view):
            to_width(view, 300)
            in_both_themes(view.page, f"gpus-{count}", the_panel(view, height))
            if count != 2:
                continue
            for width in (250, 500):
                to_width(view, width)
                in_both_themes(view.page, f"panel-{width}", the_panel(view, height))


def narrow(browser: Browser) -> None:
    """Both side bars open in a small window."""
    with busy_lab(browser, 8, 1280, 760, 12) as (_, view):
        view.page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        view.page.wait_for_timeout(500)
        in_both_themes(view.page, "narrow", lambda path: view.page.screenshot(path=path))


def page(browser: Browser) -> None:
    """All GPUs in one chart, in the main area."""
    for count, height in ((8, 1010), (64, 870)):
        with busy_lab(browser, count, 1100, height, 1) as (lab, view), somebody_else() as other:
            view.page.evaluate("window.jupyterapp.commands.execute('gpumagic:page')")
            view.page.evaluate("window.jupyterapp.shell.collapseRight()")
            pids = {name: pid_of(lab, f"{name}.ipynb") for name in ("train", "explore")}
            play(lab, view, 25, many(count, pids | {"other": other}))
            found = view.page.locator("#gpumagic-page")
            in_both_themes(
                view.page, f"page-{count}", lambda path, found=found: found.screenshot(path=path)
            )


def notebooks(browser: Browser) -> None:
    """Three notebooks with virtual GPUs of their own."""
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1100, 700, "pictures-notebooks") as view,
    ):
        view.open_panel()
        for name, gpus, held in (("explore", 4, 3), ("data", 1, 1), ("train", 2, 5)):
            cells = [
                f"%load_ext gpumagic\n%gpus --virtual {gpus} --memory 8GiB\nimport torch",
                f"kept = torch.ones({held} * 2**28, device='cuda')",
            ]
            lab.write(f"{name}.ipynb", cells)
            run_notebook(view, f"{name}.ipynb", len(cells))
        to_width(view, 300)
        view.page.wait_for_timeout(4000)
        in_both_themes(view.page, "notebooks", the_panel(view, 480))


def hosts(browser: Browser) -> None:
    """JupyterLab on one host, its kernels behind a gateway on another."""
    uuids = {f"gpu.{n}.uuid": f"GPU-7c1e0b4{n}-0000-4000-8000-000000000000" for n in range(2)}
    with (
        driver() as (folder, library),
        running(Gateway(folder, library, "gpu-node-07"), training(1, 1, 1)(0) | uuids) as gateway,
        laboratory(workstation(1)(0), *gateway.options, host="ml-desk-03") as lab,
        opened(lab, browser, 1100, 900, "pictures-hosts") as view,
        somebody_else() as other,
    ):
        view.open_panel()
        view.set(period=0.25, history=0.5)
        view.page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        for name, cells in (("explore", EXPLORE), ("train", TRAIN)):
            lab.write(f"{name}.ipynb", ["%load_ext gpumagic", *cells])
            view.open_notebook(f"{name}.ipynb")
            view.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        far = training(pid_of(lab, "train.ipynb"), pid_of(lab, "explore.ipynb"), other)
        near = workstation(other)
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < 30:
            lab.machine(near(now))
            gateway.machine(far(now) | uuids)
            view.page.wait_for_timeout(200)
        to_width(view, 300)
        view.page.wait_for_timeout(1500)
        in_both_themes(view.page, "hosts", the_panel(view, 640))


def amd(browser: Browser) -> None:
    """A server with eight of AMD's, whose files lie below a folder."""
    with tempfile.TemporaryDirectory() as name, somebody_else() as other:
        root = Path(name)
        play_amd = instincts(root)
        with (
            patch.dict(os.environ, GPUMAGIC_SOURCES=f"amd:{root}"),
            laboratory(None, host="ml-amd-02") as lab,
            opened(lab, browser, 1100, 940, "pictures-amd") as view,
        ):
            for notebook, cells in (("train", TRAIN), ("explore", EXPLORE)):
                lab.write(f"{notebook}.ipynb", cells)
            view.open_panel()
            view.set(period=0.25, history=0.5, memoryAlert=False)
            view.page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
            for notebook in ("explore", "train"):
                view.open_notebook(f"{notebook}.ipynb")
                view.page.evaluate(
                    "void window.jupyterapp.commands.execute('notebook:run-all-cells')"
                )
            pids = {notebook: pid_of(lab, f"{notebook}.ipynb") for notebook in ("train", "explore")}
            begin = time.monotonic()
            while (now := time.monotonic() - begin) < 25:
                play_amd(now, pids | {"other": other})
                view.page.wait_for_timeout(200)
            to_width(view, 360)
            view.panel.locator(".gpu > .head .open").first.click()
            view.panel.get_by_role("button", name="Details").first.click()
            view.page.wait_for_timeout(1500)
            in_both_themes(view.page, "amd", the_panel(view, 728))


def holdings(browser: Browser) -> None:
    """The variables of a notebook on its GPU."""
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1320, 760, "pictures-holdings") as view,
    ):
        page = view.page
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        view.open_panel()
        widen(page, 60)
        lab.write("train.ipynb", HELD)
        run_notebook(view, "train.ipynb", len(HELD))
        view.panel.get_by_role("button", name="Variables").first.click()
        view.panel.get_by_text("as of In").wait_for()
        page.wait_for_timeout(2500)
        in_both_themes(page, "holdings", lambda path: page.screenshot(path=path))


def doctor(browser: Browser) -> None:
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1000, 700, "pictures-none") as view,
    ):
        lab.write("train.ipynb", [])
        view.open_notebook("train.ipynb")
        view.open_panel()
        widen(view.page, 130)
        view.shows("NVIDIA")
        # What follows says where this machine has its Python.
        in_both_themes(view.page, "doctor", the_panel(view, 447))


def first(browser: Browser) -> None:
    """From an empty JupyterLab without a GPU to the first placed cell, as a strip of three."""
    for look in ("light", "dark"):
        with (
            laboratory(None) as lab,
            opened(lab, browser, 880, 560, f"pictures-first-{look}") as view,
        ):
            page = view.page
            theme(page, look)
            page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
            frames = []

            def shoot(caption: str, page: Page = page, frames: list[str] = frames) -> None:
                page.wait_for_timeout(1500)
                taken = base64.b64encode(page.screenshot()).decode()
                frames.append(
                    f'<figure><img src="data:image/png;base64,{taken}">{caption}</figure>'
                )

            view.choose("View", "Show GPUs")
            widen(page, 60)
            view.shows("No GPU is visible here")
            shoot("1. View → Show GPUs")
            view.panel.get_by_role("button", name="New notebook with 2 virtual GPUs").click()
            view.hides("No GPU is visible here")
            view.shows("Utilization")
            shoot("2. New notebook with 2 virtual GPUs")
            page.evaluate("window.jupyterapp.commands.execute('notebook:enter-edit-mode')")
            page.keyboard.insert_text(FIRST)
            page.keyboard.press("Shift+Enter")
            page.locator(".gm-report").scroll_into_view_if_needed()
            page.wait_for_timeout(6000)  # what the button said has gone
            shoot("3. %%ongpu 1 on top of a cell, Shift+Enter")
            color = "#111" if look == "light" else "#eee"
            page.set_viewport_size({"width": 1800, "height": 440})
            page.set_content(
                f'<body style="margin:0;display:flex;gap:15px;color:{color};font:18px sans-serif;'
                f'background:transparent">{"".join(frames)}<style>figure {{ margin: 0; flex: 1 }}'
                "img { box-sizing: border-box; width: 100%; border: 1px solid #8888 }"
                "</style>"
            )
            path = IMAGES / f"first-{look}.png"
            box = page.locator("body").bounding_box()
            assert box is not None
            page.screenshot(path=path, clip=box, omit_background=True)
            print(path.relative_to(ROOT))


def widget(browser: Browser) -> None:
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1100, 1300, "pictures-widget") as view,
    ):
        page = view.page
        lab.write("live.ipynb", LIVE)
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        run_notebook(view, "live.ipynb", len(LIVE))
        page.wait_for_timeout(2500)
        cell = page.locator(".jp-NotebookPanel .jp-Cell").nth(2)
        cell.scroll_into_view_if_needed()
        in_both_themes(page, "widget", lambda path: cell.screenshot(path=path))


if __name__ == "__main__":
    scenes = (
        monitor,
        sidebar,
        counts,
        narrow,
        page,
        notebooks,
        hosts,
        amd,
        holdings,
        doctor,
        first,
        widget,
    )
    run({scene.__name__: scene for scene in scenes})
