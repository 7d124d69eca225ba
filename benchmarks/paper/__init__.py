"""The conversation paper's evaluation again, in simulation, at its set-up: `python -m benchmarks.paper`."""
