"""Explain errors about tensors on different devices. Importing `mismatch` does not import torch."""
