"""Our fleets beside the routers that people would run instead: `python -m benchmarks.peers`."""
