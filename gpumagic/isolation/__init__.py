"""Restore settings that code changes, discard the code's output, and interrupt running jobs."""
