"""Read what is to be timed: devices, sweeps, items."""
