"""Show the GPUs and who holds them: the table of `%gpus`."""
