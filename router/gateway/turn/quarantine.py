"""Quarantine of requests that were running on engines when those crashed."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.engines import EngineInfo
from router import metrics
from router.errors import SetAside

CRASH_LIMIT = 2
QUARANTINE_S = 300.0
_CAPACITY = 10_000


@dataclass(slots=True)
class _Crashes:
    at: float
    engines: set[tuple[str, int]] = field(default_factory=set)  # name and epoch


class CrashQuarantine:
    """Refuses requests that were running on two engines when those crashed.

    Without it, one request could crash every engine of the fleet, because the gateway and clients' libraries
    retry it elsewhere. A gateway cannot tell the request at fault from one that ran beside it on both
    engines, so both are refused. A request is known by its prompt's digest, which covers key and model too.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, _Crashes] = OrderedDict()

    def record(self, digest: bytes, engine: EngineInfo) -> None:
        """Record that `engine` crashed while it ran this request. The same crash counts once."""
        now = self._clock()
        crashes = self._crashes.get(digest)
        if crashes is None or now - crashes.at > QUARANTINE_S:
            crashes = self._crashes[digest] = _Crashes(now)
        crashes.engines.add((engine.engine, engine.epoch))
        crashes.at = now
        self._crashes.move_to_end(digest)
        while len(self._crashes) > _CAPACITY:
            self._crashes.popitem(last=False)

    def holds(self, digest: bytes) -> bool:
        """Return whether this request is in quarantine."""
        crashes = self._crashes.get(digest)
        if crashes is None or self._clock() - crashes.at > QUARANTINE_S:
            return False
        return len(crashes.engines) >= CRASH_LIMIT

    def check(self, digest: bytes) -> None:
        """Raise SetAside if this request is in quarantine."""
        if self.holds(digest):
            metrics.SET_ASIDE.inc()
            raise SetAside(
                f"{CRASH_LIMIT} engines ended while they computed this request; it is refused for"
                f" {QUARANTINE_S:.0f} s: change it, or tell the operator"
            )
