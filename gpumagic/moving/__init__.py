"""Bring what exists to a device, keeping every object the object it is."""
