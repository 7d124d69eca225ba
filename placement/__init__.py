"""Pure decisions on plain data: routing, in-engine scheduling, overload and sizing."""


class PlacementError(Exception):
    """Base of this package's exceptions. The message says what is wrong and what to change."""
