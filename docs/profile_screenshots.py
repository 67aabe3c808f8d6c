"""Make the picture of `--profile`: `make screenshots`.

The trace is one that tests build in kineto's format, since a virtual GPU has no time of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser
from studio import IMAGES, ROOT, run

from gpumagic.ledger.entry import Entry, Ledger
from gpumagic.profiling.read_trace import read_trace
from gpumagic.usercode import files

sys.path.insert(0, str(ROOT / "tests" / "profiling"))
from recorded import RecordedCell

COLORS = {"light": ("#fff", "#1f2328"), "dark": ("#111", "#e6e6e6")}


def trained() -> RecordedCell:
    cell = RecordedCell()
    for step in range(12):
        cell.at(2, "for images, labels in loader:").load(30_000 if step % 4 == 0 else 9_000)
        cell.at(3, "images = images.to('cuda')").copy(2_500)
        cell.at(4, "loss = F.cross_entropy(net(images), labels)")
        for _ in range(30):
            cell.operator("aten::mm", kernel=180.0, host=40.0)
        cell.at(5, "loss.backward()")
        for _ in range(40):
            cell.operator("aten::mm", kernel=250.0, host=40.0)
        cell.at(6, "optimizer.step()")
        for _ in range(60):
            cell.operator("aten::_foreach_add_", kernel=20.0, host=40.0)
        cell.at(7, "total += loss.item()").item()
    return cell


def profile(browser: Browser) -> None:
    files.last_cell = lambda: "cell.py"  # its lines are named as the running cell's
    moved = [(3, "copy", 12), (7, "copy", 12), (7, "wait", 12)]
    sources = {3: "images = images.to('cuda')", 7: "total += loss.item()"}
    entries = tuple(
        Entry(kind, "", "", "", count, where=files.UserLine(line, sources[line], file="cell.py"))
        for line, kind, count in moved
    )
    html = read_trace(trained().trace(), Ledger(entries))._repr_html_()
    for theme, (paper, ink) in COLORS.items():
        context = browser.new_context(color_scheme=theme, device_scale_factor=2)
        page = context.new_page()
        page.set_viewport_size({"width": 860, "height": 420})
        style = f"background:{paper};color:{ink};margin:12px;width:800px"
        css = "<style>td,th{padding:2px 10px 2px 0}</style>"
        page.set_content(f"<body style='{style}'>{css}{html}</body>")
        path = Path(IMAGES, f"profile-{theme}.png")
        page.locator("div.gpumagic").screenshot(path=path)
        print(path.relative_to(ROOT))
        context.close()


if __name__ == "__main__":
    run({"profile": profile})
