"""Elastic roles: prefillers that idle while prompts wait on decoders take new conversations.

A prefiller begins to take conversations when it has been mostly idle for a while and prompts have waited on
the decoders meanwhile. It takes no more as soon as it is mostly busy or no prompt waits on decoders. It keeps
the conversations that it has taken until they end. Then it is a mere prefiller again.
"""

from dataclasses import dataclass, field

from placement.time_mean import TimeMean

WINDOW_S = 5.0  # over which idle time and waits are averaged
BEGINS_IDLE, ENDS_IDLE = 0.5, 0.1  # share of its time that a prefiller is idle
BEGINS_WAIT, ENDS_WAIT = 0.4, 0.1  # mean wait of a prompt on a decoder, as a share of the TTFT target


@dataclass(slots=True)
class IdlePrefillers:
    """Set of the prefillers that take conversations now, kept up to date by the reports of engines."""

    ttft_s: float  # SLO target
    taking: set[str] = field(default_factory=set)
    changes: int = 0  # how often a prefiller started or stopped taking conversations
    _idle: dict[str, TimeMean] = field(default_factory=dict)  # prefiller -> share of its time without work
    _waits: dict[str, float] = field(default_factory=dict)  # decoder -> seconds that a prompt waits there now
    _wait_sum: float = 0.0
    _wait: TimeMean = field(default_factory=lambda: TimeMean(WINDOW_S))  # of the mean wait over all decoders

    def decoder_reported(self, engine: str, wait_s: float, now: float) -> None:
        self._wait_sum += wait_s - self._waits.get(engine, 0.0)
        self._waits[engine] = wait_s
        self._wait.observe(max(0.0, self._wait_sum) / len(self._waits), now)

    def prefiller_reported(self, engine: str, idle: bool, now: float) -> None:
        share = self._idle.setdefault(engine, TimeMean(WINDOW_S))
        share.observe(float(idle), now)
        before, wait = engine in self.taking, self._wait.mean / self.ttft_s
        if before:
            after = share.mean > ENDS_IDLE and wait > ENDS_WAIT
        else:
            after = share.mean > BEGINS_IDLE and wait > BEGINS_WAIT
        if after != before:
            self.taking ^= {engine}
            self.changes += 1

    def remove(self, engine: str) -> None:
        self._idle.pop(engine, None)
        self.taking.discard(engine)
        self._wait_sum -= self._waits.pop(engine, 0.0)
