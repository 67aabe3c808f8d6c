"""Keep what was measured, and judge it."""
