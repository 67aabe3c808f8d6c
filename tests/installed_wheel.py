"""Check an installed wheel: `make test-wheel` does so without Node.js, and CI on macOS and Windows.

Not collected by pytest: it is about another environment than the tests' own.
"""

import shutil
import subprocess
import sys
from pathlib import Path


def said(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def main():
    import gpumagic

    package = Path(gpumagic.__file__).parent
    assert "--with-node" in sys.argv or shutil.which("node") is None
    assert Path(sys.prefix) in package.parents, f"{package} is not what was installed"
    for name in ("widget.js", "panel.js"):
        assert (package / "static" / name).stat().st_size > 1000

    listed = said("jupyter", "labextension", "list")
    assert any("gpumagic" in line and "OK" in line for line in listed.splitlines()), listed
    listed = said("jupyter", "server", "extension", "list")
    assert any("gpumagic" in line and "OK" in line for line in listed.splitlines()), listed

    from gpumagic.widget import monitor

    assert monitor
    said("gpumagic", "snapshot")
    cells = ["%load_ext gpumagic", "%gpus", "%gpus --doctor", "%%ongpu cpu\nprint(6 * 7)"]
    shown = said(
        "ipython", "--no-banner", "-c", f"for cell in {cells}: get_ipython().run_cell(cell)"
    )
    assert "Traceback" not in shown, shown
    # The last cell is placed, or one line says that torch is missing.
    assert "42" in shown or 'pip install "gpumagic[torch]"' in shown, shown
    print(f"gpumagic {gpumagic.__version__} is whole in {sys.prefix}")


if __name__ == "__main__":
    main()
