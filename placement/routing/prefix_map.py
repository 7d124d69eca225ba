"""Map of shared prefixes: which engines have lately computed the prefix of a prompt.

Agents of one framework begin their prompts alike, with 10k to 30k tokens of system prompt and tools. An
engine keeps a prefix in its cache until something else takes the space. The cache cannot be queried. So the
map assumes that an engine's KV holds the prompts and conversations that it was given last. When a prompt
finds much less in the cache than expected, the map assumes that less fits. It forgets prefixes that have
not been used for a long time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

MOST_PREFIXES = 4096  # remembered for the whole fleet
MOST_PARTS = 4096  # remembered for one engine
MOST_ENGINES = 256  # remembered for one prefix, because a look-up visits each of them
REMEMBERED_S = 600.0
# Factors on the assumed capacity: after a miss, and after a prompt that found what was expected.
SHRINKS, GROWS = 0.7, 1.1
# Least expected tokens for which a miss counts: a shorter prefix may be less than a block.
LEAST_EXPECTED = 512


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Beginning of a prompt, up to the end of one of its first messages."""

    digest: bytes  # equal where an engine would find the same blocks
    tokens: int


class PlacedPrompt(NamedTuple):
    """Prompt that was placed on an engine."""

    engine: str
    expected: int  # tokens that the engine was expected to have cached
    # Expected tokens, and all tokens that the engine was given after them: if the expected tokens are still
    # cached, at least this many fit.
    used_since: int
    prefixes: Sequence[PromptPrefix]
    at: float


class PrefixPart(NamedTuple):
    """Part of a prompt: what a prefix adds to the next shorter prefix, or what follows the longest one."""

    name: bytes
    start: int
    tokens: int


@dataclass(slots=True)
class KnownPrefix:
    """Record of the engines that have cached a prefix, wholly or in part."""

    start: int  # where its own part begins: the length of the next shorter prefix
    engines: dict[str, float] = field(default_factory=dict)  # engine -> when it last got the prefix


@dataclass(slots=True)
class AssumedCache:
    """Assumed content of an engine's prefix cache, in eviction order."""

    kv_tokens: float = inf  # size of the engine's KV
    capacity: float = inf  # tokens that are assumed to stay in the cache
    tokens: int = 0
    parts: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def put(self, part: PrefixPart) -> None:
        self.drop(part.name)
        self.parts[part.name] = part.tokens
        self.tokens += part.tokens

    def drop(self, name: bytes) -> None:
        self.tokens -= self.parts.pop(name, 0)

    def newer_tokens(self, name: bytes) -> int:
        """Return how many tokens the engine was given after the part `name`."""
        found = 0
        for part, tokens in reversed(self.parts.items()):
            if part == name:
                break
            found += tokens
        return found

    def evict(self) -> list[bytes]:
        """Evict parts until the rest fits, and return the names of the parts that are gone.

        The last part is only shortened, because an engine evicts block by block.
        """
        gone: list[bytes] = []
        while self.parts and (self.tokens > self.capacity or len(self.parts) > MOST_PARTS):
            name, tokens = next(iter(self.parts.items()))
            over = self.tokens - self.capacity
            if 0 < over < tokens and len(self.parts) <= MOST_PARTS:
                self.parts[name] -= int(-(-over // 1))
                self.tokens -= int(-(-over // 1))
            if not 0 < over < tokens or not self.parts[name]:
                self.drop(name)
                gone.append(name)
        return gone


class PrefixMap:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, KnownPrefix] = OrderedDict()
        self._caches: dict[str, AssumedCache] = {}
        self._placed: dict[str, PlacedPrompt] = {}  # by conversation
        self._prefixes: dict[str, Sequence[PromptPrefix]] = {}  # by conversation

    def set_kv_tokens(self, engine: str, tokens: int) -> None:
        """Set the KV capacity of an engine, in tokens."""
        cache = self._caches.setdefault(engine, AssumedCache())
        if cache.kv_tokens != tokens:
            cache.kv_tokens = cache.capacity = tokens

    def prompt_placed(
        self, key: str, engine: str, prefixes: Sequence[PromptPrefix], tokens: int, expected: int, now: float
    ) -> None:
        """Record that `engine` will compute a prompt of `tokens`, `expected` of which should be cached."""
        self._placed.pop(key, None)
        cache = self._caches.get(engine)
        if prefixes and cache is not None:
            cached = [prefix.digest for prefix in prefixes if prefix.tokens <= expected]
            used = expected + (cache.newer_tokens(cached[-1]) if cached else 0)
            self._placed[key] = PlacedPrompt(engine, expected, used, prefixes, now)
        if prefixes:
            self._prefixes[key] = prefixes
        self.record(key, prefixes, engine, tokens, now)

    def prompt_computed(self, key: str, cached: int | None) -> None:
        """Correct the assumed capacity by how many `cached` tokens the engine reported; None: no report."""
        placed = self._placed.pop(key, None)
        cache = self._caches.get(placed.engine) if placed is not None else None
        if placed is None or cache is None or cached is None:
            return
        if cached < placed.expected / 2:
            if placed.expected >= LEAST_EXPECTED:
                cache.capacity = min(cache.capacity, SHRINKS * placed.used_since)
                self._evict(placed.engine)
        elif cached:
            cache.capacity = min(cache.kv_tokens, max(GROWS * cache.capacity, cached))

    def prompt_not_computed(self, key: str) -> None:
        """Forget the prefixes that this prompt should have left on its engine, unless another prompt did."""
        placed = self._placed.pop(key, None)
        if placed is not None and not placed.expected:
            for prefix in placed.prefixes:
                known = self._known.get(prefix.digest)
                if known is not None and known.engines.get(placed.engine) == placed.at:
                    if placed.engine in self._caches:
                        self._caches[placed.engine].drop(prefix.digest)
                    known.engines.pop(placed.engine)

    def conversation_grew(self, key: str, engine: str, tokens: int, now: float) -> None:
        """Record that a turn ended and that `tokens` of its conversation are on the engine."""
        self.record(key, self._prefixes.get(key, ()), engine, tokens, now)

    def conversation_ended(self, key: str) -> None:
        """Forget a conversation. Its prefixes stay in the assumed caches until they are evicted."""
        self.prompt_not_computed(key)
        self._prefixes.pop(key, None)

    def record(
        self, key: str, prefixes: Sequence[PromptPrefix], engine: str, tokens: int, now: float
    ) -> None:
        """Record that an engine has cached a prompt of `tokens` tokens.

        As in vLLM, the end of a prompt is evicted first.
        """
        cache = self._caches.setdefault(engine, AssumedCache())
        parts = _parts(key, prefixes, tokens)
        for part in reversed(parts):
            cache.put(part)
        for part in parts[:-1]:
            known = self._known.setdefault(part.name, KnownPrefix(part.start))
            known.start = part.start  # sizes are estimates, and get better
            known.engines.pop(engine, None)
            known.engines[engine] = now
            if len(known.engines) > MOST_ENGINES:
                del known.engines[next(iter(known.engines))]
            self._known.move_to_end(part.name)
        self._evict(engine)
        while len(self._known) > MOST_PREFIXES:
            oldest, known = self._known.popitem(last=False)
            for name in known.engines:
                if name in self._caches:
                    self._caches[name].drop(oldest)

    def cached_tokens(self, prefixes: Sequence[PromptPrefix], now: float) -> dict[str, int]:
        """Return, for each engine, how many tokens of `prefixes`, the shortest first, it has cached.

        An engine that has a part of a prefix has everything before this part, which is evicted later.
        """
        found: dict[str, int] = {}
        for prefix in prefixes:
            if (known := self._known.get(prefix.digest)) is None:
                continue
            for engine, at in known.engines.items():
                if now - at <= REMEMBERED_S:
                    found[engine] = known.start + self._caches[engine].parts.get(prefix.digest, 0)
        return found

    def forget_engine(self, engine: str) -> None:
        """Forget the prefixes of an engine that restarted or left."""
        self._placed = {key: placed for key, placed in self._placed.items() if placed.engine != engine}
        for name in self._caches.pop(engine, AssumedCache()).parts:
            if name in self._known:
                self._known[name].engines.pop(engine, None)

    def _evict(self, engine: str) -> None:
        for name in self._caches[engine].evict():
            if name in self._known:
                self._known[name].engines.pop(engine, None)


def _parts(key: str, prefixes: Sequence[PromptPrefix], tokens: int) -> list[PrefixPart]:
    """Return the parts of a prompt: one for each prefix, and one for the rest.

    Sizes are estimates, so the estimate of a prefix may exceed that of the prompt and is cut to it.
    """
    parts, end = [], 0
    for prefix in prefixes:
        if (reaches := min(prefix.tokens, tokens)) > end:
            parts.append(PrefixPart(prefix.digest, end, reaches - end))
            end = reaches
    return [*parts, PrefixPart(b"of " + key.encode(), end, tokens - end)]
