"""Detection of hot decoders: prompts of later turns wait there, while another decoder is nearly free.

A conversation stays on its decoder for life, so a decoder whose conversations become busy together stays
behind while others have time. Then some of its conversations should move.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from placement.time_mean import TimeMean

WINDOW_S = 3.0  # over which waits are averaged
LEAST_SAVED_S = 1.0  # a move that saves a turn less than this is not worth its transfer
COOL_SHARE = 0.25  # the other decoder's wait is at most this share of the hot one's
REST_S = 5.0  # after conversations left, until the effect shows


class HotDecoder(NamedTuple):
    """Decoder that conversations should leave, and where they should go."""

    engine: str
    wait_s: float  # mean wait of a prompt
    target: str
    target_wait_s: float


@dataclass(slots=True)
class HotDecoders:
    """Waits of prompts on all decoders that take conversations."""

    _waits: dict[str, TimeMean] = field(default_factory=dict)
    _left_at: dict[str, float] = field(default_factory=dict)

    def observe(self, engine: str, wait_s: float, now: float) -> None:
        self._waits.setdefault(engine, TimeMean(WINDOW_S)).observe(wait_s, now)

    def remove(self, engine: str) -> None:
        self._waits.pop(engine, None)
        self._left_at.pop(engine, None)

    def left(self, engine: str, now: float) -> None:
        """Record that conversations have begun to leave an engine."""
        self._left_at[engine] = now

    def hottest(self, now: float) -> HotDecoder | None:
        """Return the decoder with the longest wait, if moves would shorten it by enough."""
        waits = {engine: wait.until(now) for engine, wait in self._waits.items()}
        if len(waits) < 2:
            return None
        hot, cool = max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)
        if waits[hot] - waits[cool] < LEAST_SAVED_S or waits[cool] > COOL_SHARE * waits[hot]:
            return None
        if now - self._left_at.get(hot, -REST_S) < REST_S:
            return None
        return HotDecoder(hot, waits[hot], cool, waits[cool])
