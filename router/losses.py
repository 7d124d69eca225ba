"""Requests that were running when engines ended: whoever was there twice is tried no more, for a while.

Without it one request that ends engines walks through the fleet: each is tried again elsewhere, here and by
clients' libraries. A gateway cannot tell such a request from one that was beside it; both are set aside.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.engines import EngineInfo
from router import metrics
from router.errors import SetAside

MOST_LOSSES = 2
REMEMBERED_S = 300.0
_CAPACITY = 10_000


@dataclass(slots=True)
class _Loss:
    at: float
    engines: set[tuple[str, int]] = field(default_factory=set)


class Losses:
    """Engines lost under a request, by its prompt's digest, which holds key and model too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._losses: OrderedDict[bytes, _Loss] = OrderedDict()

    def note(self, digest: bytes, engine: EngineInfo) -> None:
        """Several requests with this prompt may have been running there: that is one engine lost."""
        now = self._clock()
        loss = self._losses.get(digest)
        if loss is None or now - loss.at > REMEMBERED_S:
            loss = self._losses[digest] = _Loss(now)
        loss.engines.add((engine.engine, engine.epoch))
        loss.at = now
        self._losses.move_to_end(digest)
        while len(self._losses) > _CAPACITY:
            self._losses.popitem(last=False)

    def set_aside(self, digest: bytes) -> bool:
        loss = self._losses.get(digest)
        if loss is None or self._clock() - loss.at > REMEMBERED_S:
            return False
        return len(loss.engines) >= MOST_LOSSES

    def check(self, digest: bytes) -> None:
        """Raises for a request that is not to be tried again."""
        if self.set_aside(digest):
            metrics.SET_ASIDE.inc()
            raise SetAside(
                f"{MOST_LOSSES} engines ended while they computed this request; it is set aside for"
                f" {REMEMBERED_S:.0f} s: change it, or tell the operator"
            )
