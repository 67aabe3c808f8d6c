"""Restore process-wide settings that code changes, and drop what it prints."""
