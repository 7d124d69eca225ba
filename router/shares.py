"""Shares of a gateway's connections: no owner has more requests under way than its share.

An open connection is not yet an owner's; its request is, from its head to the end of its answer.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import TooManyRequests


class Shares:
    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """A request of `owner` under way; refused where that would be one too many."""
        if self._under_way[owner] >= self._most:
            raise TooManyRequests(
                f"this key has {self._most} requests under way at this gateway, its share of the"
                " connections; wait for some to end",
                code="too_many_at_once",
                retry_after_s=1.0,
            )
        self._under_way[owner] += 1
        try:
            yield
        finally:
            self._under_way[owner] -= 1
            if not self._under_way[owner]:
                del self._under_way[owner]
