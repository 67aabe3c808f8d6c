"""Define IPython magics and hooks, which call other subpackages and show the results."""
