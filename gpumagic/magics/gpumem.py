"""Answer `%gpumem`: who holds the memory of the GPUs, of one, or below a name."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpumagic.errors import GpuError, meant


class Memories:
    """Makes the reports of one shell, and keeps the last one for `--since`."""

    def __init__(self) -> None:
        self.last: Any = None

    def changes(self, asked: Sequence[str]) -> Any:
        """What changed since the last report; that report itself where it is the first one."""
        if asked:
            raise GpuError(f"--since is about all GPUs; leave out {asked[0]}")
        before, now = self.last, self.held(())
        if before is None or self.last is None:
            print("There was no %gpumem before this one; what changes from now on, --since says.")
            return now
        from gpumagic.memory.memory_changes import changes

        return changes(before, now)

    def held(self, asked: Sequence[str]) -> Any:
        """A report of all GPUs, of those named, or of some variables; of one name what is in it.

        A Snapshot of who holds the GPUs where nothing is in use that could hold them, or what is
        can use none of them.
        """
        from gpumagic.frameworks.known import started
        from gpumagic.magics.gpus import gpus

        if "torch" not in sys.modules and not started():
            print("Neither torch nor JAX is in use here: this notebook has nothing on a GPU.")
            return gpus()
        from gpumagic.memory import ask
        from gpumagic.memory.memory_tree import first_name, tree
        from gpumagic.usercode.files import user_namespace

        variables = user_namespace()
        names = [word for word in asked if first_name(word) in variables]
        others = [word for word in asked if word not in names]
        ordinals = {str(device) for word in others for device in _gpus(word, variables)}
        if len(asked) == len(names) == 1:
            return tree(names[0], variables)
        report = ask.memory(*names)
        if not names:
            self.last = report
        if not report.devices and (snapshot := gpus()).gpus:
            print("torch can use none of these GPUs; %gpus --doctor says why.")
            return snapshot
        if not ordinals:
            return report
        return replace(report, devices=tuple(d for d in report.devices if d.device in ordinals))


def _gpus(word: str, variables: Iterable[str]) -> list[Any]:
    """The GPUs that a word names; a GpuError says that it names neither one nor a variable."""
    from gpumagic.device import resolve

    try:
        found = resolve(word, _here(memory=word == "free"))
    except GpuError as error:
        if not word.isidentifier():
            raise
        question = meant(word, variables)
        why = question or f"and it is no GPU: {error}"
        raise GpuError(f"there is no variable {word!r}; {why}".rstrip()) from None
    if any(device.kind == "cpu" for device in found):
        raise GpuError(f"{word} is not a GPU; type %gpumem 0, or %gpumem for all of them")
    return found


def _here(memory: bool) -> list[Any]:
    """The GPUs of this process; those that torch can use, where it is imported."""
    if "torch" in sys.modules:
        from gpumagic.placement.torch_devices import devices

        return devices(memory=memory)
    from gpumagic.device import here

    return here(memory=memory)
