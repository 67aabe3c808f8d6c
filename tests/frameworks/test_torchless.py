"""Run the tests of torchless/ in a process of their own, in which torch cannot be imported."""

import subprocess
import sys
from pathlib import Path


def test_without_torch():
    folder = str(Path(__file__).parent / "torchless")
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
