"""The conversation paper's evaluation in simulation: `python -m benchmarks.paper`."""
