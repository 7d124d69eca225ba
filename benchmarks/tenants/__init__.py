"""Measures what a hostile tenant costs another tenant of its fleet: `python -m benchmarks.tenants`."""
