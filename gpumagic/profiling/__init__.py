"""Profile a cell by the user's line: host and device time, operators, idle gaps and their causes.

torch's profiler records the operators, `sys.settrace` the lines. Guarantees: both end with the
cell, whatever ends it, and torch's own table has the same sums. The trace that is saved is the
one that is read here, so it can be read again elsewhere.
"""

from gpumagic.display import table

table.register("gpumagic.profiling.cell_profile.CellProfile", "gpumagic.profiling.profile_view")
