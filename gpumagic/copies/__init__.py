"""Copy any of a notebook's objects, with the relations between them."""
