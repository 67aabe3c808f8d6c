"""Decide whether virtual GPUs may be turned on, and make torch's C++ code report a cuda device.

A wrong assumption about torch's C++ code can crash the interpreter. So if this torch or platform is
untested, or if there is a real GPU, a trial in a child process must succeed first.

The autograd engine asks two C++ singletons whether a cuda device exists. If one answers no, the
engine ends the process. So gpumagic changes both singletons:

* The device guard. ``_ensureCUDADeviceGuardSet`` installs torch's do-nothing cuda guard
  (``c10::impl::FakeGuardImpl``, eight devices), but only in place of a guard that finds no device.
  A CPU build has no guard, and a CUDA build's guard may find a real GPU. So gpumagic first
  registers a guard whose ``deviceCount`` returns 0. torch calls no other method of this guard.
* CUDAHooks. This object gets a copy of its *base* class's virtual table. The base class answers "no
  cuDNN, no MAGMA, not pinned …", so C++ calls neither cuDNN nor the driver. Four entries of the
  copy are changed. isBuilt, isAvailable and hasPrimaryContext return true, and init does nothing.
  If torch's header shows the table's order, a fifth entry makes pinned memory ordinary CPU memory.

:mod:`gpumagic.virtual.flip` changes the device in DLPack capsules,
:mod:`gpumagic.virtual.cuda_api` patches attributes, and :mod:`gpumagic.virtual.switch` registers
kernels. Turning virtual GPUs off undoes these changes, but keeps the fake guard if there is no real
GPU. Virtual GPUs silence torch's warning about gradients accumulated on another stream. Turning
virtual GPUs off enables the warning: torch cannot tell whether the warning was on before.
"""

import ctypes
import functools
import os
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
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
"""The first functions after the destructors in CUDAHooks' virtual table, in order."""

_CUDA = 1  # c10::DeviceType::CUDA
_HEADER_WORDS = 2  # the two words before a virtual table's first entry
# Pairs (index, address). In a pinned storage, the word at `index` is the allocator's `address`.
_pinned: list[tuple[int, int]] = []
_kept: list[Any] = []  # objects that C++ may use even after Python has ended
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return libc10 and libtorch_cpu from torch's wheel; raise OSError if one is missing."""
    folder = Path(torch.__file__).parent / "lib"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    c10, cpu = (ctypes.CDLL(str(folder / f"lib{name}.{suffix}")) for name in ("c10", "torch_cpu"))
    return c10, cpu


def header_order() -> list[str]:
    """Return AcceleratorHooksInterface's virtual functions in order; [] if torch has no headers."""
    path = Path(torch.__file__).parent / "include/ATen/detail/AcceleratorHooksInterface.h"
    with suppress(OSError):
        return re.findall(r"^\s*virtual\s[^;{}()]*?(~?\w+)\(", path.read_text("utf-8"), re.M)
    return []


def install(stack: ExitStack) -> None:
    """Make the guard and CUDAHooks report a cuda device. Closing `stack` restores CUDAHooks."""
    c10, cpu = libraries()
    _install_guard(stack, c10)
    _install_hooks(stack, c10, cpu)


def _install_guard(stack: ExitStack, c10: ctypes.CDLL) -> None:
    register = getattr(c10, REGISTER)
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(c10, GUARDS)
    before = guards[_CUDA]
    none = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda self: 0)
    table = (ctypes.c_void_p * 64)(*[_address(none)] * 64)
    counts_none = ctypes.c_void_p(ctypes.addressof(table))
    _kept.append((none, table, counts_none))

    def put_back() -> None:
        # Without a real GPU, keep the fake guard: a parameter still on a virtual GPU needs a guard.
        if getattr(C, "_cuda_getDeviceCount", int)():
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
    words = ctypes.c_void_p * 64  # the table itself has 49 or 50 words
    base = ctypes.addressof(ctypes.c_char.in_dll(cpu, HOOKS_TABLE))
    table = words(*words.from_address(base))
    first = _HEADER_WORDS + 2  # after the two destructors
    yes = _address(ctypes.pythonapi.Py_IsInitialized)  # a C function that always returns 1
    table[first : first + len(YES)] = [yes] * len(YES)
    order = header_order()[1:]
    if "getPinnedMemoryAllocator" in order and hasattr(c10, CPU_ALLOCATOR):
        table[first + order.index("getPinnedMemoryAllocator")] = _address(_pinned_allocator(c10))
    _kept.append(table)
    stack.callback(setattr, pointer, "value", pointer.value)
    pointer.value = ctypes.addressof(table) + _HEADER_WORDS * ctypes.sizeof(ctypes.c_void_p)


def _pinned_allocator(c10: ctypes.CDLL) -> Any:
    """Return a C function that returns the allocator for pinned storages: a copy of the CPU's."""
    get = getattr(c10, CPU_ALLOCATOR)
    get.restype = ctypes.c_void_p
    ordinary = get()
    twin = ctypes.create_string_buffer(ctypes.string_at(ordinary, 64))  # 8 bytes would suffice
    give = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda self: ctypes.addressof(twin))
    words = _words_of(torch.empty(1).untyped_storage())
    if ordinary in words:
        _pinned.append((words.index(ordinary), ctypes.addressof(twin)))
    _kept.append((twin, give))
    return give


def is_pinned(storage: torch.UntypedStorage) -> bool:
    """Whether a CPU storage was allocated as pinned memory."""
    return any(_words_of(storage)[at] == allocator for at, allocator in _pinned)


def _words_of(storage: torch.UntypedStorage) -> list[int | None]:
    """Return the first words of a c10::StorageImpl; one of them is the allocator's address."""
    return list((ctypes.c_void_p * 12).from_address(storage._cdata))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


OLDEST = (2, 10)
NEWEST = (2, 15)
"""The test suite has passed with these two torch releases and one in between, on Linux x86-64."""
TIMEOUT_S = 180.0
_INSTEAD = "use the CPU instead"
_TRIAL = """
import sys; sys.path.insert(0, {!r})
import torch
from gpumagic import virtual
for _ in range(2):
    torch.ones(2, requires_grad=True).sum().backward()
    virtual.turn_on(2, 2**30)
    layers = torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(18, 3)
    net = torch.nn.Sequential(*layers).to("cuda:1")
    x = torch.randn(4, 1, 5, 5).pin_memory().to("cuda:0").requires_grad_()
    net(x.to("cuda:1")).sum().backward()
    assert x.grad.get_device() == 0 and torch.zeros(2, pin_memory=True).is_pinned()
    assert torch.func.grad(torch.sum)(x.detach()).is_cuda
    try:
        x.detach() + torch.ones(2, device="cuda:1")
    except RuntimeError as error:
        assert "at least two devices" in str(error)
    virtual.disable()
print("verdict: works")
"""


def check(*, force: bool = False) -> None:
    """Raise GpuError if virtual GPUs cannot be turned on in this process."""
    real = torch.cuda.device_count()  # by NVML if possible, without initializing CUDA
    problem = _refusal(real, force) or static_problem()
    released = re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", torch.__version__) is not None
    known = sys.platform == "linux" and platform.machine() == "x86_64"
    tested = released and known and OLDEST <= _release() <= NEWEST
    if problem is None and (real or not tested) and (verdict := trial()) is not None:
        problem = f"a trial with PyTorch {torch.__version__} failed: {verdict}; {_INSTEAD}"
    if problem is not None:
        raise GpuError(f"no virtual GPUs: {problem}")


def _refusal(real: int, force: bool) -> str | None:
    """Return why this process cannot have virtual GPUs; None if nothing prevents them."""
    if torch.version.hip is not None:
        return f"they imitate CUDA, and this is a ROCm build of PyTorch; {_INSTEAD}"
    if _release() < OLDEST:
        return f"they need PyTorch 2.10 or later; this is {torch.__version__}; {_INSTEAD}"
    if real and not force:
        gpus = "a real GPU" if real == 1 else f"{real} real GPUs"
        return f"this machine has {gpus}; add --force to have virtual ones in place of real ones"
    if real and torch.cuda.is_initialized():
        return (
            "this process has used its real GPU; restart the kernel and turn virtual GPUs on first"
        )
    return None


def static_problem() -> str | None:
    """Return how torch's libraries differ from the layout assumed here; None if they match."""
    try:
        c10, cpu = libraries()
        for library, name in ((c10, REGISTER), (c10, GUARDS), (cpu, GET_HOOKS), (cpu, HOOKS_TABLE)):
            ctypes.c_char.in_dll(library, name)
    except (OSError, ValueError) as error:
        return f"this build of PyTorch lacks symbols that virtual GPUs need ({error}); {_INSTEAD}"
    if (order := header_order()) and order[1 : 1 + len(YES)] != list(YES):
        why = f"lays its CUDA hooks out differently ({', '.join(order[:5])})"
        return f"PyTorch {torch.__version__} {why}; {_INSTEAD}"
    return None


@functools.cache
def trial(code: str | None = None) -> str | None:
    """Run `code` in a child process. Return None if it prints ``verdict: works``, else an error."""
    code = code or _TRIAL.format(str(Path(__file__).parents[2]))
    with tempfile.TemporaryDirectory() as runtime:
        env = os.environ | {"OMP_NUM_THREADS": "1", "GPUMAGIC_RUNTIME_DIR": runtime}
        command = [sys.executable, "-c", code]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": env}
        try:
            done = subprocess.run(command, timeout=TIMEOUT_S, check=False, **options)
        except subprocess.TimeoutExpired:
            return "it did not end in time"
    if not done.returncode and b"verdict: works" in done.stdout:
        return None
    said = [b"no output", *done.stderr.strip().splitlines()][-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"{how}: {said[:200].decode(errors='replace')}"


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)
