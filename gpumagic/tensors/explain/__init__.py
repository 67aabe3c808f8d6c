"""Errors between devices, in the user's own names: `explain(error)`."""

from gpumagic.tensors.explain.explaining import explain
from gpumagic.tensors.explain.explanation import Explanation, Fix, Operand

__all__ = ["Explanation", "Fix", "Operand", "explain"]
