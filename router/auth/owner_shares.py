"""Keeps one owner from taking all connections and memory of a gateway process."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router import metrics
from router.errors import TooManyRequests


class OwnerShares:
    """Limits each owner's concurrent requests in a gateway process, and the bytes of their bodies.

    A request counts from its head to the end of its answer. So does its body, because a turn may have to be
    sent again.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """Allow each owner `max_requests` requests, and the bodies of all owners together `max_bytes`."""
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._total_bytes = 0

    @contextmanager
    def request(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Count a request of `owner` while it runs, or raise TooManyRequests.

        Yields a function that counts the size of the body's next piece, or raises TooManyRequests.
        """
        if self._requests[owner] >= self._max_requests:
            metrics.LIMITED.labels("requests_at_once").inc()
            raise TooManyRequests(
                f"this key has {self._max_requests} requests under way at this gateway, its share of the"
                " connections; wait for some to end",
                code="too_many_at_once",
                retry_after_s=1.0,
            )
        self._requests[owner] += 1
        body_bytes = 0

        def count(size: int) -> None:
            nonlocal body_bytes
            self._count_bytes(owner, size)
            body_bytes += size

        try:
            yield count
        finally:
            self._subtract(self._requests, owner, 1)
            self._subtract(self._bytes, owner, body_bytes)
            self._total_bytes -= body_bytes

    def _count_bytes(self, owner: str, size: int) -> None:
        """Count body bytes. An owner may hold only half of the bytes that other owners leave."""
        own = self._bytes[owner] + size
        if own > self._max_bytes - self._total_bytes:
            metrics.LIMITED.labels("bytes_at_once").inc()
            raise TooManyRequests(
                f"the bodies of this key's requests under way have {own >> 20} MiB at this gateway, its"
                " share; wait for some to end",
                code="too_many_bytes_at_once",
                retry_after_s=1.0,
            )
        self._bytes[owner] = own
        self._total_bytes += size

    @staticmethod
    def _subtract(counts: Counter[str], owner: str, amount: int) -> None:
        counts[owner] -= amount
        if not counts[owner]:
            del counts[owner]
