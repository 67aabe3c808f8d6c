"""Explain errors between devices in the user's own names; importing this imports no torch."""

from gpumagic.display import shown

shown.register("gpumagic.mismatch.explanation.Explanation", "gpumagic.mismatch.explanation_view")
