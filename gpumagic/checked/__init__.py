"""Check indices, labels and probabilities before a GPU uses them, and find where NaN is made."""
