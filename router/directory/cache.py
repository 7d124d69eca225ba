"""What a gateway knows without asking: bindings of conversations it serves, and where requests ended."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.identity.chain import End
from router.identity.nodes import NodeTable


@dataclass(slots=True)
class Known:
    """A conversation as this gateway has seen it. Changed in place by its turns."""

    key: str
    engine: str
    epoch: int
    turns: int = 0  # finished here
    prompt_bytes: int = 0  # of its newest request
    completion_tokens: int = 0  # of its newest finished turn
    context_tokens: int = 0  # what its decoder holds, after its newest finished turn
    waiting_since: float | None = None  # when the user message arrived that is not yet answered


class Cache:
    def __init__(self, max_conversations: int, max_nodes: int) -> None:
        self._limit = max_conversations
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._running: dict[str, int] = {}  # conversation -> turns in flight here
        self.nodes = NodeTable(max_nodes)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Known | None:
        return self._known.get(key)

    def put(self, known: Known) -> None:
        self._known[known.key] = known
        self._known.move_to_end(known.key)
        if len(self._known) > self._limit:
            oldest = next((key for key in self._known if key not in self._running), None)
            if oldest is not None:
                self.drop(oldest)

    def drop(self, key: str) -> None:
        self._known.pop(key, None)
        self.nodes.forget(key)

    def touch(self, known: Known) -> None:
        if known.key in self._known:
            self._known.move_to_end(known.key)

    @contextmanager
    def turn(self, key: str, end: End) -> Iterator[None]:
        """A turn in flight. It is known from here on, before it has a place: its twin must see it."""
        self.nodes.record(end, key)
        self._running[key] = self._running.get(key, 0) + 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                if key not in self._known:
                    self.nodes.forget(key)

    def running(self, key: str) -> bool:
        return key in self._running

    def alone(self, key: str) -> bool:
        """At most one turn of it is in flight here: the one that asks."""
        return self._running.get(key, 0) <= 1
