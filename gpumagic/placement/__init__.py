"""Make new tensors on one device while a placement is in force."""
