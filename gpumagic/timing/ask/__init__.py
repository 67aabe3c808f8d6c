"""Read on which devices code is to be timed."""
