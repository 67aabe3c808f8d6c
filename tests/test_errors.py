"""What is to be typed depends on whether the magics are there."""

import subprocess
import sys

import pytest

import gpumagic

CODE = """
from gpumagic.errors import as_typed
from IPython.core.interactiveshell import InteractiveShell
print(as_typed("%gpus --virtual 2"))
shell = InteractiveShell.instance()
print(as_typed("%gpus --virtual 2"))
shell.run_line_magic("load_ext", "gpumagic")
print(as_typed("%gpus --virtual 2"))
"""


def test_a_magic_is_named_with_the_extension_that_has_it_until_that_is_loaded(tmp_path):
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "in a notebook, %load_ext gpumagic, then %gpus --virtual 2",
        "%load_ext gpumagic, then %gpus --virtual 2",
        "%gpus --virtual 2",
    ]


@pytest.mark.parametrize("name", ["explain", "explain_out_of_memory"])
def test_what_is_no_exception_is_not_explained(name):
    with pytest.raises(gpumagic.errors.GpuError, match=f"{name} takes an exception, not str$"):
        getattr(gpumagic, name)("x")
    assert not gpumagic.faults.all_kept()
