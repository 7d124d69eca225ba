"""Shared prefixes: which engines have lately been given the beginning of a prompt that others begin with.

Agents of one framework begin alike, with 10k to 30k tokens of system prompt and tools. What an engine was
given it has in its prefix cache until something else takes the place. The cache cannot be asked: what is
known of it here is forgotten after a while without use, and when a prefill finds much less than that.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_HEADS = 4096
REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a prompt, up to the end of one of its first messages."""

    digest: bytes  # equal where an engine would find the same blocks
    tokens: int


class GivenPrompt(NamedTuple):
    """A prompt on its way through a prefiller."""

    engine: str
    heads: Sequence[Head]
    expected: int  # tokens that it was thought to have


class SharedPrefixes:
    def __init__(self) -> None:
        self._engines: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # and when they were given it
        self._given: dict[str, GivenPrompt] = {}  # by conversation

    def prefilling(self, key: str, given: GivenPrompt, now: float) -> None:
        if given.heads:
            self.given(given.heads, given.engine, now)
            self._given[key] = given

    def prefilled(self, key: str, cached: int) -> None:
        """`cached`: what the prefiller had of it, as it says. Where that is much less than was thought, its
        cache is too small for what it is given."""
        given = self._given.pop(key, None)
        if given is not None and cached < given.expected / 2:
            self._withdraw(given)

    def not_prefilled(self, key: str) -> None:
        """It was not computed, or nobody knows: who was to bring the beginning has not."""
        given = self._given.pop(key, None)
        if given is not None and not given.expected:
            self._withdraw(given)

    def _withdraw(self, given: GivenPrompt) -> None:
        for head in given.heads:
            self._engines.get(head.digest, {}).pop(given.engine, None)

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
        self._given = {key: given for key, given in self._given.items() if given.engine != engine}
        for digest in [digest for digest, engines in self._engines.items() if engine in engines]:
            del self._engines[digest][engine]
            if not self._engines[digest]:
                del self._engines[digest]
