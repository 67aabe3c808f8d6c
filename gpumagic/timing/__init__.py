"""Time the same code on several devices, on copies of its variables, and synchronize the devices.

Guarantees: timed code runs inline, without calls to gpumagic in between; queued work never counts
as done; the user's variables, random state and settings are restored; Ctrl-C keeps what is timed.
"""

from gpumagic.display import table
from gpumagic.timing.compare import Progress, compare, last_comparison
from gpumagic.timing.comparison import Comparison

__all__ = ["Comparison", "Progress", "compare", "last_comparison"]

table.register("gpumagic.timing.comparison.Comparison", "gpumagic.timing.comparison_view")
