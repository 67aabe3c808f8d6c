"""Explain errors between devices in the user's names. Importing this package imports no torch."""

from gpumagic.display import table

table.register("gpumagic.mismatch.explanation.Explanation", "gpumagic.mismatch.explanation")
