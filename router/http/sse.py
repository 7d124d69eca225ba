"""Where server-sent events end, so that a client never holds half of one."""

from __future__ import annotations

ENDS = (b"\n\n", b"\r\n\r\n")
LARGEST_HELD = 64 * 1024


class EventBoundary:
    """Passes whole events on; keeps the beginning of the next until its end has come.

    An engine writes an event at a time, so that nearly every piece passes as it is. Should the engine die
    inside an event, the error event we add still stands alone. An event longer than ``LARGEST_HELD`` is
    passed in parts.
    """

    __slots__ = ("holding",)

    def __init__(self) -> None:
        self.holding = b""
        """The beginning of an event whose end has not come."""

    def whole(self, data: bytes) -> bytes:
        """What can go to the client now; may be empty."""
        if self.holding:
            data = self.holding + data
            self.holding = b""
        if data.endswith(ENDS):
            return data
        end = max((data.rfind(mark) + len(mark) for mark in ENDS if mark in data), default=0)
        if len(data) - end > LARGEST_HELD:
            return data
        self.holding = data[end:]
        return data[:end]

    def rest(self, tail: bytes) -> bytes:
        """The stream has ended with ``tail``: what is left of it, as it came."""
        held, self.holding = self.holding, b""
        return held + tail
