"""Choose who is asked for GPUs: all that this machine can have, or those of ``GPUMAGIC_SOURCES``.

``nvml,amd`` names two; ``amd:/host`` reads the files of a machine whose ``/`` is mounted there;
``http://node7:9090/metrics`` is an all-smi endpoint; ``package.module:make`` is a callable without
arguments that gives a :class:`Source` of somebody else's.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gpumagic.telemetry.amd_source import AmdSource
from gpumagic.telemetry.intel_source import IntelSource
from gpumagic.telemetry.nvml_source import NvmlSource
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample


class Source(Protocol):
    """What the collector asks of each. `patience` is how many times its interval a reading may be
    old: 0 asks for a new one."""

    name: str

    def gpus(self, host: Host, patience: float) -> list[GpuSample]:
        """Its GPUs now, also lost ones."""

    def processes(self, patience: float) -> list[ProcessSample]:
        """Who holds memory on them."""

    def problems(self) -> list[Problem]:
        """What was wrong with what it was asked last."""

    def software(self) -> Mapping[str, str]:
        """What its GPUs run on: versions by name."""

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is expensive and due, for at most so long."""


def _apple(root: Path) -> Any:
    from gpumagic.telemetry.apple_source import AppleSource  # elsewhere it only costs time

    return AppleSource()


_KNOWN: dict[str, Callable[[Path], Any]] = {
    "nvml": lambda root: NvmlSource(),
    "amd": AmdSource,
    "intel": IntelSource,
    "apple": _apple,
}
_THERE_ARE = (
    f"there are {', '.join(_KNOWN)}, an all-smi address such as http://host:9090/metrics, and"
    " package.module:callable; set it right before the server or kernel starts"
)


def chosen(
    env: Mapping[str, str], platform: str = sys.platform
) -> tuple[list[Source], list[Problem]]:
    """The sources, and a problem for each name that is none."""
    asked = env.get("GPUMAGIC_SOURCES", "")
    names = [part.strip() for part in asked.split(",") if part.strip()]
    if not names:
        names = ["nvml", "apple"] if platform == "darwin" else ["nvml", "amd", "intel"]
    sources: list[Source] = []
    problems = []
    for name in names:
        try:
            sources.append(_made(name))
        except Exception as error:  # noqa: BLE001  somebody else's code; told as a problem
            why = "" if isinstance(error, _Unknown) else f" ({type(error).__name__}: {error})"
            cause = f"GPUMAGIC_SOURCES names {name!r}, which is no source{why}"
            problems.append(Problem("source-unknown", cause, _THERE_ARE))
    return sources, problems


class _Unknown(Exception):
    """No source in any spelling."""


def _made(name: str) -> Any:
    if name.startswith(("http://", "https://")):
        from gpumagic.telemetry.all_smi_source import AllSmiSource  # it takes urllib

        return AllSmiSource(name)
    first, colon, rest = name.partition(":")
    if first in _KNOWN and (not colon or rest.startswith("/")):
        return _KNOWN[first](Path(rest or "/"))
    if not rest.isidentifier():
        raise _Unknown
    return getattr(import_module(first), rest)()
