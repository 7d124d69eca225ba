"""Two tenants on one fleet, one of them hostile: `python -m benchmarks.tenants`."""
