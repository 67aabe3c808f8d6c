"""Copy objects of a notebook together with the references between them."""
