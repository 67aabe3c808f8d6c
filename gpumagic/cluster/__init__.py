"""Run cells on many GPUs, here or on other machines: an engine of ipyparallel for each."""

from gpumagic.display import shown

shown.register("gpumagic.cluster.devices_report.DevicesReport", "gpumagic.cluster.devices_view")
