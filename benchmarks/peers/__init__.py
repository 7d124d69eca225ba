"""Our fleets beside other routers: `python -m benchmarks.peers`."""
