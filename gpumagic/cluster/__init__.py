"""Run cells on many GPUs: one engine of ipyparallel for each GPU, or one thread."""

from gpumagic.display import table

table.register("gpumagic.cluster.output.RanksReport", "gpumagic.cluster.output")
table.register("gpumagic.cluster.output.RanksTable", "gpumagic.cluster.output")
