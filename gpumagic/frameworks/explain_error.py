"""Explain an error between devices, whichever framework raised it; needs none of them."""

import sys
from collections.abc import Mapping
from typing import Any

from gpumagic import faults
from gpumagic.mismatch.explanation import Explanation


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Say what an error between devices is about, in the names of the code that raised it.

    Parameters
    ----------
    error : BaseException
        As it was caught, from torch, JAX or TensorFlow: its traceback is read.
    namespace : mapping, optional
        Names that the code could see besides those of its frames.

    Returns
    -------
    Explanation or None
        None for any other error, and wherever it is not certain. `str()` is text; IPython shows
        HTML; `.fix` is code to paste. It holds no array and no frame.

    Examples
    --------
    >>> try:
    ...     y = net(x)
    ... except RuntimeError as error:  # JAX: ValueError
    ...     print(gpumagic.explain(error))
    """
    found = None
    if sys.modules.get("torch") is not None:
        from gpumagic.mismatch.explainer import explain as explain_torch

        found = explain_torch(error, namespace=namespace)
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error"):
        if found is None and sys.modules.get("jax") is not None:
            from gpumagic.frameworks.jax_mismatch import explain_jax

            found = explain_jax(error, namespace or {})
        if found is None and sys.modules.get("tensorflow") is not None:
            from gpumagic.frameworks.tensorflow_mismatch import explain_tensorflow

            found = explain_tensorflow(error, namespace or {})
    return found
