"""Decide whether virtual GPUs may be turned on in this process.

A wrong guess about torch's C++ side can crash an interpreter, so nothing is tried here first.
Cheap static checks come before everything; a version of torch that this was not written against
must then pass a trial in a child process, until one has passed.

For whoever audits which private parts of torch are touched, each stands in one place:

* through ctypes, in :mod:`gpumagic.virtual.abi`: ``c10::impl::registerDeviceGuard``,
  ``c10::impl::device_guard_impl_registry``, ``at::detail::getCUDAHooks``, the virtual table of
  ``at::CUDAHooksInterface``, ``c10::GetCPUAllocator``; in :mod:`gpumagic.virtual.flip` the device
  field of a DLPack capsule;
* added to or replaced in ``torch._C``, ``torch.cuda``, ``torch.autograd`` and ``torch`` itself
  until off: what :func:`gpumagic.virtual.cuda_api.install` hands to ``patch``, and the call of
  ``torch._TorchCompileInductorWrapper``, by :mod:`gpumagic.virtual.compiled`; nothing else;
* registered until off: what :mod:`gpumagic.virtual.registry` registers, at the dispatch keys CUDA,
  AutogradCUDA, SparseCUDA, SparseCsrCUDA, QuantizedCUDA, NestedTensorCUDA and CPU; it also
  looks for new kernels whenever a library has been loaded, and turns TorchScript's fuser off; and
  c10d's kernels in :mod:`gpumagic.virtual.collectives`;
* only read or called: every other name after ``C.``, ``torch._`` or ``aten._`` in this package, and
  torchgen's ``native_functions.yaml``.

Off again, torch is as it was, but that warnings of accumulating gradients on another stream are on,
which torch cannot be asked about.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gpumagic.errors import GpuError
from gpumagic.virtual import abi

C: Any = torch._C
OLDEST = (2, 10)
TESTED = frozenset({(2, 10), (2, 13), (2, 15)})
"""Releases that the whole test suite has passed on, on Linux x86-64."""
TIMEOUT_S = 180.0
NEEDED = (
    "_to_dlpack",
    "_from_dlpack",
    "_dispatch_get_registrations_for_dispatch_key",
    "_dispatch_get_all_op_names",
    "_dispatch_has_kernel_for_dispatch_key",
    "_accelerator_getDeviceIndex",
    "_accelerator_setDeviceIndex",
    "DispatchKey",
    "DispatchKeySet",
    "Event",
    "Generator",
    "Stream",
)
"""What must be there in ``torch._C``."""
_INSTEAD = "the CPU works without them"


def check(*, force: bool = False) -> None:
    """Return if virtual GPUs may be turned on in this process; else GpuError says why not."""
    problem = refusal(force=force) or static_problem()
    if problem is None and (_real_gpus() or not _tested()):
        verdict = trial()
        if verdict is not None:
            problem = f"a trial with PyTorch {torch.__version__} failed: {verdict}; {_INSTEAD}"
    if problem is not None:
        raise GpuError(f"no virtual GPUs: {problem}")


def refusal(*, force: bool = False) -> str | None:
    """Why this machine or version shall not have them, or None."""
    if torch.version.hip is not None:
        return f"they imitate CUDA, and this is a ROCm build of PyTorch; {_INSTEAD}"
    if _release() < OLDEST or not hasattr(C, "_ensureCUDADeviceGuardSet"):
        return f"they need PyTorch 2.10 or later, this is {torch.__version__}; {_INSTEAD}"
    count = _real_gpus()
    if count and not force:
        real = "a real GPU" if count == 1 else f"{count} real GPUs"
        return f"this machine has {real}; add --force to have virtual ones in place of real ones"
    if count and torch.cuda.is_initialized():
        return (
            "this process has used its real GPU already; restart the kernel and turn them on first"
        )
    return None


def static_problem() -> str | None:
    """What of this build's inside differs from what is relied upon, or None; changes nothing."""
    missing = [name for name in NEEDED if not hasattr(C, name)]
    try:
        c10, cpu = abi.libraries()
        for library, symbols in ((c10, (abi.REGISTER,)), (cpu, (abi.GET_HOOKS,))):
            missing += [name for name in symbols if not hasattr(library, name)]
        for library, symbol in ((c10, abi.GUARDS), (cpu, abi.HOOKS_TABLE)):
            ctypes.c_char.in_dll(library, symbol)
    except (OSError, ValueError) as error:
        missing.append(str(error))
    if missing:
        return f"this build of PyTorch has not what they need ({', '.join(missing)}); {_INSTEAD}"
    order = abi.header_order()
    if order and order[1 : 1 + len(abi.YES)] != list(abi.YES):
        return (
            f"PyTorch {torch.__version__} lays its CUDA hooks out differently "
            f"({', '.join(order[:5])}); {_INSTEAD}"
        )
    return None


def trial(cache: Path | None = None, command: list[str] | None = None) -> str | None:
    """What went wrong in a child process that turned them on and used them, or None.

    Builds that passed are kept in a file of the user's cache folder; what made one fail may be gone
    the next time. The command must print ``verdict: works``.
    """
    if cache is None:
        from platformdirs import user_cache_path

        cache = user_cache_path("gpumagic") / "virtual.json"
    command = command or _trial_command()
    key, passed = _build(command), _read(cache)
    if key in passed:
        return None
    try:
        verdict = _run(command)
    except subprocess.TimeoutExpired:
        return "it did not end in time"
    if verdict is None:
        _write(cache, [*passed, key])
    return verdict


def _trial_command() -> list[str]:
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from gpumagic.virtual import build_trial"
    return [sys.executable, "-c", f"{code}; build_trial.main()"]


def _run(command: list[str]) -> str | None:
    env = {name: value for name, value in os.environ.items() if name != "GPUMAGIC_VIRTUAL"}
    with tempfile.TemporaryDirectory() as folder:
        env |= {"OMP_NUM_THREADS": "1", "GPUMAGIC_RUNTIME_DIR": folder}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode == 0 and "verdict: works" in done.stdout:
        return None
    code = done.returncode
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    return f"{f'signal {-code}' if code < 0 else f'exit code {code}'}: {lines[-1][:200]}"


def _build(command: list[str]) -> str:
    """What a verdict holds for: this build of torch, this Python, this package."""
    library, package = Path(torch.__file__).parent / "lib", Path(__file__).parent
    files = [*library.glob("libc10.*"), *library.glob("libtorch_cpu.*"), *package.glob("*.py")]
    stamps = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return repr((torch.__version__, sys.version, stamps, _real_gpus(), command))


def _read(cache: Path) -> list[str]:
    try:
        passed = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return passed if isinstance(passed, list) else []


def _write(cache: Path, passed: list[str]) -> None:
    with contextlib.suppress(OSError):  # a verdict that cannot be kept is found again
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(passed), encoding="utf-8")


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _tested() -> bool:
    released = re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", torch.__version__) is not None
    known = sys.platform == "linux" and platform.machine() == "x86_64"
    return released and known and _release() in TESTED


def _real_gpus() -> int:
    """How many GPUs torch sees; by NVML where it can, which does not start CUDA."""
    return torch.cuda.device_count()
