"""The table of GPUs in a notebook that is 700 pixels wide."""

from dataclasses import replace
from pathlib import Path

from snapshots import snapshot_in

from gpumagic.gputable.gpu_table import GpuTable

SAMPLE = Path(__file__).parents[1] / "data" / "snapshot.json"
ROWS = "tables => tables.map(table => [table.offsetWidth, table.rows[1].offsetHeight])"


def test_it_fits_without_a_second_line(context):
    taken = snapshot_in(SAMPLE.read_text(encoding="utf-8"))
    gpus = [replace(gpu, power=1000.0, utilization=100.0) for gpu in taken.gpus]
    html = GpuTable(replace(taken, gpus=tuple(gpus)))._repr_html_()
    page = context.new_page()
    page.set_content(f'<div style="width: 700px; font: 13px sans-serif">{html}</div>')
    (gpu_width, gpu_height), (holder_width, _) = page.locator("table").evaluate_all(ROWS)
    page.close()
    assert max(gpu_width, holder_width) <= 700
    assert gpu_height < 30
