"""Profile a cell by the user's line: host and device time, operators, idle gaps and their causes.

torch's profiler records the operators, `sys.settrace` the lines. Both always end with the cell. The
sums equal those of torch's own table. A saved trace can be read again.
"""

from gpumagic.display import table

table.register("gpumagic.profiling.cell_profile.CellProfile", "gpumagic.profiling.cell_profile")
