"""A link sends one thing after the other at a fixed rate."""


class Link:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def send(self, size: float, now: float) -> float:
        """When the last byte of `size` has arrived."""
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at
