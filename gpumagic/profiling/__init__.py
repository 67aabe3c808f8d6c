"""Profile a cell line by line: host and device time, operators, and causes of idle time.

torch's profiler records the operators; `sys.settrace` records the lines. Both stop at the end of
the cell. The total times and calls of each operator equal those in torch's own table.
"""
