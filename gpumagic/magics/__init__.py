"""IPython magics and hooks: parse a line, call another subpackage, show the result."""
