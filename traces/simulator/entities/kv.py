"""KV of one engine: held for running turns, kept between turns, parked on the host, or lost."""

from collections import OrderedDict
from enum import StrEnum

from traces.simulator.entities.live import Live, Where


class Pressure(StrEnum):
    """What becomes of KV kept between turns when running turns need its place."""

    PARK = "park"  # to the host
    DROP = "drop"  # lost: plain prefix caching
    PIN = "pin"  # it stays: the conversation paper's rule


class KvStore:
    """Counts tokens. `resident` is what is on the accelerator; the kept part of it may give way.

    Parking costs no time of its own: blocks are copied to the host as they fill, so that leaving the
    accelerator is a release. Coming back crosses the host link.
    """

    def __init__(self, capacity: int, pressure: Pressure) -> None:
        self.capacity = capacity
        self.pressure = pressure
        self.resident = 0
        self.parked = 0
        self.dropped = 0  # tokens lost under pressure, in all
        self.parked_in_all = 0
        self.peak = 0
        self._kept: OrderedDict[str, Live] = OrderedDict()  # oldest first
        self._kept_tokens = 0

    @property
    def room(self) -> int:
        return self.capacity - self.resident

    @property
    def live(self) -> int:
        """What an engine reports as held for conversations. A plain prefix cache holds nothing for anyone."""
        return self.resident - self._kept_tokens if self.pressure is Pressure.DROP else self.resident

    @property
    def idle(self) -> int:
        """Of the live, what gives way without loss."""
        return self._kept_tokens if self.pressure is Pressure.PARK else 0

    @property
    def yielding(self) -> int:
        """Tokens that would give way under pressure."""
        return 0 if self.pressure is Pressure.PIN else self._kept_tokens

    def take(self, tokens: int) -> None:
        """Hold more for a turn; kept KV makes room."""
        if tokens > self.room:
            self.make_room(tokens)
        self.resident += tokens
        self.peak = max(self.peak, self.resident)

    def make_room(self, tokens: int, even_pinned: bool = False) -> None:
        while tokens > self.room and (self._kept_tokens if even_pinned else self.yielding):
            self.evict(next(iter(self._kept.values())))

    def lose(self, live: Live) -> None:
        """What a running or waiting turn holds is dropped and has to be computed again."""
        self.resident -= live.held
        self.dropped += live.held
        live.held = 0

    def trim(self, live: Live, tokens: int) -> None:
        """The next prompt shares only its first `tokens` with what is held: the rest is of no use."""
        self.resident -= live.held - tokens
        live.held = tokens

    def keep(self, live: Live) -> None:
        """A turn ended; its conversation goes on."""
        live.where = Where.ACCELERATOR
        self._kept[live.key] = live
        self._kept_tokens += live.held

    def wake(self, live: Live) -> None:
        """A kept or parked conversation has work again; its KV is held from now on."""
        if live.where is Where.ACCELERATOR:
            del self._kept[live.key]
            self._kept_tokens -= live.held
        elif live.where is Where.HOST:
            self.parked -= live.held
            self.take(live.held)
            live.where = Where.ACCELERATOR

    def evict(self, live: Live) -> None:
        """Kept KV leaves the accelerator: to the host, or it is lost."""
        del self._kept[live.key]
        self._kept_tokens -= live.held
        self.resident -= live.held
        if self.pressure is Pressure.PARK:
            live.where = Where.HOST
            self.parked += live.held
            self.parked_in_all += live.held
        else:
            live.where = Where.NOWHERE
            self.dropped += live.held
            live.held = 0

    def forget(self, live: Live) -> None:
        """An idle conversation ended."""
        if live.where is Where.ACCELERATOR:
            del self._kept[live.key]
            self._kept_tokens -= live.held
            self.resident -= live.held
        elif live.where is Where.HOST:
            self.parked -= live.held
        live.where, live.held = Where.NOWHERE, 0
