"""Run cells on many GPUs, here or on other machines: an engine of ipyparallel for each."""
