"""Run cells on many GPUs: each GPU gets its own ipyparallel engine, or its own thread."""

from gpumagic.display import table

table.register("gpumagic.cluster.output.RanksReport", "gpumagic.cluster.output")
table.register("gpumagic.cluster.output.RanksTable", "gpumagic.cluster.output")
