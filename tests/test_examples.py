"""The example notebooks run as they are: in a kernel, by `make demo`'s program, and where
that shows nothing more, in a shell of the test's process.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpumagic import virtual

EXAMPLES = Path(__file__).parents[1] / "examples"
# A kernel, torch and a model from a package: minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)
IN_THE_SHELL = pytest.mark.filterwarnings("ignore::gpumagic.CrossDeviceWarning")
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def demo(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, EXAMPLES / "run_notebook.py", *arguments, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        # Nothing is fetched: the encoder's weights are those of the installed package.
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=EXAMPLES.parent,
        timeout=380,
    )


@pytest.fixture
def shown(empty_shell, as_in_a_notebook, monkeypatch):
    """Run an example in the shell; what its cells show, each below its code."""
    import torch

    monkeypatch.chdir(EXAMPLES)

    def run(name):
        said = []
        torch.manual_seed(0)
        for cell in nbformat.read(EXAMPLES / name, as_version=4).cells:
            if cell.cell_type == "code":
                done = empty_shell.run(cell.source)
                said.append(f"{cell.source}\n{done.text}")
                fails = "raises-exception" in cell.metadata.get("tags", ())
                assert done.success != fails, "\n".join(said)
                del done  # else an error of the cell holds its tensors
        return "\n".join(said)

    yield run
    virtual.disable()


def test_the_quickstart_is_the_demo(tmp_path):
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    accuracies = re.findall(r"test accuracy ([\d.]+)% on (\S+)", done.stdout)
    assert [device for _, device in accuracies] == ["cpu", "cuda:1"]
    assert all(float(percent) > 95 for percent, _ in accuracies)
    assert accuracies[0][0] == accuracies[1][0]  # virtual: the very same numbers
    assert re.search(r"cuda:1 \(virtual.*peak.*moved X_train, y_train", done.stdout)
    written = tmp_path / "quickstart.html"
    assert str(written) in done.stdout
    html = written.read_text()
    assert "gpumagic gm-report" in html
    assert "fix: put %%ongpu 1 on top of this cell" in done.stdout  # and the next cell does
    assert re.search(r"moved batch: 1\.0 KiB from cpu", done.stdout)
    assert "test accuracy" in html


@IN_THE_SHELL
def test_the_textbooks_chapter(shown):
    shown = shown("d2l_gpus.ipynb")
    three = "(device(type='cpu'), device(type='cuda', index=0), device(type='cuda', index=1))"
    assert three in re.sub(r"\s+", " ", shown)
    assert "found at least two devices, cuda:0 and cuda:1!" in shown
    assert re.search(r"Z\.cuda\(1\) is Z\n.*True", shown)
    assert "moved X: 24 B from cuda:0" in shown
    assert "96 batches" in shown
    assert re.search(r"loss 0\.000\d", shown)


@IN_THE_SHELL
def test_between_devices(shown):
    shown = shown("between_devices.ipynb")
    # An error with names.
    assert re.search(r"weights +cuda:1 +30\.6 KiB .*← the odd one", shown)
    assert "images @ weights.to(images.device)" in shown
    assert 'register_buffer("scale"' in shown
    # The exercise: a thousand waits, then one copy; the same numbers.
    waits = r"log\.append\(norm\.item\(\)\) +waits for cuda:1 \(item, implicit\) +1,000 "
    assert len(re.findall(waits, shown)) == 2  # seen, and foreseen by the dry run
    assert shown.count("1 transfer: 3.9 KiB to cpu") == 2
    assert re.search(r"([\d.]+)  \1  \1\n", shown)
    assert "which strict mode forbids" in shown
    # The dry runs.
    assert re.search(r"30000: at least 3\d\.\d+ GiB, does not fit", shown)
    assert "would fail at line 4: hidden = hidden + average" in shown
    assert "4 B" in shown.partition("would fail")[2]
    assert "ended at line 4: a condition on a tensor depends on data · if large.any():" in shown


@IN_THE_SHELL
def test_timing(shown):
    shown = shown("timing.ipynb")
    assert shown.count("times are the CPU's and say nothing about a GPU") == 5
    assert "(virtual) takes" in shown
    assert len(re.findall(r"cuda:1 \(virtual\) .* same\n", shown)) == 4
    # A sweep, whose last value the CPU and its virtual GPU take about as long for.
    assert re.search(r"\n +512 +~?[\d.]+ m?s +~?[\d.]+ m?s\n", shown)
    # The log that is read one by one, and the one that is read once.
    assert "1,000 waits at line 4: `(matrix @ right).norm().item()`" in shown
    assert "1 transfer: 3.9 KiB to cpu" in shown
    assert "differs from the earlier run: the code" in shown
    assert re.search(r"cuda:0\+cuda:1 \(virtual\) +[\d.]+ m?s .* same\n", shown)


def test_memory(shown):
    shown = shown("memory.ipynb")
    assert re.search(r"model +parameters, gradients +64\.1 MiB +67 % +In \[3\], line 1", shown)
    assert re.search(r"\[0\] and 7 alike +32\.0 MiB", shown)
    # A model that is made twice, then too large a batch, then the largest that fits: it does.
    assert shown.count("OutOfMemoryError") == 2
    lever = r"del model, loss, optimizer before line 1 +96\.1 MiB +then the cell fits"
    assert re.search(lever, shown)
    assert "freed 28.0 MiB (the exception of In [6]: 28.0 MiB on cuda:0)" in shown
    assert "cuda:0: −96.1 MiB since the last %gpumem (96.1 MiB → 0 B allocated)" in shown
    assert "out of memory · In [9], line 5: model(images.cuda())" in shown
    fitted = r"batch = 21\d is the largest known to fit .* on cuda:0 .* a run confirms it"
    assert re.search(fitted, shown)


@pytest.mark.slow
def test_the_sentence_encoder(tmp_path):
    done = demo(tmp_path, str(EXAMPLES / "sentence_encoder.ipynb"))
    assert done.returncode == 0, done.stderr + done.stdout
    shown = done.stdout
    assert "the weights come from a package" in shown
    assert "16 sentences instead of 10,000" in shown
    assert re.search(r"cuda:0 \(virtual\) .* [\d.]+ k?/s .* same", shown)
    assert re.search(r"cuda:0 +128 ", shown)
    assert "device(type='cpu')" in shown
    assert "2 ranks: 2 virtual GPUs of this machine; in each rank, its GPU is cuda:0" in shown
    assert "16 sentences: 8 + 8 · sent sentences: " in shown  # the encoder is there already
    shape, apart = re.search(r"\(torch\.Size\(\[(.*)\]\), (.*)\)", shown).groups()
    assert shape == "16, 384"
    assert float(apart) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_the_textbooks_chapter_in_jax(tmp_path):
    done = demo(tmp_path, str(EXAMPLES / "d2l_gpus_jax.ipynb"))
    assert done.returncode == 0, done.stderr + done.stdout
    shown = done.stdout
    assert "(CpuDevice(id=0), CpuDevice(id=1), CpuDevice(id=2))" in shown
    assert "why: they are committed to their devices" in shown
    assert "3 transfers: 36 B to cuda:1 at line 3: `x + Y`" in shown
    assert "`x + Y` copies data from cpu to cuda:1, which strict mode forbids" in shown
    assert "moved X: 24 B from cuda:0" in shown
    assert "moved params, X: 40 B from cuda:0" in shown
    assert len(re.findall(r"transfers: 35\.2 KiB to cuda:1 at line 5: `step\(", shown)) == 1
    assert re.search(r"loss 0\.000\d", shown)
    assert len(re.findall(r"cuda:0 \(virtual\) .* same\n", shown)) == 2
    assert "1,000 waits at line 4" in shown
    assert "1 transfer: 3.9 KiB to cpu" in shown
    assert re.search(r"cuda:0\+cuda:1 \(virtual\) +[\d.]+ m?s .* same\n", shown)


@pytest.mark.slow
def test_prompts_on_two_gpus(tmp_path):
    done = demo(tmp_path, str(EXAMPLES / "prompts_on_two_gpus.ipynb"))
    assert done.returncode == 0, done.stderr + done.stdout
    shown = done.stdout
    # The same images from two threads, two processes, in small parts, and by Accelerate.
    assert len(re.findall(r"\n    (?:differs by )?[01]\n", shown)) == 4
    assert "17 prompts: 6 parts of at most 3" in shown
    assert "[1] process 1 of 2 draws 8" in shown
    assert shown.count("PIL.Image.Image image mode=RGB") == 2


@pytest.mark.slow
def test_a_cluster_that_loses_a_rank(tmp_path):
    done = demo(tmp_path, str(EXAMPLES / "cluster.ipynb"))
    assert done.returncode == 0, done.stderr + done.stdout
    shown = done.stdout
    assert "rank 1 of 2: [2.0, 2.0, 2.0] on cuda:0" in shown
    assert shown.count("tensor([3., 3., 3.])") == 2
    assert "it was ended by SIGKILL (signal 9)" in shown
    said = re.findall(r"epoch (\d+): ([\d.]+)% right; Adam remembers (\d) ", shown)
    before, lost, after = said[0:2], said[2:4], said[4:6]
    assert before[0] == before[1] == lost[0]
    assert lost[1][0] == lost[1][2] == "0"
    assert after[0] == after[1]
    assert after[0][0] == "40"
    assert float(lost[1][1]) < 20 < float(before[0][1]) < float(after[0][1])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_show_what_their_cells_printed(notebook):
    book = nbformat.read(notebook, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert set(output.get("data", {})) <= {"text/plain", "image/png"}
            fails = "raises-exception" in cell.metadata.get("tags", ())
            assert output.output_type != "error" or fails
    text = notebook.read_text()
    assert not re.search(r"/home/|/root/|/tmp/(?!example)|/Users/|\\u001b\[", text)
    assert len(text) < 250_000


def test_a_failing_notebook_fails_with_its_error(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('here')\n1 / 0")])
    path = tmp_path / "failing.ipynb"
    nbformat.write(book, path)
    done = demo(tmp_path, str(path))
    assert done.returncode == 1
    assert "here" in done.stdout
    assert "ZeroDivisionError" in done.stderr
    assert (tmp_path / "failing.html").exists()


def test_a_missing_notebook_is_told_without_a_traceback(tmp_path):
    done = demo(tmp_path, "nowhere.ipynb")
    assert done.returncode == 2
    assert "error: there is no notebook nowhere.ipynb" in done.stderr
    assert "Traceback" not in done.stderr
