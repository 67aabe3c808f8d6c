"""Adapt torch, JAX, TensorFlow and CuPy to one protocol, `framework.Framework`."""
