"""Around each cell of a notebook, look after memory: stamp what it allocates, notice what grows
and when it runs out."""

import sys
import threading
from typing import Any

from gpumagic import faults
from gpumagic.device import cuda_state

_EVENTS = ("pre_run_cell", "post_run_cell")
_STAMPING = "stamping a cell on what it allocates"


class MemoryHooks:
    """What IPython calls; nothing is done, nor imported, before torch has used a GPU, or JAX."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own
        self._growth: Any = None

    def install(self) -> None:
        for event in _EVENTS:
            self._shell.events.register(event, getattr(self, f"_{event}"))
        _note_arrays("")  # what is there was made before anybody looked

    def uninstall(self) -> None:
        for event in _EVENTS:
            self._shell.events.unregister(event, getattr(self, f"_{event}"))
        for name in ("made_in", "made_arrays"):
            if module := sys.modules.get(f"gpumagic.memory.{name}"):
                module.forget()

    def _pre_run_cell(self, info: Any) -> None:
        self._threads.stamped = None
        if cuda := cuda_state.working():
            with faults.kept("asking torch to note when memory runs out"):
                from gpumagic.memory.allocator import note_shortages

                note_shortages()
            if info.store_history:
                with faults.kept(_STAMPING):
                    self._threads.stamped = _stamp(cuda.memory)

    def _post_run_cell(self, result: Any = None) -> None:
        number = getattr(result, "execution_count", None)
        _note_arrays(f"In [{number}]" if number else "")
        if not (cuda := cuda_state.working()):
            return
        if stamped := getattr(self._threads, "stamped", None):
            with faults.kept(_STAMPING):
                _unstamp(cuda.memory, *stamped)
        info = getattr(result, "info", None)
        if info is not None and info.store_history and result.success:
            with faults.kept("looking for what grows from run to run"):
                self._look_for_growth(info.raw_cell)

    def _look_for_growth(self, cell: str) -> None:
        from gpumagic.memory.growth import GrowthWatch

        self._growth = self._growth or GrowthWatch()
        shell = self._shell
        if grown := self._growth.ended(cell, shell.transform_cell, shell.user_ns):
            print(f"→ {grown}")


def _note_arrays(cell: str) -> None:
    if "jax" in sys.modules:
        with faults.kept("noting which cell made an array"):
            from gpumagic.memory.ask import note

            note(cell)


def _stamp(memory: Any) -> tuple[str, str] | None:
    """Have what is allocated bear the cell's name; that, and the name that was borne before."""
    # Another allocator than torch's own would warn, once, that it keeps no such thing.
    kept = getattr(memory, "_memory_metadata_supported", lambda: True)
    if not hasattr(memory._C, "_cuda_setMemoryMetadata") or not kept():
        return None
    from gpumagic.usercode.files import next_cell

    before, cell = memory._get_memory_metadata(), next_cell()
    memory._set_memory_metadata(cell)
    return cell, before


def _unstamp(memory: Any, cell: str, before: str) -> None:
    """Put back the name that was borne before, unless the cell has set another one."""
    if memory._get_memory_metadata() == cell:
        memory._set_memory_metadata(before)
