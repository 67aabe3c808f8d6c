"""Serve the monitor in the Jupyter server: REST and a websocket over one sampler.

Guarantees: every route is authenticated and authorised, and refuses foreign origins; NVML is never
called on the event loop; without clients no GPU is sampled; a missing or broken driver is reported
and raises nothing; when the server stops, nothing is left.
"""
