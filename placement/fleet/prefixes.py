"""Shared prefixes: which engines have lately been given the beginning of a prompt that others begin with.

Agents of one framework begin alike, with 10k to 30k tokens of system prompt and tools. What an engine was
given it has in its prefix cache until something else takes the place. The cache cannot be asked: what is
known of it here is what fits into its KV, the latest last; it is forgotten after a while without use, and
when a prompt finds much less than that.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from placement.fleet.answers import PrefillerChoice, PrefillerOption, Why
from placement.fleet.prefillers import Prefillers

RECOMPUTE_COST = 0.5  # of an engine's time that tokens take which another has, or it had
MOST_HEADS = 4096
MOST_PARTS = 4096  # of prompts, that are kept in mind of one engine
REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a prompt, up to the end of one of its first messages."""

    digest: bytes  # equal where an engine would find the same blocks
    tokens: int


class GivenPrompt(NamedTuple):
    """A prompt that an engine computes."""

    engine: str
    heads: Sequence[Head]
    expected: int  # tokens that it was thought to have


@dataclass(slots=True)
class Beginning:
    """One head, over all engines."""

    times: int = 0  # that a prompt began with it
    engines: dict[str, float] = field(default_factory=dict)  # that were given it, and when


@dataclass(slots=True)
class EngineCache:
    """What an engine's prefix cache holds as far as it was given here, what gives way first in front."""

    room: float = inf  # tokens
    tokens: int = 0
    parts: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # of prompts, beyond their beginning

    def put(self, part: bytes, tokens: int) -> None:
        self.drop(part)
        if tokens > 0:
            self.parts[part] = tokens
            self.tokens += tokens

    @property
    def overflows(self) -> bool:
        return self.tokens > self.room or len(self.parts) > MOST_PARTS

    def drop(self, part: bytes) -> None:
        self.tokens -= self.parts.pop(part, 0)


class SharedPrefixes:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Beginning] = OrderedDict()
        self._caches: dict[str, EngineCache] = {}
        self._given: dict[str, GivenPrompt] = {}  # by conversation
        self._tails = count()

    def holds(self, engine: str, tokens: int) -> None:
        """So much KV fits there."""
        self._caches.setdefault(engine, EngineCache()).room = tokens

    def computing(self, key: str, given: GivenPrompt, tokens: int, now: float) -> None:
        """A prompt of so many tokens is on its way to who computes it."""
        if given.heads:
            self.given(given.heads, given.engine, tokens, now)
            self._given[key] = given

    def computed(self, key: str, cached: int) -> None:
        """`cached`: what the engine had of it, as it says. Where that is much less than was thought, its
        cache is too small for what it is given."""
        given = self._given.pop(key, None)
        if given is not None and cached < given.expected / 2:
            self._withdraw(given)

    def not_computed(self, key: str) -> None:
        """Or nobody knows: who was to bring the beginning has not."""
        given = self._given.pop(key, None)
        if given is not None and not given.expected:
            self._withdraw(given)

    def _withdraw(self, given: GivenPrompt) -> None:
        for head in given.heads:
            self._lost(given.engine, head.digest)

    def given(self, heads: Sequence[Head], engine: str, tokens: int, now: float) -> None:
        """As vLLM has it, what is at the end of a prompt gives way before its beginning."""
        if not heads:
            return
        cache = self._caches.setdefault(engine, EngineCache())
        cache.put(b"tail %d" % next(self._tails), tokens - heads[-1].tokens)
        starts = [0, *(head.tokens for head in heads)]
        for head, start in zip(reversed(heads), reversed(starts[:-1]), strict=True):
            beginning = self._known.setdefault(head.digest, Beginning())
            beginning.engines[engine] = now
            cache.put(head.digest, head.tokens - start)
        for head in heads:
            self._known[head.digest].times += 1
            self._known.move_to_end(head.digest)
        while cache.overflows:
            self._lost(engine, next(iter(cache.parts)))
        while len(self._known) > MOST_HEADS:
            oldest = next(iter(self._known))
            for name in list(self._known[oldest].engines):
                self._caches[name].drop(oldest)
            del self._known[oldest]

    def _lost(self, engine: str, part: bytes) -> None:
        self._caches[engine].drop(part)
        if part in self._known:
            self._known[part].engines.pop(engine, None)

    def on(self, heads: Sequence[Head], now: float) -> dict[str, int]:
        """Tokens of the longest of `heads`, which are sorted by length, that each engine has."""
        found: dict[str, int] = {}
        for head in heads:
            beginning = self._known.get(head.digest)
            for engine, at in beginning.engines.items() if beginning else ():
                if now - at <= REMEMBERED_S:
                    found[engine] = head.tokens
        return found

    def displaced(self, engine: str, tokens: int, now: float) -> int:
        """Of beginnings that several prompts had, what would give way there to so many new tokens."""
        cache = self._caches.get(engine)
        over = cache.tokens + tokens - cache.room if cache else 0
        shared = 0
        for part, size in cache.parts.items() if cache and over > 0 else ():
            beginning = self._known.get(part)
            if beginning and beginning.times > 1 and now - beginning.engines.get(engine, now) <= REMEMBERED_S:
                shared += size
            over -= size
            if over <= 0:
                break
        return shared

    def forget(self, engine: str) -> None:
        """It has started anew, or is gone."""
        self._given = {key: given for key, given in self._given.items() if given.engine != engine}
        cache = self._caches.pop(engine, EngineCache())
        for part in cache.parts:
            if part in self._known:
                self._known[part].engines.pop(engine, None)
                if not self._known[part].engines:
                    del self._known[part]


class AskedPrompt(NamedTuple):
    """A prompt that a prefiller is chosen for."""

    tokens: int
    ahead_s: float
    now: float


def with_beginning(
    prefiller: PrefillerChoice, prefillers: Prefillers, asked: AskedPrompt, cached: Mapping[str, int]
) -> PrefillerChoice:
    """What a prefiller has of a prompt it does not compute, and its queue is as much shorter."""
    best = prefiller.chosen
    if best is None:
        return prefiller
    for engine, had in cached.items():
        has = prefillers.option(engine, asked.tokens, asked.now, had, asked.ahead_s)
        if has is not None and _cost(has) < _cost(best):
            best = has
    return _instead(prefiller, best, Why.HAS_BEGINNING)


def keeping_beginnings(
    prefiller: PrefillerChoice, prefillers: Prefillers, asked: AskedPrompt, shared: SharedPrefixes
) -> PrefillerChoice:
    """Another one, if what several prompts begin with would give way on the one that finishes first."""

    def lost_s(one: PrefillerOption) -> float:
        lost = shared.displaced(one.engine, asked.tokens - one.cached_tokens, asked.now)
        again = prefillers.option(one.engine, lost, asked.now) if lost else None
        return RECOMPUTE_COST * again.prefill_s if again is not None else 0.0

    first = prefiller.chosen
    if first is None or not lost_s(first):
        return prefiller
    best = min((first, *prefiller.runners_up), key=lambda one: _cost(one) + lost_s(one))
    return _instead(prefiller, best, Why.KEEPS_BEGINNINGS)


def _instead(prefiller: PrefillerChoice, best: PrefillerOption, why: Why) -> PrefillerChoice:
    if best is prefiller.chosen:
        return prefiller
    seen = filter(None, (prefiller.chosen, *prefiller.runners_up))
    others = tuple(one for one in seen if one.engine != best.engine)
    return PrefillerChoice(why, best, others, prefiller.considered)


def _cost(option: PrefillerOption) -> float:
    """Seconds to its end, and some of the prefiller's time: computing again what another has, to end somewhat
    sooner, makes those wait that come next."""
    return option.wait_s + (1 + RECOMPUTE_COST) * option.prefill_s
