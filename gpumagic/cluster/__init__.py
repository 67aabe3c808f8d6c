"""Run cells on many GPUs: each GPU gets its own ipyparallel engine, or its own thread."""
