"""What one update of the widget costs a page, against writing its figures into plain rows.

    python benchmarks/drawing.py

In one real Chromium, 8 and 64 GPUs; the two ways take turns, so that a slow minute slows both.
Ends with status 1 if an update costs more than so many times the plain rows.
"""

import statistics
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]

import chromium  # noqa: E402
from test_drawing import OPEN, SCRIPT, crowd, history  # noqa: E402

RATIO = 15.0  # the widget also draws bars and charts, and finds what changed
MEASURE = """async ([snapshot, times]) => {
    const rows = snapshot.gpus.map(gpu => {
        const row = document.body.appendChild(document.createElement('p'));
        return ['utilization', 'memory_used', 'temperature'].map(
            name => [name, row.appendChild(document.createTextNode(''))]);
    });
    const timed = async work => {
        const began = performance.now();
        work();
        const took = performance.now() - began;
        await painted();
        return took;
    };
    const took = [];
    for (let n = 1; n <= times; n++) {
        const next = structuredClone(snapshot);
        next.time += n;
        for (const gpu of next.gpus) {
            gpu.utilization = Math.floor(Math.random() * 101);
            gpu.memory_used = Math.floor(Math.random() * gpu.memory_total);
            gpu.temperature = 40 + Math.floor(Math.random() * 40);
        }
        const ours = await timed(() => { take(next); draw(); });
        const plain = await timed(() => next.gpus.forEach(
            (gpu, at) => rows[at].forEach(([name, node]) => { node.data = `${gpu[name]}`; })));
        took.push([ours, plain]);
    }
    return took;
}"""


def main() -> int:
    broken = 0
    with sync_playwright() as playwright:
        path, args = chromium.find(), list(chromium.ARGS)
        page = playwright.chromium.launch(executable_path=path, args=args).new_page()
        page.set_viewport_size({"width": 300, "height": 800})
        for count in (8, 64):
            snapshot = crowd(count)
            page.goto("about:blank")
            state = {"snapshot": snapshot.to_dict(), "history": history(snapshot)}
            page.evaluate(OPEN, [SCRIPT.read_text("utf-8"), state])
            took = page.evaluate(MEASURE, [snapshot.to_dict(), 45])[15:]
            ours, plain = (statistics.median(each) for each in zip(*took, strict=True))
            ratio = ours / plain
            broken += ratio > RATIO
            print(
                f"{'FAIL' if ratio > RATIO else 'ok  '} {count} GPUs: {ours:.2f} ms of script per "
                f"update, plain rows {plain:.2f} ms: {ratio:.1f} (at most {RATIO:g})"
            )
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
