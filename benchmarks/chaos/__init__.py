"""Inflicts random faults on a fleet that agents use: `python -m benchmarks.chaos`."""
