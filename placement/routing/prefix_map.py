"""Shared prefixes: which engines have lately been given the beginning of a prompt that others begin with.

Agents of one framework begin alike, with 10k to 30k tokens of system prompt and tools. What an engine was
given it has in its prefix cache until something else takes the place. The cache cannot be asked: what is
known of it here is what of prompts and of their conversations fits into its KV, the latest last. Where a
prompt finds much less than that, less is taken to fit; what was not used for long is forgotten.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from placement.routing.prefill_queue import Prefillers
from placement.routing.receipts import PrefillerChoice, PrefillerOption, Why

RECOMPUTE_COST = 0.5  # of an engine's time that tokens take which another has, or it had
MOST_HEADS = 4096
MOST_PARTS = 4096  # of prompts, that are kept in mind of one engine
MOST_ENGINES = 256  # that have a beginning, the latest: each is looked at for a prompt that begins so
MOST_HOLDERS = 32  # prefillers of these, of which the one that ends first is looked for
REMEMBERED_S = 600.0
# What is taken to fit: after a miss, and after a prompt that found what was thought.
SHRINKS, GROWS = 0.7, 1.1
LEAST_EXPECTED = (
    512  # tokens: a shorter beginning may be less than a block, and says nothing when it is missed
)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a prompt, up to the end of one of its first messages."""

    digest: bytes  # equal where an engine would find the same blocks
    tokens: int


class GivenPrompt(NamedTuple):
    """A prompt that an engine computes."""

    engine: str
    expected: int  # tokens that it was thought to have
    since: int  # tokens that it was given since it had those, with them: so much fits, if it has them
    heads: Sequence[Head]
    at: float


class Part(NamedTuple):
    """Of a prompt: what a head has beyond the head before it, or what is behind the last."""

    name: bytes
    start: int
    tokens: int


@dataclass(slots=True)
class Beginning:
    """One head, over all engines."""

    start: int
    times: int = 0  # that a conversation began with it, or will, as the client of one has said
    engines: dict[str, float] = field(
        default_factory=dict
    )  # that have some of it, and when they were given it


@dataclass(slots=True)
class EngineCache:
    """What an engine's prefix cache holds as far as it was given here, what gives way first in front."""

    most: float = inf  # tokens that fit
    capacity: float = inf  # and are taken to fit
    tokens: int = 0
    parts: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def put(self, part: Part) -> None:
        self.drop(part.name)
        self.parts[part.name] = part.tokens
        self.tokens += part.tokens

    def drop(self, name: bytes) -> None:
        self.tokens -= self.parts.pop(name, 0)

    def newer(self, name: bytes) -> int:
        """Tokens that it was given since it was given that part."""
        found = 0
        for part, tokens in reversed(self.parts.items()):
            if part == name:
                break
            found += tokens
        return found

    def over(self) -> list[bytes]:
        """What has to give way does: of the last such part only its end, as blocks are freed."""
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


class SharedPrefixes:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Beginning] = OrderedDict()
        self._caches: dict[str, EngineCache] = {}
        self._given: dict[str, GivenPrompt] = {}  # by conversation
        self._heads: dict[str, Sequence[Head]] = {}  # of conversations
        self._first: dict[str, int] = {}  # in their first turn: heads that others will have, as was said

    def holds(self, engine: str, tokens: int) -> None:
        """So much KV fits there."""
        cache = self._caches.setdefault(engine, EngineCache())
        if cache.most != tokens:
            cache.most = cache.capacity = tokens

    def began(self, key: str, heads: Sequence[Head], *, new: bool, shared: int = 0) -> None:
        """A conversation, that was not somewhere else before; others will begin with so many of its heads."""
        if heads:
            self._heads[key] = heads
        if new and key not in self._first:
            self._first[key] = shared
            self._count(key, 1)

    def _count(self, key: str, times: int) -> None:
        for number, head in enumerate(self._heads.get(key, ())):
            if (beginning := self._known.get(head.digest)) is not None:
                beginning.times = max(0, beginning.times + times * (1 + (number < self._first[key])))

    def computing(
        self, key: str, engine: str, heads: Sequence[Head], tokens: int, expected: int, now: float
    ) -> None:
        """A prompt of so many tokens is on its way to who computes it, and is thought to have `expected`."""
        self._given.pop(key, None)
        cache = self._caches.get(engine)
        if heads and cache is not None:
            had = [head.digest for head in heads if head.tokens <= expected]
            since = expected + (cache.newer(had[-1]) if had else 0)
            self._given[key] = GivenPrompt(engine, expected, since, heads, now)
        self.given(key, heads, engine, tokens, now)

    def computed(self, key: str, cached: int | None) -> None:
        """`cached`: what the engine had of it, if it says so. It has all of it now; where it had much less
        than was thought, less fits than was thought; where it had more, that fits at least."""
        given = self._given.pop(key, None)
        cache = self._caches.get(given.engine) if given is not None else None
        if given is None or cache is None or cached is None:
            return
        if cached < given.expected / 2:
            if given.expected >= LEAST_EXPECTED:
                cache.capacity = min(cache.capacity, SHRINKS * given.since)
                self._give_way(given.engine)
        elif cached:
            cache.capacity = min(cache.most, max(GROWS * cache.capacity, cached))

    def not_computed(self, key: str) -> None:
        """Or nobody knows: who was to bring the beginning has not, unless it was given to another since."""
        given = self._given.pop(key, None)
        if given is not None and not given.expected:
            for head in given.heads:
                if self._given_at(head.digest, given.engine) == given.at:
                    self._lost(given.engine, head.digest)

    def grew(self, key: str, engine: str, tokens: int, now: float) -> None:
        """A turn ended: so much of the conversation is there."""
        self._first.pop(key, None)
        self.given(key, self._heads.get(key, ()), engine, tokens, now)

    def ended(self, key: str) -> None:
        """Nothing more comes of the conversation. What an engine has of it is there until it gives way. One
        that had no turn did not begin: its client asks again."""
        self.not_computed(key)
        if key in self._first:
            self._count(key, -1)
            del self._first[key]
        self._heads.pop(key, None)

    def given(self, key: str, heads: Sequence[Head], engine: str, tokens: int, now: float) -> None:
        """As vLLM has it, what is at the end of a prompt gives way before its beginning."""
        cache = self._caches.setdefault(engine, EngineCache())
        parts = _parts(key, heads, tokens)
        for part in reversed(parts):
            cache.put(part)
        for part in parts[:-1]:
            beginning = self._known.setdefault(part.name, Beginning(part.start))
            beginning.start = part.start  # sizes are estimates, and get better
            beginning.engines.pop(engine, None)
            beginning.engines[engine] = now
            if len(beginning.engines) > MOST_ENGINES:
                del beginning.engines[next(iter(beginning.engines))]
            self._known.move_to_end(part.name)
        self._give_way(engine)
        while len(self._known) > MOST_HEADS:
            oldest, beginning = self._known.popitem(last=False)
            for name in beginning.engines:
                if name in self._caches:
                    self._caches[name].drop(oldest)

    def on(self, heads: Sequence[Head], now: float) -> dict[str, int]:
        """Tokens of `heads`, which are sorted by length, that each engine has: who has some of one has what
        is before it, which gives way later."""
        found: dict[str, int] = {}
        for head in heads:
            if (beginning := self._known.get(head.digest)) is None:
                continue
            for engine, at in beginning.engines.items():
                if now - at <= REMEMBERED_S:
                    found[engine] = beginning.start + self._caches[engine].parts.get(head.digest, 0)
        return found

    def displaced(self, engine: str, heads: Sequence[Head], tokens: int, now: float) -> int:
        """Of beginnings that several other conversations had, what would give way there to so many tokens."""
        cache, own = self._caches.get(engine), {head.digest for head in heads}
        over = cache.tokens + tokens - cache.capacity if cache else 0
        shared = 0
        for name, size in cache.parts.items() if cache and over > 0 else ():
            if name in own:
                continue
            beginning = self._known.get(name)
            if beginning and beginning.times > 1 and now - beginning.engines.get(engine, now) <= REMEMBERED_S:
                shared += int(min(size, over))
            over -= size
            if over <= 0:
                break
        return shared

    def forget(self, engine: str) -> None:
        """It has started anew, or is gone."""
        self._given = {key: given for key, given in self._given.items() if given.engine != engine}
        for name in self._caches.pop(engine, EngineCache()).parts:
            if name in self._known:
                self._known[name].engines.pop(engine, None)

    def _give_way(self, engine: str) -> None:
        for name in self._caches[engine].over():
            if name in self._known:
                self._known[name].engines.pop(engine, None)

    def _given_at(self, digest: bytes, engine: str) -> float | None:
        beginning = self._known.get(digest)
        return beginning.engines.get(engine) if beginning is not None else None

    def _lost(self, engine: str, name: bytes) -> None:
        if engine in self._caches:
            self._caches[engine].drop(name)
        if name in self._known:
            self._known[name].engines.pop(engine, None)


def _parts(key: str, heads: Sequence[Head], tokens: int) -> list[Part]:
    """The heads' as far as they have any of the prompt, and what is behind them: sizes are estimates, and a
    head may be taken for longer than the prompt."""
    parts, end = [], 0
    for head in heads:
        if (reaches := min(head.tokens, tokens)) > end:
            parts.append(Part(head.digest, end, reaches - end))
            end = reaches
    return [*parts, Part(b"of " + key.encode(), end, tokens - end)]


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
    for engine in prefillers.soonest(cached, MOST_HOLDERS, asked.now):
        has = prefillers.option(engine, asked.tokens, asked.now, cached[engine], asked.ahead_s)
        if has is not None and _cost(has) < _cost(best):
            best = has
    return _instead(prefiller, best, Why.HAS_BEGINNING)


def keeping_beginnings(
    prefiller: PrefillerChoice,
    prefillers: Prefillers,
    asked: AskedPrompt,
    heads: Sequence[Head],
    shared: SharedPrefixes,
) -> PrefillerChoice:
    """Another one, if more of what several prompts begin with would give way on the one that is chosen."""

    def lost_s(one: PrefillerOption) -> float:
        lost = shared.displaced(one.engine, heads, asked.tokens - one.cached_tokens, asked.now)
        again = prefillers.option(one.engine, lost, asked.now) if lost else None
        return RECOMPUTE_COST * again.prefill_s if again is not None else 0.0

    first = prefiller.chosen
    if first is None or not (most_s := lost_s(first)):
        return prefiller
    costs = {one: _cost(one) + lost for one in prefiller.runners_up if (lost := lost_s(one)) < most_s}
    best = min(costs, key=costs.__getitem__, default=first)
    if best is first or costs[best] >= _cost(first) + most_s:
        return prefiller
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
