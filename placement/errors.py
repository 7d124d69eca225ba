"""Errors of `placement`."""


class PlacementError(Exception):
    """What cannot be placed, planned or fitted; the message says why and what to change."""
