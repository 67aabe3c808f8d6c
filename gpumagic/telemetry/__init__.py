"""What the GPUs of this machine are doing, and for whom. Never imports torch."""

from gpumagic.telemetry.collect import take
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample, Snapshot

__all__ = ["GpuSample", "Host", "Problem", "ProcessSample", "Snapshot", "take"]
