"""In-engine policies on real vLLM: `python -m benchmarks.coserving`."""
