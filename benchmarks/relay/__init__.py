"""Cost of a token through our relay and gateway, beside proxies: `python -m benchmarks.relay`."""
