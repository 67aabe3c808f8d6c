"""Find the first operation at which two devices, or two dtypes, give different numbers."""

from gpumagic.display import table

table.register("gpumagic.numerics.diff_result.NumericDiff", "gpumagic.numerics.diff_result")
