"""Run cells on many GPUs: one engine of ipyparallel for each GPU, or one thread."""

from gpumagic.display import table

table.register("gpumagic.cluster.ranks_report.RanksReport", "gpumagic.cluster.ranks_report")
table.register("gpumagic.cluster.ranks_report.RanksTable", "gpumagic.cluster.ranks_report")
