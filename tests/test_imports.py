"""Hold the structure of docs/architecture.md: who imports whom, names, sizes; what importing costs.

Every import counts, also those inside functions and those for type checkers alone.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpumagic"

# Each room and the rooms that it may import.
GROUND = {"errors", "faults", "display", "device", "usercode"}
MAY = {
    "__init__": {"magics", "server", "widget", "telemetry", "virtual", "device", "errors", "faults"}
    | {
        "placement",
        "moving",
        "cell",
        "ledger",
        "mismatch",
        "dryrun",
        "timing",
        "memory",
        "fitting",
        "frameworks",
        "checked",
    },
    "__main__": {"cli"},
    "pytest_plugin": {"virtual", "placement", "display", "device"} | {"errors"},
    "cli": {"gputable", "magics", "telemetry", "errors", "faults"},
    "magics": GROUND
    | {"timing", "memory", "fitting", "dryrun", "cell", "ledger", "mismatch", "moving", "placement"}
    | {
        "gputable",
        "telemetry",
        "widget",
        "virtual",
        "cluster",
        "frameworks",
        "checked",
        "profiling",
        "numerics",
    },
    "cluster": GROUND
    | {"cell", "copies", "isolation", "ledger", "moving", "placement", "telemetry"}
    | {"virtual", "mismatch", "memory"},
    "numerics": GROUND | {"copies", "isolation", "ledger", "moving", "placement", "timing"},
    "timing": GROUND
    | {"copies", "isolation", "ledger", "moving", "placement", "nvml"}
    | {"frameworks", "telemetry"},
    "memory": GROUND
    | {"dryrun", "copies", "isolation", "ledger", "mismatch", "moving", "placement", "telemetry"}
    | {"frameworks", "gputable", "fitting"},
    "fitting": GROUND
    | {"dryrun", "copies", "isolation", "ledger", "moving", "placement", "telemetry"},
    "dryrun": GROUND
    | {"frameworks", "isolation", "ledger", "mismatch", "moving", "placement", "virtual"},
    "profiling": GROUND | {"ledger"},
    "cell": GROUND | {"frameworks", "ledger", "mismatch", "moving", "placement"},
    "frameworks": GROUND | {"ledger", "mismatch", "moving", "placement"},
    "checked": GROUND | {"ledger", "mismatch", "placement"},
    "copies": {"device", "frameworks", "moving", "placement", "usercode", "errors", "faults"},
    "isolation": {"usercode", "errors", "faults"},
    "mismatch": GROUND | {"moving"},
    "ledger": GROUND,
    "moving": GROUND,
    "placement": {"device", "usercode", "errors", "faults"},
    "usercode": {"errors", "faults"},
    "widget": {"display", "memory", "gputable", "telemetry", "errors", "faults"},
    "server": {"telemetry", "display", "device", "errors", "faults"},
    "gputable": {"display", "telemetry", "device", "errors"},
    "virtual": {"frameworks", "ledger", "telemetry", "device", "usercode", "errors", "faults"},
    "telemetry": {"device", "drm", "nvml", "errors", "faults"},
    "display": {"errors", "faults"},
    "device": {"drm", "nvml", "errors", "faults"},
    "drm": {"errors", "faults"},
    "nvml": {"errors", "faults"},
    "errors": set(),
    "faults": set(),
}
WITH_TORCH = {
    "cell",
    "checked",
    "cluster",
    "copies",
    "dryrun",
    "isolation",
    "ledger",
    "mismatch",
    "moving",
    "numerics",
    "placement",
    "profiling",
}
WITH_TORCH |= {"memory", "fitting", "timing", "virtual"}
WITHOUT_TORCH = set(MAY) - WITH_TORCH
# Each adapter imports its framework; it is imported once that is in use.
ADAPTER = "gpumagic.frameworks.torch_framework"
MOST_LINES = 39_000
LARGEST_ROOM = 0.15
# Every room may import these, so the picture in the docs leaves them out.
NOT_DRAWN = {"__init__", "__main__", "errors", "faults"}


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path):
    return ast.parse(path.read_text())


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module):
    return module.split(".")[1] if "." in module else "__init__"


@cache
def imports(path):
    """(module, whether only for type checkers) of every import in a file, wherever it is."""
    return [*_imports(path)]


def _imports(path):
    tree = parsed(path)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports have whole names here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module, node in for_types


@cache
def arrows():
    """Every file's module, and the modules of this package that it imports, for types too."""
    return {
        module: {to for to, _ in imports(path) if to in MODULES} - {module}
        for module, path in MODULES.items()
    }


def circles(graph):
    """The modules that import each other, as sets: strongly connected, by Tarjan's algorithm."""
    found, numbers, lowest, stack = [], {}, {}, []

    def visit(module):
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for to in graph[module]:
            if to not in numbers:
                visit(to)
            if to in stack:
                lowest[module] = min(lowest[module], lowest[to])
        if lowest[module] == numbers[module]:
            at = stack.index(module)
            found.append(set(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in numbers:
            visit(module)
    return [one for one in found if len(one) > 1]


def twice(names):
    return {name for name, count in Counter(names).items() if count > 1}


def test_rooms_import_only_what_they_may():
    wrong = [
        f"{module} imports {to}"
        for module, found in arrows().items()
        for to in found
        if room_of(to) not in {room_of(module), *MAY[room_of(module)]}
    ]
    assert wrong == []


def test_imports_run_downwards_only():
    order = list(TopologicalSorter(MAY).static_order())  # raises where rooms form a circle
    assert set(order) == {room_of(module) for module in MODULES}


def test_no_files_import_each_other_in_a_circle():
    assert circles(arrows()) == []


def test_only_rooms_that_compute_import_torch():
    wrong = [
        module
        for module, path in MODULES.items()
        for to, for_types in imports(path)
        if to.split(".")[0] == "torch"
        and not for_types
        and room_of(module) in WITHOUT_TORCH
        and module != ADAPTER
    ]
    assert wrong == []


def test_modules_stay_short():
    assert [path for path in FILES if len(path.read_text().splitlines()) > 450] == []


def test_no_room_outgrows_the_others():
    lines = Counter()
    for module, path in MODULES.items():
        lines[room_of(module)] += len(path.read_text().splitlines())
    (room, most), *_ = lines.most_common()
    assert most <= LARGEST_ROOM * lines.total(), room
    assert lines.total() <= MOST_LINES


def test_no_name_stands_for_two_things():
    assert twice(path.stem for path in FILES) == {"__init__"}
    classes = [
        node.name for path in FILES for node in parsed(path).body if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in twice(classes) if not name.startswith("_")} == set()


def test_the_picture_of_the_rooms_is_true():
    """Each arrow in docs/architecture.md is an import, and each import follows from the arrows."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = set(re.findall(r"^  (\w+) --> (\w+)$", text, re.MULTILINE))
    real = {(room_of(module), room_of(to)) for module, found in arrows().items() for to in found}
    real = {(a, b) for a, b in real if a != b and not {a, b} & NOT_DRAWN}
    assert drawn - real == set(), "no longer imported: remove these arrows"
    follow = set(drawn)
    while more := {(a, d) for a, b in follow for c, d in follow if b == c} - follow:
        follow |= more
    assert real - follow == set(), "imported but not drawn: add these arrows"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_the_docs_name_is_there(page):
    named = re.findall(r"`([\w/]+\.(?:py|ts|json|yml))`", (ROOT / page).read_text())
    homes = (ROOT, PACKAGE, PACKAGE / "device", ROOT / "js/src")
    assert named
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}, "e": set()}
    assert circles(graph) == [{"b", "c"}]


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
        "shell.run_cell('x = 1')\n"
        "new = set(sys.modules) - before\n"
        "shell.run_cell('snapshot = %gpus')\n"
        "print('torch-is-loaded:', 'torch' in sys.modules, *new)"
    )
    loaded = loaded[loaded.index("torch-is-loaded:") + 1 :]
    assert loaded[0] == "False"
    heavy = {"torch", "numpy", "psutil", "pynvml", "tqdm", "executing", "pure_eval", "asttokens"}
    heavy |= {
        "argparse",
        "asyncio",
        "concurrent",
        "difflib",
        "html",
        "logging",
        "socket",
        "unittest",
    }
    assert heavy.isdisjoint(name.partition(".")[0] for name in loaded)
    ours = {name.split(".")[1] for name in loaded if name.startswith("gpumagic.")}
    assert ours == {"errors", "faults", "magics"}
    parts = {name.split(".")[2] for name in loaded if name.startswith("gpumagic.magics.")}
    assert parts == {"commands", "hooks", "loading", "ongpu", "options"}


def test_every_public_name_is_there():
    import gpumagic

    for name in gpumagic.__all__:
        assert getattr(gpumagic, name) is not None
        assert name in dir(gpumagic)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gpumagic.nonsense  # noqa: B018


def test_without_torch_one_line_says_how_to_get_it(monkeypatch):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        "for cell in ('%%ongpu 1\\nran = 1', '%ongpu 1', '%gputime cpu -- 1'):\n"
        "    shell.run_cell(cell)\n"
        "print('ran' in shell.user_ns)\n"
        "import gpumagic\n"
        "try: gpumagic.on(1)\n"
        "except gpumagic.GpuError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2
    assert all("torch" in line and "pip install" in line for line in lines), lines
    shown = done.stdout.strip().splitlines()
    assert shown[0].startswith("cpu takes")
    assert shown[-2] == "False"
    assert 'pip install "gpumagic[torch]"' in shown[-1]
