"""Sample the GPUs of this machine and the processes on them. This package never imports torch."""

from gpumagic.errors import Problem
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample, Snapshot

__all__ = ["GpuSample", "Host", "Problem", "ProcessSample", "Snapshot"]
