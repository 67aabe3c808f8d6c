"""Decide whether virtual GPUs may be turned on in this process.

A wrong guess about torch's C++ side can crash an interpreter, so nothing is tried here first.
Cheap static checks come before everything; a version of torch that this was not written against
must then pass a trial in a child process, until one has passed.

For whoever audits which private parts of torch are touched, each stands in one place:

* through ctypes, in :mod:`gpumagic.virtual.gate`: ``c10::impl::registerDeviceGuard``,
  ``c10::impl::device_guard_impl_registry``, ``at::detail::getCUDAHooks``, the virtual table of
  ``at::CUDAHooksInterface``, ``c10::GetCPUAllocator``; in :mod:`gpumagic.virtual.flip` the device
  field of a DLPack capsule;
* added to or replaced in ``torch._C``, ``torch.cuda``, ``torch.autograd`` and ``torch`` itself
  until off: what :func:`gpumagic.virtual.cuda_api.install` hands to ``patch``, and the call of
  ``torch._TorchCompileInductorWrapper``, by :mod:`gpumagic.virtual.cuda_api`; nothing else;
* registered until off: what :mod:`gpumagic.virtual.switch` registers, at the dispatch keys CUDA,
  AutogradCUDA, SparseCUDA, SparseCsrCUDA, QuantizedCUDA, NestedTensorCUDA and CPU; it also
  looks for new kernels whenever a library has been loaded, and turns TorchScript's fuser off; and
  c10d's kernels in :mod:`gpumagic.virtual.collectives`;
* only read or called: every other name after ``C.``, ``torch._`` or ``aten._`` in this package, and
  torchgen's ``native_functions.yaml``.

Off again, torch is as it was, but that warnings of accumulating gradients on another stream are on,
which torch cannot be asked about.

Answer what torch's C++ autograd engine asks about a cuda device, through ctypes.

Two C++ singletons must say that cuda exists, or the engine throws where it may not (the process
ends). A wrong word here can crash the interpreter: :mod:`gpumagic.virtual.gate` decides where this
module may be used at all.

* The device guard. torch has a do-nothing cuda guard (``c10::impl::FakeGuardImpl``, eight devices)
  and ``_ensureCUDADeviceGuardSet`` installs it in place of one that counts no device. So a guard
  that counts none is registered first: a CPU build has no other, and on a CUDA build it keeps the
  driver out of it, also where there is a real GPU. Of it only ``deviceCount`` is asked.
* CUDAHooks. The object gets a copy of the virtual table of its *base* class, whose entries say "no
  cuDNN, no MAGMA, not pinned …". A CPU build's object is of that class already; on a CUDA build
  this keeps C++ away from cuDNN and the driver. Four entries differ: isBuilt, isAvailable and
  hasPrimaryContext say yes, and init does nothing. Where torch's own header has the order, pinned
  memory is ordinary CPU memory.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gpumagic.errors import GpuError

C: Any = torch._C
REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
HOOKS_TABLE = "_ZTVN2at18CUDAHooksInterfaceE"
CPU_ALLOCATOR = "_ZN3c1015GetCPUAllocatorEv"
YES = ("isBuilt", "isAvailable", "hasPrimaryContext", "init")
"""The first entries of the hooks' table after the destructors, in order."""

_CUDA = 1  # c10::DeviceType::CUDA
_HEADER_WORDS = 2  # before a table's entries: offset to top, type information
_DESTRUCTORS = 2
_GUARD_WORDS = 64
_HOOKS_WORDS = 64  # the table has 49 or 50; what follows it is copied and never called
_ALLOCATOR_BYTES = 64  # it has no more than the address of its virtual table
_STORAGE_WORDS = 12  # of c10::StorageImpl, as many as lie in every version; one is its allocator's

_pinned: list[tuple[int, int]] = []
# C++ may look at these until the very end of the process, after Python is gone.
_kept: list[Any] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libc10 and libtorch_cpu; OSError where they do not lie as in torch's wheels."""
    folder = Path(torch.__file__).parent / "lib"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    c10, cpu = (ctypes.CDLL(str(folder / f"lib{name}.{suffix}")) for name in ("c10", "torch_cpu"))
    return c10, cpu


def header_order() -> list[str]:
    """AcceleratorHooksInterface's virtual functions in order, or [] without torch's headers."""
    path = Path(torch.__file__).parent / "include/ATen/detail/AcceleratorHooksInterface.h"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    return re.findall(r"^\s*virtual\s[^;{}()]*?(~?\w+)\(", text, re.M)


def install(stack: ExitStack) -> None:
    """Make both singletons say that cuda is there; closing `stack` puts back what was there."""
    c10, cpu = libraries()
    _install_guard(stack, c10)
    _install_hooks(stack, c10, cpu)


def _install_guard(stack: ExitStack, c10: ctypes.CDLL) -> None:
    register = getattr(c10, REGISTER)
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(c10, GUARDS)
    before = guards[_CUDA]
    none = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda self: 0)
    address = ctypes.cast(none, ctypes.c_void_p).value
    table = (ctypes.c_void_p * _GUARD_WORDS)(*[address] * _GUARD_WORDS)
    counts_none = ctypes.c_void_p(ctypes.addressof(table))
    _kept.append((none, table, counts_none))

    def put_back() -> None:
        # Where there is no real GPU, the one before may have been a fake of torch's own, which some
        # versions have deleted when they made this one: this one stays.
        if before is None or getattr(C, "_cuda_getDeviceCount", int)():
            register(_CUDA, before)

    stack.callback(put_back)
    register(_CUDA, ctypes.addressof(counts_none))
    C._ensureCUDADeviceGuardSet()
    if guards[_CUDA] in (None, ctypes.addressof(counts_none)):
        raise RuntimeError("torch did not install its fake cuda guard")


def _install_hooks(stack: ExitStack, c10: ctypes.CDLL, cpu: ctypes.CDLL) -> None:
    get_hooks = getattr(cpu, GET_HOOKS)
    get_hooks.restype = ctypes.c_void_p
    # An object begins with the address of its virtual table's first entry.
    pointer = ctypes.c_void_p.from_address(get_hooks())
    words = ctypes.c_void_p * _HOOKS_WORDS
    base = ctypes.addressof(ctypes.c_char.in_dll(cpu, HOOKS_TABLE))
    table = words(*words.from_address(base))
    first = _HEADER_WORDS + _DESTRUCTORS
    yes = _address(ctypes.pythonapi.Py_IsInitialized)  # plain C, takes anything, returns 1
    table[first : first + len(YES)] = [yes] * len(YES)
    order = header_order()[1:]
    if "getPinnedMemoryAllocator" in order and hasattr(c10, CPU_ALLOCATOR):
        at = first + order.index("getPinnedMemoryAllocator")
        table[at] = _address(_pinned_allocator(c10))
    _kept.append(table)
    stack.callback(setattr, pointer, "value", pointer.value)
    pointer.value = ctypes.addressof(table) + _HEADER_WORDS * ctypes.sizeof(ctypes.c_void_p)


def _pinned_allocator(c10: ctypes.CDLL) -> Any:
    """Return a function that returns a twin of the CPU's allocator, which marks its storages."""
    get = getattr(c10, CPU_ALLOCATOR)
    get.restype = ctypes.c_void_p
    ordinary = get()
    twin = ctypes.create_string_buffer(ctypes.string_at(ordinary, _ALLOCATOR_BYTES))
    give = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda self: ctypes.addressof(twin))
    words = _words_of(torch.empty(1).untyped_storage())
    if ordinary in words:
        _pinned.append((words.index(ordinary), ctypes.addressof(twin)))
    _kept.append((twin, give))
    return give


def is_pinned(storage: torch.UntypedStorage) -> bool:
    """Whether a storage of the CPU was made pinned."""
    return any(_words_of(storage)[at] == allocator for at, allocator in _pinned)


def _words_of(storage: torch.UntypedStorage) -> list[int | None]:
    return list((ctypes.c_void_p * _STORAGE_WORDS).from_address(storage._cdata))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


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
    """Return why this machine or version may not have virtual GPUs, or None."""
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
    """Return how this build differs inside from what is relied upon, or None; change nothing."""
    missing = [name for name in NEEDED if not hasattr(C, name)]
    try:
        c10, cpu = libraries()
        for library, symbols in ((c10, (REGISTER,)), (cpu, (GET_HOOKS,))):
            missing += [name for name in symbols if not hasattr(library, name)]
        for library, symbol in ((c10, GUARDS), (cpu, HOOKS_TABLE)):
            ctypes.c_char.in_dll(library, symbol)
    except (OSError, ValueError) as error:
        missing.append(str(error))
    if missing:
        return f"this build of PyTorch has not what they need ({', '.join(missing)}); {_INSTEAD}"
    order = header_order()
    if order and order[1 : 1 + len(YES)] != list(YES):
        return (
            f"PyTorch {torch.__version__} lays its CUDA hooks out differently "
            f"({', '.join(order[:5])}); {_INSTEAD}"
        )
    return None


def trial(folder: Path | None = None, command: list[str] | None = None) -> str | None:
    """Return what went wrong in a child process that turned them on and used them, or None.

    A build that passed has a file in `folder`, by default the user's cache; what made one fail may
    be gone the next time. The command must print ``verdict: works``.
    """
    if folder is None:
        from platformdirs import user_cache_path

        folder = user_cache_path("gpumagic")
    command = command or _trial_command()
    passed = folder / f"virtual-{_build(command)}"
    if passed.exists():
        return None
    try:
        verdict = _run(command)
    except subprocess.TimeoutExpired:
        return "it did not end in time"
    if verdict is None:
        with contextlib.suppress(OSError):  # a verdict that cannot be kept is found again
            folder.mkdir(parents=True, exist_ok=True)
            passed.touch()
    return verdict


def _trial_command() -> list[str]:
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from gpumagic.virtual import switch"
    return [sys.executable, "-c", f"{code}; switch.try_out()"]


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
    """Identify what a verdict is valid for: this build of torch, this Python, this package."""
    library, package = Path(torch.__file__).parent / "lib", Path(__file__).parent
    files = [*library.glob("libc10.*"), *library.glob("libtorch_cpu.*"), *package.glob("*.py")]
    stamps = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    known = repr((torch.__version__, sys.version, stamps, _real_gpus(), command))
    return hashlib.sha256(known.encode()).hexdigest()


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
