"""Profile a cell line by line: host and device time, operators, and causes of idle time.

torch's profiler records the operators; `sys.settrace` records the lines. Both always end with the
cell. The sums of operators equal those in torch's own table.
"""
