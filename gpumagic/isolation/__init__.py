"""Restore process-wide settings that code changes, and discard its output."""
