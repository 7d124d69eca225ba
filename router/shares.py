"""Shares of a gateway process: no owner has more requests under way, or bytes of bodies, than its share.

An open connection is not yet an owner's; its request is, from its head to the end of its answer, and so are
the bytes of its body, which are kept as long: a turn may have to be sent again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router import metrics
from router.errors import TooManyRequests


class Shares:
    def __init__(self, most: int, most_bytes: int) -> None:
        """`most`: requests under way of one owner; `most_bytes`: of bodies, of all owners."""
        self._most, self._most_bytes = most, most_bytes
        self._under_way: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._all_bytes = 0

    @contextmanager
    def one(self, owner: str) -> Iterator[Callable[[int], None]]:
        """A request of `owner` under way; refused where that would be one too many. Yields what is told of
        each piece of its body that is kept, and refuses what is too much."""
        if self._under_way[owner] >= self._most:
            metrics.LIMITED.labels("requests_at_once").inc()
            raise TooManyRequests(
                f"this key has {self._most} requests under way at this gateway, its share of the"
                " connections; wait for some to end",
                code="too_many_at_once",
                retry_after_s=1.0,
            )
        self._under_way[owner] += 1
        kept = 0

        def keep(size: int) -> None:
            nonlocal kept
            self._keep(owner, size)
            kept += size

        try:
            yield keep
        finally:
            self._less(self._under_way, owner, 1)
            self._less(self._bytes, owner, kept)
            self._all_bytes -= kept

    def _keep(self, owner: str, size: int) -> None:
        """An owner may have as much as nobody has: half where it is alone, and there is always some left."""
        own = self._bytes[owner] + size
        if own > self._most_bytes - self._all_bytes:
            metrics.LIMITED.labels("bytes_at_once").inc()
            raise TooManyRequests(
                f"the bodies of this key's requests under way have {own >> 20} MiB at this gateway, its"
                " share; wait for some to end",
                code="too_many_bytes_at_once",
                retry_after_s=1.0,
            )
        self._bytes[owner] = own
        self._all_bytes += size

    @staticmethod
    def _less(counts: Counter[str], owner: str, by: int) -> None:
        counts[owner] -= by
        if not counts[owner]:
            del counts[owner]
