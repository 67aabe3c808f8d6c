"""Serve the monitor in the Jupyter server: REST and a websocket over one sampler."""
