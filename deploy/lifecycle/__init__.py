"""Start, change, status and end of a fleet, for the command line and for tests."""
