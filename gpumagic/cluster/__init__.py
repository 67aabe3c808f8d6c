"""Run cells on many GPUs. Each GPU gets its own ipyparallel engine (a process) or thread."""
