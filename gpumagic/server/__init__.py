"""Serve the GPU monitor from the Jupyter server, by REST and a websocket."""
