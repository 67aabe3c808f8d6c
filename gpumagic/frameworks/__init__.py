"""Serve frameworks of arrays beside torch: JAX, TensorFlow, CuPy."""
