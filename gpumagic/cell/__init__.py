"""Run one `%%ongpu` cell: bring what it reads, place what it makes, measure, report."""

from gpumagic.display import table

table.register("gpumagic.cell.report.Report", "gpumagic.cell.report")
