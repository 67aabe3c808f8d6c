"""Give a `%%ongpu` cell with `--memory` its recorder."""

from typing import Any

from gpumagic.device import Device
from gpumagic.magics.placing import Request


def peak_recorder(asked: Request, device: Device, namespace: dict[str, Any]) -> Any:
    """What records the peak of memory on a device; raises GpuError where there is none."""
    from gpumagic.memory.peak_recorder import PeakRecorder
    from gpumagic.placement.torch_devices import as_torch

    return PeakRecorder(as_torch(device), namespace, asked.save)
