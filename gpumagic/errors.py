"""The one error that gpumagic raises for bad input: a line that names what was given, what there
is, and what to type."""

NO_TORCH = '{} needs torch, which is not installed here; type: pip install "gpumagic[torch]"'


class GpuError(Exception):
    """Bad input, in one line: what was given, what there is, what to type.

    IPython shows it as that line alone; other programs see an ordinary exception.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its own rendering; a usage error needs no stack.
        return [f"{type(self).__name__}: {self}"]
