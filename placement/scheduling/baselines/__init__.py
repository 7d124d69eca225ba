"""In-engine policies that ConServe is compared with; only benchmarks and the simulator use them."""
