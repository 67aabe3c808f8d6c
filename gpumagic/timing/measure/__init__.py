"""Measure one target at one value."""
