"""Measures retention, parking and restores of KV beside plain vLLM: `python -m benchmarks.kv`."""
