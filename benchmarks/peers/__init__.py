"""What people would run instead, on the same engines: `python -m benchmarks.peers`."""
