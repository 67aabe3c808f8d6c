"""What the page has to load, and that the front end and the package are of one version."""

import gzip
import json
from pathlib import Path

import gpumagic

ROOT = Path(gpumagic.__file__).parents[1]
BUILT = ROOT / "gpumagic"


def test_the_extension_is_small(capsys):
    files = sorted((BUILT / "labextension" / "static").glob("*.js"))
    assert files, "npm run build"
    raw = sum(len(file.read_bytes()) for file in files)
    packed = sum(len(gzip.compress(file.read_bytes(), 9)) for file in files)
    with capsys.disabled():
        print(f"\nlabextension: {raw / 1000:.1f} kB of JavaScript, {packed / 1000:.1f} kB gzip")
    assert raw <= 43_000


def test_the_widget_is_small(capsys):
    code = (BUILT / "static" / "widget.js").read_bytes()
    packed = len(gzip.compress(code, 9))
    with capsys.disabled():
        print(f"\nwidget.js: {len(code) / 1000:.1f} kB, {packed / 1000:.1f} kB gzip")
    assert packed <= 18_000


def test_nothing_is_shipped_that_only_developers_need():
    names = [file.name for file in (BUILT / "labextension").rglob("*")]
    assert not [name for name in names if name.endswith(".map")]


def test_the_front_end_is_of_the_same_version():
    package = json.loads((ROOT / "package.json").read_text())
    built = json.loads((BUILT / "labextension" / "package.json").read_text())
    assert package["version"] == built["version"] == gpumagic.__version__


def test_the_lock_names_no_registry():
    lock = json.loads((ROOT / "package-lock.json").read_text())
    assert lock["version"] == gpumagic.__version__
    assert not [name for name, entry in lock["packages"].items() if "resolved" in entry]
