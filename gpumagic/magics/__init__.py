"""Everything of IPython: the magics, their lines, and what stands under a cell."""
