"""Support array frameworks besides torch: JAX, TensorFlow, CuPy."""
