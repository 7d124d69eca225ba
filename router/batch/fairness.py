"""Fair among keys: whoever has been served the fewest tokens is next."""

from collections.abc import Collection


class FairShare:
    """Virtual token counters. A key that comes back from idling starts level with the least served of the
    busy ones: it neither saves up credit while away nor pays for having been alone before."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def keep(self, busy: Collection[str]) -> None:
        """Start newcomers level, forget keys without work."""
        staying = [served for owner, served in self._served.items() if owner in busy]
        level = min(staying, default=0.0)
        self._served = {owner: self._served.get(owner, level) for owner in busy}

    def next(self, candidates: Collection[str]) -> str:
        return min(candidates, key=lambda owner: (self._served.get(owner, 0.0), owner))

    def charge(self, owner: str, tokens: float) -> None:
        """Also negative, when an estimate turns out too high."""
        if owner in self._served:
            self._served[owner] += tokens
