"""Profile a cell by the user's line: host and device time, operators, idle gaps and their causes.

torch's profiler records the operators, `sys.settrace` the lines. Both end with the cell, whatever
ends it, and torch's own table has the same sums. The trace that is saved can be read again.
"""

from gpumagic.display import table

table.register("gpumagic.profiling.cell_profile.CellProfile", "gpumagic.profiling.cell_profile")
