"""Copy whatever a notebook holds, with the relations between its objects."""
