"""Prefixes that a prefiller still has from earlier turns: vLLM's prefix cache, least recently used out."""

from collections import OrderedDict


class Prefixes:
    def __init__(self, capacity: int) -> None:
        """`capacity` in tokens; 0 remembers nothing."""
        self._capacity = capacity
        self._tokens = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def of(self, conversation: str) -> int:
        return self._held.get(conversation, 0)

    def remember(self, conversation: str, tokens: int) -> None:
        """A prompt was computed; older ones make room for it."""
        if tokens > self._capacity:
            return
        self._tokens += tokens - self._held.pop(conversation, 0)
        self._held[conversation] = tokens
        while self._tokens > self._capacity:
            self._tokens -= self._held.popitem(last=False)[1]
