"""Adapt torch, JAX, TensorFlow and CuPy to one contract, `framework.Framework`."""
