"""Decisions on plain data, without I/O: about a fleet, and inside an engine."""
