"""Time the same code on several devices, on copies of its variables, every device waited for.

Guarantees: what is timed runs inline, without a call of ours in between; nothing that was queued on
a device is taken to be done; the user's variables, random state and settings are
afterwards as they were before; Ctrl-C keeps what is finished.
"""

from gpumagic.display import table
from gpumagic.timing.compare import compare, last_comparison
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.repeats import Progress

__all__ = ["Comparison", "Progress", "compare", "last_comparison"]

table.register("gpumagic.timing.comparison.Comparison", "gpumagic.timing.comparison_view")
