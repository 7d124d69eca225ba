"""Measures what a token costs in our relay and gateway, and in proxies: `python -m benchmarks.relay`."""
