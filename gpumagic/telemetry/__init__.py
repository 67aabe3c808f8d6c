"""Sample what the GPUs of this machine do, and for whom. Never imports torch."""

from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample, Snapshot

__all__ = ["GpuSample", "Host", "Problem", "ProcessSample", "Snapshot"]
