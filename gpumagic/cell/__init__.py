"""Run one `%%ongpu` cell: move its variables to a device, create new tensors there, and report."""

from gpumagic.display import table

table.register("gpumagic.cell.report.Report", "gpumagic.cell.report")
