"""Finds a Chromium, or says how to get one: ``python tests/browser/chromium.py [--install]``.

The system's own first, then one that Playwright has installed; with ``--install``, for root, apt's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW = (
    "no Chromium is found, which the browser tests need. Type one of\n"
    "    sudo apt-get install chromium\n"
    "    python -m playwright install --with-deps chromium\n"
    "or name one: GPUMAGIC_CHROMIUM=/path/to/chromium"
)
# What Chromium shall not do in a test: ask the network for anything of its own.
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find() -> Path | None:
    """The executable of a Chromium, if there is one."""
    named = os.environ.get("GPUMAGIC_CHROMIUM")
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    for name in NAMES:
        path = shutil.which(name)
        # Ubuntu's own is a script that wants a snap, which a container cannot have.
        if path and works(Path(path)):
            return Path(path)
    return next((path for path in _playwrights() if works(path)), None)


def works(path: Path) -> bool:
    """Whether it is one at all: it says its version."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _playwrights() -> list[Path]:
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    root = Path(folder) if folder and folder != "0" else Path.home() / ".cache" / "ms-playwright"
    # The newest first.
    return sorted(root.glob("chromium-*/chrome-linux*/chrome"), reverse=True)


def install() -> Path | None:
    """One that is there, or one that apt brings where this is root."""
    if (path := find()) is not None:
        return path
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    apt = shutil.which("apt-get")
    if root and apt:
        # Debian's package; Ubuntu's of that name is a snap, and is not found afterwards.
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
            subprocess.run([apt, "--quiet", *command], check=False)
    return find()


def main(arguments: list[str]) -> int:
    """Print where it is; 1 where there is none."""
    path = install() if "--install" in arguments else find()
    print(HOW if path is None else path, file=sys.stderr if path is None else sys.stdout)
    return int(path is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
