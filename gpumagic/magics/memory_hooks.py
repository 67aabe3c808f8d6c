"""Around each cell of a notebook, look after memory: stamp what it allocates, notice what grows
and when it runs out."""

import sys
import threading
from collections.abc import Callable
from typing import Any

from gpumagic import faults
from gpumagic.device import cuda_state

_EVENTS = ("pre_run_cell", "post_run_cell")


class MemoryHooks:
    """What IPython calls; nothing is done, nor imported, before torch has used a GPU, or JAX."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own
        self._growth: Any = None
        self._attached: Any = None

    def install(self) -> None:
        for event in _EVENTS:
            self._shell.events.register(event, getattr(self, f"_{event}"))
        self._note_arrays("")  # what is there was made before anybody looked

    def uninstall(self) -> None:
        for event in _EVENTS:
            self._shell.events.unregister(event, getattr(self, f"_{event}"))
        if made_in := sys.modules.get("gpumagic.memory.made_in"):
            made_in.forget()
        if made_arrays := sys.modules.get("gpumagic.memory.made_arrays"):
            made_arrays.forget()

    def _pre_run_cell(self, info: Any) -> None:
        self._threads.stamped = None
        if cuda := cuda_state.working():
            self._guarded("asking torch to note when memory runs out", self._note_shortages)
            if info.store_history:
                self._guarded("stamping a cell on what it allocates", self._stamp, cuda.memory)

    def _post_run_cell(self, result: Any = None) -> None:
        number = getattr(result, "execution_count", None)
        self._note_arrays(f"In [{number}]" if number else "")
        if not (cuda := cuda_state.working()):
            return
        if stamped := getattr(self._threads, "stamped", None):
            self._guarded("stamping a cell on what it allocates", _unstamp, cuda.memory, *stamped)
        info = getattr(result, "info", None)
        if info is not None and info.store_history and result.success:
            doing = "looking for what grows from run to run"
            self._guarded(doing, self._look_for_growth, info.raw_cell)

    def _guarded(self, doing: str, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:  # noqa: BLE001  a fault of ours is no reason to stop the cell
            faults.keep(doing, error)

    def _note_arrays(self, cell: str) -> None:
        if "jax" in sys.modules:
            from gpumagic.memory.made_arrays import note

            self._guarded("noting which cell made an array", note, cell)

    def _note_shortages(self) -> None:
        attach = getattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not self._attached:  # virtual GPUs that are turned on have one of their own
            from gpumagic.memory.out_of_memory_message import note_shortages

            note_shortages()
            self._attached = attach

    def _stamp(self, memory: Any) -> None:
        # Another allocator than torch's own would warn, once, that it keeps no such thing.
        kept = getattr(memory, "_memory_metadata_supported", lambda: True)
        if hasattr(memory._C, "_cuda_setMemoryMetadata") and kept():
            from gpumagic.usercode.files import next_cell

            before, cell = memory._get_memory_metadata(), next_cell()
            memory._set_memory_metadata(cell)
            self._threads.stamped = cell, before

    def _look_for_growth(self, cell: str) -> None:
        from gpumagic.memory.growth import GrowthWatch

        self._growth = self._growth or GrowthWatch()
        shell = self._shell
        if grown := self._growth.ended(cell, shell.transform_cell, shell.user_ns):
            print(f"→ {grown}")


def _unstamp(memory: Any, cell: str, before: str) -> None:
    """Put back the name that was borne before, unless the cell has set another one."""
    if memory._get_memory_metadata() == cell:
        memory._set_memory_metadata(before)
