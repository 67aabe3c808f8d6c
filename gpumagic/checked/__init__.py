"""Check values before a GPU uses them: indices, labels, probabilities, and NaN."""
