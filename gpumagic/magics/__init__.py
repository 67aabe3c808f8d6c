"""The magics and hooks of IPython: parse a line, call a room, show the result."""
