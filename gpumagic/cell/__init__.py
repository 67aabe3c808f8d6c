"""Run one `%%ongpu` cell: move the variables it reads, place new tensors, measure, report."""

from gpumagic.display import table

table.register("gpumagic.cell.report.Report", "gpumagic.cell.report")
