"""Compares our fleets with other routers: `python -m benchmarks.peers`."""
