"""Move existing tensors and objects to a device in place."""
