"""Read an error between devices: its message, its operation and its operands."""
