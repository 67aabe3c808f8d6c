"""Make new tensors on one device while it holds."""
