"""Read the user's code: its files, lines, names and values."""
