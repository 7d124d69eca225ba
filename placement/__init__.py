"""Decisions on plain data: where turns go, which engines there should be, and what an iteration serves."""


class PlacementError(Exception):
    """Base of this package's exceptions: what cannot be placed, planned or fitted; the message says why and
    what to change."""
