"""Starts, changes, inspects and ends a fleet, for the command line and for tests."""
