"""Answer what torch's C++ autograd engine asks about a cuda device, through ctypes.

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

import ctypes
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

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
    """A function that gives a twin of the CPU's allocator, by which its storages are known."""
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
