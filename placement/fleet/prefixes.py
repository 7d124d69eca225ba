"""Shared prefixes: which engines have lately been given the beginning of a prompt that others begin with.

Agents of one framework begin alike, with 10k to 30k tokens of system prompt and tools. What an engine was
given it has in its prefix cache until something else takes the place; the cache cannot be asked, so that what
is known of it here is forgotten after a while without use.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_HEADS = 4096
REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a prompt, up to the end of one of its first messages."""

    digest: bytes  # equal where an engine would find the same blocks
    tokens: int


class SharedPrefixes:
    def __init__(self) -> None:
        self._engines: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # and when they were given it

    def given(self, heads: Iterable[Head], engine: str, now: float) -> None:
        for head in heads:
            self._engines.setdefault(head.digest, {})[engine] = now
            self._engines.move_to_end(head.digest)
        while len(self._engines) > MOST_HEADS:
            self._engines.popitem(last=False)

    def on(self, heads: Sequence[Head], now: float) -> dict[str, int]:
        """Tokens of the longest of `heads`, which are sorted by length, that each engine has."""
        found: dict[str, int] = {}
        for head in heads:
            for engine, at in self._engines.get(head.digest, {}).items():
                if now - at <= REMEMBERED_S:
                    found[engine] = head.tokens
        return found

    def forget(self, engine: str) -> None:
        """It has started anew."""
        for digest in [digest for digest, engines in self._engines.items() if engine in engines]:
            del self._engines[digest][engine]
            if not self._engines[digest]:
                del self._engines[digest]
