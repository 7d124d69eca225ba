"""Decisions on plain data, without I/O: about a fleet, and inside an engine."""


class PlacementError(Exception):
    """Base of this package's exceptions: what cannot be placed, planned or fitted; the message says why and
    what to change."""
