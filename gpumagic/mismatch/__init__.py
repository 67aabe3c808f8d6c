"""Explain errors between devices in the user's own names: `explain(error)`."""

from gpumagic.display import shown
from gpumagic.mismatch.explainer import explain
from gpumagic.mismatch.explanation import Explanation, Fix, Operand

__all__ = ["Explanation", "Fix", "Operand", "explain"]

shown.register("gpumagic.mismatch.explanation.Explanation", "gpumagic.mismatch.explanation_view")
