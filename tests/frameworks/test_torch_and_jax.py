"""A cell that uses torch and JAX is placed for both, and one report says it; in a process alone."""

import subprocess
import sys
import textwrap

CELLS = """
    import sys
    import warnings

    import gpumagic
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")

    def run(cell):
        shell.run_cell(cell).raise_error()
        return gpumagic.last_report()

    gpumagic.virtual.enable(2)
    run("import torch, jax, jax.numpy as jnp")
    run("X = jnp.ones((100, 100)); T = torch.ones(50, 50); both = [X, T]; opened = both")
    report = run("%%ongpu 1 --back\\nZ = X @ both[0]\\nU = T @ T + both[1]")
    names = shell.user_ns
    # T's bytes came with the list, which is read first.
    assert sorted(m.name for m in report.moved) == ["X", "both"], report.moved
    assert report.moved_bytes == 50 * 50 * 4 + 100 * 100 * 4
    assert report.returned.nbytes == report.moved_bytes
    assert not report.elsewhere
    assert gpumagic.where([names["Z"], names["U"]]) == "cuda:1"
    assert gpumagic.where(names["both"]) == "cpu"
    assert names["both"] is names["opened"]
    assert names["both"][0] is names["X"]
    assert names["both"][1] is names["T"]

    report = run("%%ongpu 0\\nfor _ in range(3): jax.device_put(X, jax.devices('gpu')[1])\\n"
                 "for _ in range(2): T.to('cuda:1')")
    found = {(e.operator, e.count, e.destination, e.line) for e in report.ledger}
    assert ("device_put", 3, "cuda:1", 2) in found, found
    assert {e for e in found if e[3] == 3} == {("copy_", 2, "cuda:1", 3)}, found
    assert report.device.ordinal == 0

    def dry(cell):
        result = shell.run_cell("%%ongpu 1 --dry-run\\n" + cell)
        return repr(result.result or result.error_in_exec)

    run("import gpumagic\\nwith gpumagic.on(1): placed = torch.ones(2), jnp.ones(2)")
    assert gpumagic.where(names["placed"][0]) == gpumagic.where(names["placed"][1]) == "cuda:1"
    run("moves = gpumagic.move([T, X], 0)")
    assert gpumagic.where(names["moves"].value) == "cuda:0"
    assert names["moves"].value[0] is names["T"]
    gpumagic.move(names["T"], "cpu")

    warnings.simplefilter("error")  # to fork while JAX has threads is no news
    assert "V  float32[50, 50]  cuda:1" in dry("V = T @ T")
    assert "uses JAX; for JAX, type step.lower(" in dry("V = T @ T\\nW = X @ X")
    for function, given in ((names["jax"].jit(lambda x: x), 1), (lambda x: x, {"x": names["X"]})):
        try:
            gpumagic.dry_run(function, given)
        except gpumagic.GpuError as error:
            assert "dry_run is for torch; for JAX, type step.lower(" in str(error)
        else:
            raise AssertionError("a dry run of JAX")
    warnings.simplefilter("ignore")

    def refused(cell):
        said = []
        shell.showtraceback = lambda *args, **more: said.append(str(sys.exc_info()[1]))
        shell.run_cell(cell)
        del shell.showtraceback
        return "".join(said)

    # What would count torch's memory alone, or split what it cannot, says so before anything runs.
    for cell in ("%%gpufit 1 n=1..9\\njnp.ones(n) @ jnp.ones(n)", "%%ongpu 1 --memory\\nX @ X",
                 "%%ongpu 0,1 --split X\\nX @ X"):
        assert "is for torch; this cell uses JAX" in refused(cell), cell
    assert not refused("%%ongpu 1 --memory\\nT @ T")

    try:
        run("%%ongpu 0\\nmade = jnp.ones(1)\\n1 / 0")
    except ZeroDivisionError:
        pass
    run("after = jnp.ones(2), torch.ones(2)")
    assert gpumagic.where(names["after"]) == "cpu"
    print("well")
"""


def test_a_cell_of_torch_and_jax_is_one_cell():
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CELLS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout.endswith("well\n"), ran.stdout + ran.stderr
