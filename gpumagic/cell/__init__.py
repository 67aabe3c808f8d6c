"""Run one `%%ongpu` cell: bring what it reads, place what it makes, measure, report."""

from gpumagic.display import shown

shown.register("gpumagic.cell.report.Report", "gpumagic.cell.report_view")
