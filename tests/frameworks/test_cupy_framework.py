"""Hold CuPy's part of the protocol, on two GPUs that a module of tests/ plays, in a child."""

import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def in_child(code, tmp_path):
    """Run code where `import cupy` gets the played one; its output."""
    folder = HERE / "libraries_played"
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cupy_does_what_a_framework_is_asked(tmp_path):
    in_child(
        """
        import cupy, numpy, gpumagic
        from gpumagic.device import CPU, Device
        from gpumagic.frameworks.known import imported

        [framework] = imported()
        assert framework.name == "CuPy"
        gpu = framework.devices()
        assert list(map(str, gpu)) == ["cuda:0", "cuda:1"]
        with framework.place(gpu[1]):
            x = cupy.ones(8)
        assert cupy.cuda.Device().id == 0
        y = cupy.ones(8)
        assert framework.is_array(x) and not framework.is_array(numpy.ones(8))
        assert gpumagic.where([x, numpy.ones(2)]) == "cuda:1 and cpu"
        assert framework.where(y) == "cuda:0" and framework.nbytes(y) == 64
        assert framework.bring(x, gpu[1]) is x
        there = framework.bring(y, gpu[1])
        assert framework.where(there) == "cuda:1" and (there.get() == y.get()).all()
        assert framework.copy(x, gpu[1]) is not x
        assert framework.allocated(gpu[1]) == (128, None)
        assert framework.allocated(gpu[0]) == (64, None)
        framework.wait()
        assert sorted(cupy.synchronized) == [0, 1]

        with gpumagic.on(gpu[1]):
            assert gpumagic.where(cupy.ones(2)) == "cuda:1"
        assert gpumagic.where(gpumagic.move((y,), gpu[1]).value) == "cuda:1"
        assert gpumagic.num_gpus() == 2 and gpumagic.try_gpu(1).id == 1

        def refused(step):
            try:
                step()
            except gpumagic.GpuError as error:
                return str(error)

        assert "asnumpy" in refused(lambda: framework.bring(x, CPU))
        virtual = Device("cuda", 0, virtual=True)
        assert "no virtual GPUs" in refused(lambda: framework.own(virtual))
        """,
        tmp_path,
    )


def test_who_never_used_a_gpu_has_no_context_there(tmp_path):
    in_child(
        """
        import cupy
        from gpumagic.frameworks.known import imported

        imported()[0].wait()
        assert cupy.synchronized == [0]  # the current one
        cupy.COUNT = 0
        assert imported()[0].devices() == []
        """,
        tmp_path,
    )
