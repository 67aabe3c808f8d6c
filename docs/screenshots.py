"""Make the pictures of `%gpus`, of a report and of `%gpumem`: `make screenshots`.

Two notebooks run on virtual GPUs; the first one's `%gpus` sees the second as another holder.
"""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page
from studio import in_both_themes, laboratory, opened, run, run_notebook

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
HELD = [
    "%load_ext gpumagic\n%gpus --virtual 1 --memory 4GiB\nimport torch\nfrom torch import nn",
    "layer = nn.TransformerEncoderLayer(512, 8, batch_first=True, dropout=0)\n"
    "net = nn.TransformerEncoder(layer, 6).cuda()\n"
    "optimizer = torch.optim.AdamW(net.parameters())",
    "batches = [torch.randn(16, 128, 512, device='cuda') for _ in range(12)]",
    "history = []\nfor batch in batches[:2]:\n    loss = net(batch).pow(2).mean()\n"
    "    loss.backward()\n    optimizer.step()\n    history.append(net(batch).mean())",
    "net(batches[0])",
    "%gpumem",
    "%gpumem net",
]
TABLE, TREE = 5, 6


def cell(page: Page, number: int) -> Callable[[Path], object]:
    found = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").nth(number)
    return lambda path: found.screenshot(path=path)


def report(browser: Browser) -> None:
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1180, 1500, "pictures-report") as view,
    ):
        page = view.page
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        for name, cells in (("train.ipynb", TRAIN), ("gpus.ipynb", MAIN)):
            lab.write(name, cells)
            run_notebook(view, name, len(cells))
        page.wait_for_timeout(1500)
        page.locator(".gm-report summary").first.click()
        in_both_themes(page, "report", cell(page, REPORT))
        in_both_themes(page, "gpus", cell(page, GPUS))


def memory(browser: Browser) -> None:
    with (
        laboratory(None) as lab,
        opened(lab, browser, 1180, 1700, "pictures-memory") as view,
    ):
        page = view.page
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        lab.write("train.ipynb", HELD)
        run_notebook(view, "train.ipynb", len(HELD))
        # Else the last one has a frame.
        page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0")
        page.wait_for_timeout(1500)
        in_both_themes(page, "memory", cell(page, TABLE))
        in_both_themes(page, "memory-tree", cell(page, TREE))


if __name__ == "__main__":
    run({"report": report, "memory": memory})
