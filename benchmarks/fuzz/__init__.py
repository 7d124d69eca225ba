"""Hostile input beside honest work: `python -m benchmarks.fuzz`."""
