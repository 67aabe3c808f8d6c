"""What importing costs, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpumagic"

# Each room and the rooms that it may import; a test of the design (docs/architecture.md).
GROUND = {"errors", "faults", "display", "device", "usercode"}
MAY = {
    "__init__": {"magics", "server", "widget", "telemetry", "virtual", "device", "errors", "faults"}
    | {"placement", "moving", "cell", "ledger", "mismatch", "dryrun", "timing"},
    "__main__": {"cli"},
    "cli": {"demo", "gputable", "telemetry", "errors", "faults"},
    "demo": {"errors", "faults"},
    "magics": GROUND
    | {"timing", "dryrun", "cell", "ledger", "mismatch", "placement"}
    | {"gputable", "telemetry", "widget", "virtual"},
    "timing": GROUND | {"cell", "copies", "isolation", "ledger", "moving", "placement", "nvml"},
    "dryrun": GROUND | {"cell", "isolation", "ledger", "mismatch", "moving", "placement"},
    "cell": GROUND | {"ledger", "mismatch", "moving", "placement"},
    "copies": {"moving", "usercode", "errors", "faults"},
    "isolation": {"usercode", "errors", "faults"},
    "mismatch": GROUND,
    "ledger": GROUND,
    "moving": GROUND | {"placement"},
    "placement": {"device", "usercode", "errors", "faults"},
    "usercode": {"errors", "faults"},
    "widget": {"display", "gputable", "telemetry", "errors", "faults"},
    "server": {"telemetry", "device", "errors", "faults"},
    "gputable": {"display", "telemetry", "device"},
    "virtual": {"telemetry", "device", "errors", "faults"},
    "telemetry": {"device", "nvml", "errors", "faults"},
    "display": {"errors", "faults"},
    "device": {"nvml", "errors", "faults"},
    "nvml": {"errors", "faults"},
    "errors": set(),
    "faults": set(),
}
WITH_TORCH = {"cell", "copies", "dryrun", "isolation", "ledger", "mismatch", "moving", "placement"}
WITH_TORCH |= {"timing", "usercode", "virtual"}
WITHOUT_TORCH = set(MAY) - WITH_TORCH


def room_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path):
    """Yield (module, whether only for type checkers) of every import in a file."""
    tree = ast.parse(path.read_text())
    package = ("gpumagic", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node
    for node in ast.walk(tree):
        typing_only, up = False, node
        while (up := getattr(up, "parent", None)) is not None:
            if isinstance(up, ast.If) and getattr(up.test, "id", "") == "TYPE_CHECKING":
                typing_only = True
        if isinstance(node, ast.Import):
            yield from ((alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module, typing_only
            if module == "gpumagic":
                yield from ((f"gpumagic.{alias.name}", typing_only) for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_only_what_they_may(path):
    room = room_of(path)
    for module, typing_only in imports(path):
        parts = module.split(".")
        if parts[0] != "gpumagic":
            assert not (parts[0] == "torch" and room in WITHOUT_TORCH and not typing_only), module
            continue
        if len(parts) == 1 or parts[1] == room:
            continue
        assert parts[1] in MAY[room], f"{room} imports {module}"


def test_every_room_is_in_the_design():
    assert {room_of(path) for path in FILES} == set(MAY)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_short(path):
    assert len(path.read_text().splitlines()) <= 300


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_is_light():
    loaded = run("import gpumagic, sys; print(*sys.modules)")
    for heavy in ("torch", "IPython", "numpy", "psutil", "pynvml", "jupyter_server"):
        assert heavy not in loaded


def test_loading_the_extension_imports_no_torch_and_showing_gpus_neither():
    loaded = run(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import io, sys\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        "new = set(sys.modules) - before\n"
        "shell.run_cell('snapshot = %gpus')\n"
        "print('torch-is-loaded:', 'torch' in sys.modules, *new)"
    )
    loaded = loaded[loaded.index("torch-is-loaded:") + 1 :]
    assert loaded[0] == "False"
    for heavy in (
        "torch",
        "numpy",
        "psutil",
        "pynvml",
        "gpumagic.telemetry",
        "gpumagic.magics.gputime",
    ):
        assert heavy not in loaded


def test_every_public_name_is_there():
    import gpumagic

    for name in gpumagic.__all__:
        assert getattr(gpumagic, name) is not None
        assert name in dir(gpumagic)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gpumagic.nonsense  # noqa: B018


def test_the_version_is_one():
    import tomllib

    import gpumagic

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert gpumagic.__version__ == project["version"]


def test_without_torch_one_line_says_how_to_get_it(monkeypatch):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        "for cell in ('%%ongpu 1\\nran = 1', '%ongpu 1', '%gpus --virtual 2', '%gputime -- 1'):\n"
        "    shell.run_cell(cell)\n"
        "print('ran' in shell.user_ns)\n"
        "import gpumagic\n"
        "try: gpumagic.on\n"
        "except gpumagic.GpuError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 4
    assert all("torch" in line and "pip install" in line for line in lines), lines
    shown = done.stdout.strip().splitlines()
    assert shown[-2] == "False"
    assert 'pip install "gpumagic[torch]"' in shown[-1]
