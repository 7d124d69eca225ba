"""Compares policies inside a real vLLM engine: `python -m benchmarks.coserving`."""
