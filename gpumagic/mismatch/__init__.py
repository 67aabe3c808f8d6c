"""Explain errors between devices in the user's own names. Importing this does not import torch."""

from gpumagic.display import table

table.register("gpumagic.mismatch.explanation.Explanation", "gpumagic.mismatch.explanation")
