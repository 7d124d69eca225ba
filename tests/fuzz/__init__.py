"""Fuzz test of a live fleet, `python -m tests.fuzz`: malformed requests beside an honest conversation."""
