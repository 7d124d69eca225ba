"""Repeats the conversation paper's evaluation in simulation: `python -m benchmarks.paper`."""
