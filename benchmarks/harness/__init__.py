"""Parts that benchmarks share: fleets, processes, rounds of variants, tables and JSON output."""
