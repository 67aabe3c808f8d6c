"""The textbook's chapter in TensorFlow runs in a kernel, where there is no torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "d2l_gpus_tensorflow.ipynb"


@pytest.mark.timeout(400)
def test_the_textbooks_chapter_in_tensorflow(tmp_path):
    done = subprocess.run(
        [sys.executable, NOTEBOOK.with_name("run_notebook.py"), NOTEBOOK, "--output", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    shown = done.stdout
    assert "('cuda:0', 'cuda:1')" in shown
    assert "1 transfer: 24 B to cuda:1 at line 2: `X + Y`" in shown
    assert "`V + Y` copies data from cuda:0 to cuda:1, which strict mode forbids" in shown
    assert "(True, 'cuda:0', 'cuda:1')" in shown  # the assignment in a scope copies nothing
    assert "moved X: 24 B from cuda:0" in shown
    assert "line 3: asked for GPU:10, but the result is on the CPU: soft placement" in shown
    assert "left net: TensorFlow cannot move a variable" in shown
    assert "6 transfers: 48 B to cuda:1 at line 3: `net(Y)`" in shown
    moved = "194 transfers: 35.2 KiB to cuda:1, 12 B to cpu, 192 of them at line 7: `net(X)`"
    assert f"{moved}, `net(X) - y`; 1 wait at line 11: `loss.numpy()`" in shown
    assert re.search(r"loss 0\.00\d", shown)
    assert len(re.findall(r"cuda:0 \(virtual\) .* same\n", shown)) == 2
    assert "1,000 waits at line 4" in shown
    in_place = "with tf.norm(matrix @ right) in place of float(tf.norm(matrix @ right))"
    assert f"→ line 4: leave log on the device, {in_place}, and read it once" in shown
    assert "1 transfer: 3.9 KiB to cpu" in shown
    assert re.search(r"cuda:0\+cuda:1 \(virtual\) +[\d.]+ ms .* same\n", shown)
