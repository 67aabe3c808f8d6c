"""Time the same code on several devices, with copies of the code's variables.

No code of gpumagic runs inside a timing, and a timing ends only when all devices are done.
"""

from gpumagic.timing.compare import Progress, compare, last_comparison
from gpumagic.timing.comparison import Comparison

__all__ = ["Comparison", "Progress", "compare", "last_comparison"]
