"""Random faults under agent load: `python -m benchmarks.chaos`."""
