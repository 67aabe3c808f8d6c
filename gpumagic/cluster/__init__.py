"""Run cells on many GPUs: each GPU has an engine of ipyparallel, or a thread."""

from gpumagic.display import table

table.register("gpumagic.cluster.output.RanksReport", "gpumagic.cluster.output")
table.register("gpumagic.cluster.output.RanksTable", "gpumagic.cluster.output")
