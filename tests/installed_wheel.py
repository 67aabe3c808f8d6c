"""Check an installed wheel, as ``make test-wheel`` does where neither Node.js nor the source is.

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
    assert shutil.which("node") is None
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
    shown = said("ipython", "--no-banner", "-c", "%load_ext gpumagic\n%gpus")
    assert "Traceback" not in shown, shown
    print(f"gpumagic {gpumagic.__version__} is whole in {sys.prefix}")


if __name__ == "__main__":
    main()
