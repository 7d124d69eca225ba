"""Random faults under real agent load."""
