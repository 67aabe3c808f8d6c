"""Show a comparison as text, HTML, SVG or a figure."""
