"""One real kernel for all tests that need nothing else of one: to start it takes four seconds."""

import pytest
from kernels import Kernel


@pytest.fixture(scope="session")
def kernel(tmp_path_factory):
    """A kernel with the extension, torch and two virtual GPUs, on a host that has a name."""
    runtime = str(tmp_path_factory.mktemp("kernels"))
    started = Kernel(GPUMAGIC_RUNTIME_DIR=runtime, GPUMAGIC_VIRTUAL="2", GPUMAGIC_HOST="node-7")
    started.runtime = runtime
    started.run("%load_ext gpumagic\nimport torch")
    yield started
    started.stop()
