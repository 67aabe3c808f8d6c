"""Serve the monitor in the Jupyter server: REST and a websocket over one sampler.

Every route is authenticated and authorised, and refuses foreign origins. NVML is never called on
the event loop, and without clients no GPU is sampled. A broken driver raises nothing.
"""
