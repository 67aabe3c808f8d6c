"""Find the first operation at which two devices, or two dtypes, give different numbers."""
