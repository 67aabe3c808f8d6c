"""Find the largest value for which code fits into a GPU's memory, here or on another card."""
