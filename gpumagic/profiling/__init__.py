"""Profile a cell line by line: host and device time, operators, and causes of idle time."""
