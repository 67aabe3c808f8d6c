"""Explain errors about tensors on different devices. Importing `mismatch` does not import torch."""

from gpumagic.display import table

table.register("gpumagic.mismatch.explanation.Explanation", "gpumagic.mismatch.explanation")
