"""Find the largest value for which code fits into a GPU's memory, here or on another card."""

from gpumagic.display import table

table.register("gpumagic.fitting.fit_result.Fit", "gpumagic.fitting.fit_result")
