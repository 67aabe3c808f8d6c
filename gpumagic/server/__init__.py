"""Serve the monitor in the Jupyter server: REST and a websocket over one sampler.

Guarantees: every route is authenticated and authorised, and refuses foreign origins; nothing of
NVML runs on the event loop; with nobody watching nothing is asked; a driver that is missing or
broken is something to tell, not to fail for; when the server stops, nothing is left.
"""
