"""Run cells on many GPUs: an engine of ipyparallel for each, here or elsewhere; or a thread."""

from gpumagic.display import table

table.register("gpumagic.cluster.ranks_report.RanksReport", "gpumagic.cluster.ranks_report")
table.register("gpumagic.cluster.ranks_report.RanksTable", "gpumagic.cluster.ranks_report")
