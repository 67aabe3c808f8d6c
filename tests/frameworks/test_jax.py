"""Run the tests of with_jax/ in one process, which has three devices of the CPU and never forks."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_jax(marked):
    folder = str(Path(__file__).parent / "with_jax")
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marked]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
