"""Keep a table of checks in a file, with the versions of all that took part."""

import json
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from hardware.rows import Row

import gpumagic

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "ipython", "nvidia-ml-py", "triton")


def keep(folder: Path, table: Sequence[tuple[str, Row]], seconds: float) -> Path:
    """Write the table and what it was measured with; the file is named for the card."""
    gpu = torch.cuda.get_device_name(0)
    folder.mkdir(exist_ok=True)
    path = folder / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    kept = {
        "gpu": gpu,
        "time": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "seconds": round(seconds),
        "versions": _versions(),
        "rows": [{"check": name, **vars(row)} for name, row in table if row.ok is not None],
        "skipped": [f"{name}, {row.what}: {row.note}" for name, row in table if row.ok is None],
    }
    path.write_text(json.dumps(kept, indent=1, default=str, ensure_ascii=False) + "\n")
    return path


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "gpumagic": gpumagic.__version__,
        "python": platform.python_version(),
        "linux": platform.release(),
        "driver": gpumagic.snapshot().driver,
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
