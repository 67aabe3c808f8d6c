"""Around each cell of a notebook, look after memory: stamp what it allocates, notice what grows
and when it runs out."""

import sys
import threading
from typing import Any

from gpumagic import faults

_EVENTS = ("pre_run_cell", "post_run_cell")


class MemoryHooks:
    """What IPython calls; nothing is done, nor imported, before torch has used a GPU."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own
        self._growth: Any = None

    def install(self) -> None:
        for event in _EVENTS:
            self._shell.events.register(event, getattr(self, f"_{event}"))

    def uninstall(self) -> None:
        for event in _EVENTS:
            self._shell.events.unregister(event, getattr(self, f"_{event}"))
        if made_in := sys.modules.get("gpumagic.memory.made_in"):
            made_in.forget()

    def _pre_run_cell(self, info: Any) -> None:
        self._threads.stamped = None
        if not _gpu_is_used():
            return
        with faults.kept("asking torch to note when memory runs out"):
            from gpumagic.memory.out_of_memory_message import note_shortages

            note_shortages()
        if not info.store_history:
            return
        with faults.kept("stamping a cell on what it allocates"):
            from gpumagic.memory import made_in
            from gpumagic.usercode.files import next_cell

            cell = next_cell()
            if (before := made_in.stamp(cell)) is not None:
                self._threads.stamped = cell, before

    def _post_run_cell(self, result: Any = None) -> None:
        stamped = getattr(self._threads, "stamped", None)
        if stamped is not None:
            with faults.kept("stamping a cell on what it allocates"):
                from gpumagic.memory import made_in

                made_in.unstamp(*stamped)
        info = getattr(result, "info", None)
        if info is not None and info.store_history and result.success and _gpu_is_used():
            with faults.kept("looking for what grows from run to run"):
                self._look_for_growth(info.raw_cell)

    def _look_for_growth(self, cell: str) -> None:
        from gpumagic.memory.growth import GrowthWatch

        self._growth = self._growth or GrowthWatch()
        shell = self._shell
        if grown := self._growth.ended(cell, shell.transform_cell, shell.user_ns):
            print(f"→ {grown}")


def _gpu_is_used() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(getattr(cuda, "is_initialized", bool)())
