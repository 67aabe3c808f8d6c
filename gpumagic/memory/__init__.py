"""List the holders of GPU memory (variables, outputs, …) by name; each storage counts once."""
