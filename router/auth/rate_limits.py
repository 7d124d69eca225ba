"""Limits what a key may use: requests, tokens and new grammars per minute, and concurrent turns.

Limits per minute are token buckets, and response headers say what is left. New grammars are counted by each
gateway process for itself. The other limits hold for the fleet: each gateway grants from what it knows, and
hears every `SHARE_EVERY_S` what the others have granted. Two gateways can grant the same tokens in between;
the buckets are then overdrawn and grant nothing until they have refilled. Without the directory, each gateway
counts for itself.

Tokens are computed tokens: prompt tokens that no cache had, and answer tokens. A turn is charged an estimate
for its prompt, which is corrected at the turn's end.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from router import metrics
from router.auth.keys import Key, Limits, StructuredOutputs
from router.directory.api.messages import Spent
from router.errors import ApiError, BadRequest, Forbidden, RateLimited
from router.http import Responder
from router.requests.grammars import Grammar

SHARE_EVERY_S = 0.25
_GATEWAY_SILENT_S = 3.0  # a gateway that reports nothing for so long has no turns
_MAX_METERS = 10_000  # keys or addresses; beyond this, the least recently used meters are dropped
_MAX_KNOWN_GRAMMARS = 1024  # for each key


class Bucket:
    """Token bucket for one per-minute limit. It can be overdrawn, and is then negative until it refills."""

    def __init__(self, per_minute: int, now: float, level: float | None = None) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute if level is None else min(per_minute, level))
        self._updated_at = now

    def level(self, now: float) -> float:
        refilled = (now - self._updated_at) * self.per_minute / 60
        self._level = min(self.per_minute, self._level + refilled)
        self._updated_at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take `amount` from the bucket; a negative amount goes back into it."""
        self._level = min(self.per_minute, self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount`, or is full if `amount` exceeds its size."""
        return max(0.0, min(amount, self.per_minute) - self.level(now)) * 60 / self.per_minute

    def headers(self, unit: bytes, now: float) -> list[tuple[bytes, bytes]]:
        left, full_s = max(0, int(self.level(now))), self.wait_s(self.per_minute, now)
        return [
            (b"x-ratelimit-limit-" + unit, b"%d" % self.per_minute),
            (b"x-ratelimit-remaining-" + unit, b"%d" % left),
            (b"x-ratelimit-reset-" + unit, b"%.3fs" % full_s),
        ]


class Meter:
    """Usage of one key, or of one address without a key."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.buckets: dict[str, Bucket] = {}  # by unit: requests, tokens, grammars
        self.set_limits(limits, now)
        self.turns = 0  # at this gateway
        self.turns_elsewhere: dict[str, tuple[int, float]] = {}  # by gateway: turns, time of the report
        self.unreported: Counter[str] = Counter()  # by unit: granted here, unknown to other gateways
        self.known_grammars: OrderedDict[bytes, None] = OrderedDict()  # most recent last

    def set_limits(self, limits: Limits, now: float) -> None:
        """Change the limits, and keep what was counted of usage and running turns."""
        before, self.limits, self.buckets = self.buckets, limits, {}
        for unit in ("requests", "tokens", "grammars"):
            if per_minute := getattr(limits, f"{unit}_per_minute"):
                level = before[unit].level(now) if unit in before else None
                self.buckets[unit] = Bucket(per_minute, now, level)

    def all_turns(self, now: float) -> int:
        reports = self.turns_elsewhere.values()
        return self.turns + sum(turns for turns, at in reports if now - at < _GATEWAY_SILENT_S)

    def begin_turns(self, count: int, now: float) -> None:
        """Count `count` more running turns, or refuse them if they exceed the limit."""
        limit = self.limits.turns
        if limit is not None and self.all_turns(now) + count > limit:
            raise _refusal(f"{limit} turns at once", 1.0, "turns")
        self.turns += count

    def take(self, unit: str, amount: int, now: float) -> int:
        """Take `amount` of a unit and return it; return 0 if the unit has no limit."""
        if unit not in self.buckets:
            return 0
        self.buckets[unit].take(amount, now)
        self.unreported[unit] += amount
        return amount

    def admit(self, unit: str, amount: int, now: float, responder: Responder | None = None) -> int:
        """Like `take`, but refuse the request if less than `amount` is left; headers state what is left."""
        bucket = self.buckets.get(unit)
        if bucket is None:
            return 0
        wait_s = bucket.wait_s(amount, now)
        taken = 0 if wait_s else self.take(unit, amount, now)
        if responder is not None:
            for header in bucket.headers(unit.encode(), now):
                responder.add_header(*header)
        if wait_s:
            what = "new grammars" if unit == "grammars" else unit
            raise _refusal(f"{bucket.per_minute} {what} a minute", wait_s, f"{unit}_per_minute")
        return taken


class Charge:
    """Charges a turn to its key: one running turn for each answer, and tokens, first by an estimate."""

    def __init__(self, meter: Meter | None, responder: Responder | None, clock: Callable[[], float]) -> None:
        self._meter, self._responder, self._clock = meter, responder, clock
        self._reserved = 0
        self.turns = 1
        self.computing = False  # an engine has computed something for the turn, or is about to

    def count_answers(self, answers: int) -> None:
        """Count each answer of the turn as a turn, or refuse the turn."""
        if self._meter is None or answers == 1:
            return
        limit = self._meter.limits.turns
        if limit is not None and answers > limit:
            asked = f"the request asks for {answers} answers, and each counts as a turn"
            raise BadRequest(f"{asked}; this key may have {limit} turns at once", param="n")
        self._meter.begin_turns(answers - 1, self._clock())
        self.turns = answers

    def reserve(self, tokens: int) -> None:
        """Charge the estimate for a prompt, or refuse the turn."""
        if self._meter is not None:
            self._reserved += self._meter.admit("tokens", tokens, self._clock(), self._responder)

    def settle(self, prompt: int | None, answer: int) -> None:
        """Charge the computed tokens of prompt and answer. If `prompt` is None, its estimate stays."""
        if self._meter is not None:
            correction = 0 if prompt is None else prompt - self._reserved
            self._meter.take("tokens", correction + answer, self._clock())
        self._reserved = 0

    def refund(self) -> None:
        """Give the estimate back, because nothing was computed for the turn."""
        if self._meter is not None and self._reserved:
            self._meter.take("tokens", -self._reserved, self._clock())
        self._reserved = 0


UNMETERED = Charge(None, None, time.monotonic)


class Meters:
    """Meters of all keys with limits, and of all addresses at gateways without keys."""

    def __init__(
        self, limits_of: Callable[[str], Limits | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without meters. `limits_of` returns a key's current limits, by its id; None if unknown."""
        self._limits_of, self._clock = limits_of, clock
        self._meters: OrderedDict[str, Meter] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._meters)

    def request(self, key: Key, responder: Responder, address: str = "") -> None:
        """Count a request, or raise RateLimited if the key has none left."""
        meter = self._meter(_name(key, address), key.limits)
        if meter is not None:
            meter.admit("requests", 1, self._clock(), responder)

    def grammar(self, key: Key, grammar: Grammar, address: str = "") -> None:
        """Count a grammar that this gateway has not seen from this key, or refuse it."""
        if key.limits.structured_outputs is StructuredOutputs.REFUSE:
            raise Forbidden(
                f"this key may not ask for a grammar or schema: leave {grammar.field} out",
                param=grammar.field,
                code="structured_outputs_refused",
            )
        meter = self._meter(_name(key, address), key.limits)
        if meter is None or "grammars" not in meter.buckets or grammar.digest in meter.known_grammars:
            return
        meter.admit("grammars", 1, self._clock())
        meter.known_grammars[grammar.digest] = None
        if len(meter.known_grammars) > _MAX_KNOWN_GRAMMARS:
            meter.known_grammars.popitem(last=False)

    @contextmanager
    def turn(self, key: Key, responder: Responder, address: str = "") -> Iterator[Charge]:
        """Count a running turn and yield its charge; raise RateLimited if the key has no turn left."""
        meter = self._meter(_name(key, address), key.limits)
        if meter is None:
            yield UNMETERED
            return
        meter.begin_turns(1, self._clock())
        charge = Charge(meter, responder, self._clock)
        try:
            yield charge
        except BaseException as error:
            if isinstance(error, ApiError) or not charge.computing:  # nothing was computed
                charge.refund()
            raise
        finally:
            meter.turns -= charge.turns

    def _meter(self, name: str, limits: Limits | None) -> Meter | None:
        """Return the meter of a key or address, or None if it has no limits.

        The limits are those that the keyring has now, or `limits` for a key that was removed from it.
        """
        limits = self._limits_of(name) or limits
        if limits is None or not limits.metered:
            return None
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter(limits, self._clock())
            if len(self._meters) > _MAX_METERS:
                self._meters.popitem(last=False)
        elif meter.limits is not limits and meter.limits != limits:
            meter.set_limits(limits, self._clock())
        self._meters.move_to_end(name)
        return meter

    async def share(self, report: Callable[[tuple[Spent, ...]], Awaitable[bool]]) -> None:
        """Report the tokens granted and the turns running here to the other gateways, until cancelled."""
        running: set[str] = set()  # keys whose running turns the last report contained
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            news = []
            for name, meter in self._meters.items():
                requests, tokens = meter.unreported["requests"], meter.unreported["tokens"]
                if requests or tokens or meter.turns or name in running:
                    news.append((meter, Spent(name, requests, tokens, meter.turns)))
            if news and await report(tuple(spent for _, spent in news)):
                for meter, spent in news:
                    meter.unreported.subtract({"requests": spent.requests, "tokens": spent.tokens})
                running = {spent.key for _, spent in news if spent.turns}

    def apply_spent(self, reports: Sequence[tuple[str, Spent]]) -> None:
        """Deduct what other gateways have granted. `reports` are pairs of a gateway and what it granted."""
        now = self._clock()
        for gateway, spent in reports:
            meter = self._meter(spent.key, self._limits_of(spent.key))
            if meter is None:
                continue
            for unit, amount in (("requests", spent.requests), ("tokens", spent.tokens)):
                if unit in meter.buckets:
                    meter.buckets[unit].take(amount, now)
            known = meter.turns_elsewhere.items()
            meter.turns_elsewhere = {name: was for name, was in known if now - was[1] < _GATEWAY_SILENT_S}
            meter.turns_elsewhere[gateway] = spent.turns, now


def _name(key: Key, address: str) -> str:
    """Return the name of a caller's meter: the key's id, or the address where callers have no key."""
    return key.id if key.hash else address


def _refusal(limit: str, wait_s: float, label: str) -> RateLimited:
    metrics.LIMITED.labels(label).inc()
    text = f"this key's limit is {limit}; try again in {wait_s:.3f}s"
    return RateLimited(text, retry_after_s=wait_s)
