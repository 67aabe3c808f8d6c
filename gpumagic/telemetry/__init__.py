"""What the GPUs of this machine are doing, and for whom. Never imports torch."""

from .collect import take
from .snapshot import GpuSample, Host, Problem, ProcessSample, Snapshot

__all__ = ["GpuSample", "Host", "Problem", "ProcessSample", "Snapshot", "take"]
