"""Choose what to move, and write the fix as code."""
