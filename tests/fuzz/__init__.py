"""Hostile input beside honest work: `python -m tests.fuzz`."""
