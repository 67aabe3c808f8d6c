"""Run one `%%ongpu` cell: move its variables to a device, create new tensors there, and report."""
