"""Detection of a hot decoder: prompts wait there, while they hardly wait on another decoder.

A conversation normally stays on its decoder for life. When the conversations of one decoder become busy
together, their prompts wait although other decoders have time. Then some of them should move.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from placement.time_mean import TimeMean

WINDOW_S = 3.0  # over which waits are averaged
LEAST_SAVED_S = 1.0  # a move that saves a turn less than this is not worth its transfer
COOL_SHARE = 0.25  # the wait on the target may be at most this share of the wait on the hot decoder
REST_S = 5.0  # after conversations left a decoder, no more leave it until the effect shows


class HotDecoder(NamedTuple):
    """Decoder that conversations should leave, and the decoder where they should go."""

    engine: str
    wait_s: float  # mean wait of a prompt
    target: str
    target_wait_s: float


@dataclass(slots=True)
class HotDecoders:
    """Record of how long prompts wait on each decoder, from which the hottest decoder is found."""

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
        """Return the decoder with the longest wait, or None if moves would not shorten it by enough."""
        waits = {engine: wait.until(now) for engine, wait in self._waits.items()}
        if len(waits) < 2:
            return None
        hot, cool = max(waits, key=waits.__getitem__), min(waits, key=waits.__getitem__)
        if waits[hot] - waits[cool] < LEAST_SAVED_S or waits[cool] > COOL_SHARE * waits[hot]:
            return None
        if now - self._left_at.get(hot, -REST_S) < REST_S:
            return None
        return HotDecoder(hot, waits[hot], cool, waits[cool])
