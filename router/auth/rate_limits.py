"""Limits of callers: by the minute and at once, their share of a gateway process, and who has no key.

Those by the minute are token buckets of each key, and headers say what is left. They hold for the fleet. Each
gateway grants from what it knows, and hears every `SHARE_EVERY_S` what others have granted: in between,
several can grant the same, which all pay back before they grant again. Without the directory each is by
itself.

Tokens are those that are computed: of the prompt what no cache held, and the answer's. A turn reserves what
its prompt is estimated at, and its end sets that right. Who has no key is known by an address.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from router import metrics
from router.auth.keys import Key, Limits, StructuredOutputs
from router.directory.messages import Spent
from router.errors import ApiError, Forbidden, RateLimited, TooManyRequests
from router.http import Request, Responder
from router.requests.grammars import Grammar

SHARE_EVERY_S = 0.25
_HEARD_S = 3.0  # a gateway that says nothing for so long has no turns
_MOST_METERS = 10_000  # of the keys or addresses that came last
_MINUTE = 60.0
_MOST_GRAMMARS = 1024  # of a key, that are known not to be new
_METERED = ("requests_per_minute", "tokens_per_minute", "turns", "grammars_per_minute")


class Bucket:
    """Holds a minute's worth at most, and refills evenly. It can be overdrawn: what is over is paid back."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.most = per_minute
        self._level = float(per_minute)
        self._at = now

    @classmethod
    def of(cls, per_minute: int | None, before: "Bucket | None", now: float) -> "Bucket | None":
        """With what was left in the one before, of another limit."""
        made = cls(per_minute, now) if per_minute else None
        if made is not None and before is not None:
            made._level = min(made._level, before.level(now))
        return made

    def level(self, now: float) -> float:
        self._level = min(self.most, self._level + (now - self._at) * self.most / _MINUTE)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """A negative amount gives back."""
        self._level = min(self.most, self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Until there is so much; what is more than it ever holds waits until it is full."""
        return max(0.0, min(amount, self.most) - self.level(now)) * _MINUTE / self.most

    def headers(self, of: bytes, now: float) -> list[tuple[bytes, bytes]]:
        left, full_s = max(0, int(self.level(now))), self.wait_s(self.most, now)
        values = b"%d" % self.most, b"%d" % left, b"%.3fs" % full_s
        names = (b"x-ratelimit-%b-%b" % (what, of) for what in (b"limit", b"remaining", b"reset"))
        return list(zip(names, values, strict=True))


class Meter:
    """What a key has used."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.grammars: Bucket | None = None
        self.compiled: OrderedDict[bytes, None] = OrderedDict()  # grammars, the last ones
        self.limit(limits, now)
        self.turns = 0  # here
        self.elsewhere: dict[str, tuple[int, float]] = {}  # gateway: turns, heard at
        self.untold = [0, 0.0]  # requests and tokens that other gateways do not know of

    def limit(self, limits: Limits, now: float) -> None:
        """From now on; what has been used and what is under way stay."""
        self.limits = limits
        self.requests = Bucket.of(limits.requests_per_minute, self.requests, now)
        self.tokens = Bucket.of(limits.tokens_per_minute, self.tokens, now)
        self.grammars = Bucket.of(limits.grammars_per_minute, self.grammars, now)

    def turns_at_once(self, now: float) -> int:
        return self.turns + sum(turns for turns, at in self.elsewhere.values() if now - at < _HEARD_S)


class Charge:
    """The tokens of one turn, reserved and then set right."""

    def __init__(self, meter: Meter | None, responder: Responder | None, clock: Callable[[], float]) -> None:
        self._meter, self._responder, self._clock = meter, responder, clock
        self._reserved = 0
        self.computing = False  # an engine has, or has had, the turn

    def reserve(self, tokens: int) -> None:
        """Refuses what there is nothing left for."""
        meter, now = self._meter, self._clock()
        if meter is None or meter.tokens is None or self._responder is None:
            return
        wait_s = meter.tokens.wait_s(tokens, now)
        if not wait_s:
            self._take(tokens)
        for header in meter.tokens.headers(b"tokens", now):
            self._responder.add_header(*header)
        if wait_s:
            raise _over(f"{meter.tokens.most} tokens a minute", wait_s, "tokens_per_minute")

    def settle(self, prompt: int | None, answer: int) -> None:
        """`prompt`: its tokens that were computed; None where nobody said, which leaves the estimate."""
        if prompt is not None:
            self._take(prompt - self._reserved)
        self._take(answer)
        self._reserved = 0

    def refund(self) -> None:
        """Nothing was computed for it."""
        self._take(-self._reserved)

    def _take(self, tokens: int) -> None:
        meter = self._meter
        if meter is not None and meter.tokens is not None and tokens:
            self._reserved += tokens
            meter.tokens.take(tokens, self._clock())
            meter.untold[1] += tokens


FREE = Charge(None, None, time.monotonic)


class Meters:
    """Of all keys that have limits, or where any key may come, of all addresses."""

    def __init__(
        self, limits_of: Callable[[str], Limits | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limits_of`: a key by its id, where it is one of a list."""
        self._limits_of, self._clock = limits_of, clock
        self._meters: OrderedDict[str, Meter] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._meters)

    def request(self, key: Key, responder: Responder, address: str = "") -> None:
        """One more request that has work done; refused where that is one too many."""
        meter = self._of(_whose(key, address), key.limits)
        if meter is None or meter.requests is None:
            return
        now = self._clock()
        wait_s = meter.requests.wait_s(1, now)
        if not wait_s:
            meter.requests.take(1, now)
            meter.untold[0] += 1
        for header in meter.requests.headers(b"requests", now):
            responder.add_header(*header)
        if wait_s:
            raise _over(f"{meter.requests.most} requests a minute", wait_s, "requests_per_minute")

    def grammar(self, key: Key, grammar: Grammar, address: str = "") -> None:
        """Count a grammar that is new for this key; refuse one too many. Each gateway counts by itself."""
        if key.limits.structured_outputs is StructuredOutputs.REFUSE:
            raise Forbidden(
                f"this key's answers are held to no grammar or schema: leave {grammar.field} out",
                param=grammar.field,
                code="structured_outputs_refused",
            )
        meter = self._of(_whose(key, address), key.limits)
        if meter is None or meter.grammars is None or grammar.digest in meter.compiled:
            return
        now = self._clock()
        if wait_s := meter.grammars.wait_s(1, now):
            raise _over(f"{meter.grammars.most} new grammars a minute", wait_s, "grammars_per_minute")
        meter.grammars.take(1, now)
        meter.compiled[grammar.digest] = None
        if len(meter.compiled) > _MOST_GRAMMARS:
            meter.compiled.popitem(last=False)

    @contextmanager
    def turn(self, key: Key, responder: Responder, address: str = "") -> Iterator[Charge]:
        meter = self._of(_whose(key, address), key.limits)
        if meter is None:
            yield FREE
            return
        most = meter.limits.turns
        if most is not None and meter.turns_at_once(self._clock()) >= most:
            raise _over(f"{most} turns at once", 1.0, "turns")
        charge = Charge(meter, responder, self._clock)
        meter.turns += 1
        try:
            yield charge
        except BaseException as wrong:
            if isinstance(wrong, ApiError) or not charge.computing:  # it cost nothing
                charge.refund()
            raise
        finally:
            meter.turns -= 1

    def _of(self, key: str, limits: Limits | None) -> Meter | None:
        """`limits`: of a key that is in no list any more; else those hold that are in the list now."""
        limits = self._limits_of(key) or limits
        if limits is None or not any(getattr(limits, name) for name in _METERED):
            return None
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = Meter(limits, self._clock())
            if len(self._meters) > _MOST_METERS:
                self._meters.popitem(last=False)
        elif meter.limits is not limits:
            meter.limit(limits, self._clock())
        self._meters.move_to_end(key)
        return meter

    # Among gateways

    async def share(self, tell: Callable[[tuple[Spent, ...]], Awaitable[bool]]) -> None:
        """Until cancelled: what was granted here since others were last told, and the turns there are."""
        told: set[str] = set()  # of them others think that turns run here
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            news = [
                (one, Spent(name, int(one.untold[0]), int(one.untold[1]), one.turns))
                for name, one in self._meters.items()
                if any(one.untold) or one.turns or name in told
            ]
            if news and await tell(tuple(spent for _, spent in news)):
                for meter, spent in news:
                    meter.untold[0] -= spent.requests
                    meter.untold[1] -= spent.tokens
                told = {spent.key for _, spent in news if spent.turns}

    def heard(self, spent: Sequence[tuple[str, Spent]]) -> None:
        now = self._clock()
        for gateway, one in spent:
            meter = self._of(one.key, self._limits_of(one.key))
            if meter is None:
                continue
            if meter.requests is not None:
                meter.requests.take(one.requests, now)
            if meter.tokens is not None:
                meter.tokens.take(one.tokens, now)
            meter.elsewhere = {name: was for name, was in meter.elsewhere.items() if now - was[1] < _HEARD_S}
            meter.elsewhere[gateway] = one.turns, now


def _whose(key: Key, address: str) -> str:
    """Keys that anybody may make up are counted by where they come from."""
    return key.id if key.hash else address


def _over(limit: str, wait_s: float, which: str) -> RateLimited:
    metrics.LIMITED.labels(which).inc()
    text = f"this key's limit is {limit}; try again in {wait_s:.3f}s"
    return RateLimited(text, retry_after_s=wait_s)


class Shares:
    """Of a gateway process: no owner has more requests under way, or bytes of bodies, than its share.

    An open connection is not yet an owner's; its request is, from its head to the end of its answer, and so
    are the bytes of its body, which are kept as long: a turn may have to be sent again.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        """`most`: requests under way of one owner; `most_bytes`: of bodies, of all owners."""
        self._most, self._most_bytes = most, most_bytes
        self._under_way: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._all_bytes = 0

    @contextmanager
    def one(self, owner: str) -> Iterator[Callable[[int], None]]:
        """A request of `owner` under way; refused where that would be one too many. Yields what is told of
        each piece of its body that is kept, and refuses what is too much."""
        if self._under_way[owner] >= self._most:
            metrics.LIMITED.labels("requests_at_once").inc()
            raise TooManyRequests(
                f"this key has {self._most} requests under way at this gateway, its share of the"
                " connections; wait for some to end",
                code="too_many_at_once",
                retry_after_s=1.0,
            )
        self._under_way[owner] += 1
        kept = 0

        def keep(size: int) -> None:
            nonlocal kept
            self._keep(owner, size)
            kept += size

        try:
            yield keep
        finally:
            self._less(self._under_way, owner, 1)
            self._less(self._bytes, owner, kept)
            self._all_bytes -= kept

    def _keep(self, owner: str, size: int) -> None:
        """An owner may have as much as nobody has: half where it is alone, and there is always some left."""
        own = self._bytes[owner] + size
        if own > self._most_bytes - self._all_bytes:
            metrics.LIMITED.labels("bytes_at_once").inc()
            raise TooManyRequests(
                f"the bodies of this key's requests under way have {own >> 20} MiB at this gateway, its"
                " share; wait for some to end",
                code="too_many_bytes_at_once",
                retry_after_s=1.0,
            )
        self._bytes[owner] = own
        self._all_bytes += size

    @staticmethod
    def _less(counts: Counter[str], owner: str, by: int) -> None:
        counts[owner] -= by
        if not counts[owner]:
            del counts[owner]


FORWARDED_FOR = b"x-forwarded-for"
_REMEMBERED = 4096
_MOST_HOPS = 32
_LONGEST = 64  # characters of a hop: an address and a port have fewer

Address = IPv4Address | IPv6Address


class Addresses:
    """Callers' addresses: that of the connection, or where a proxy that is trusted made it, the one it names.

    Whoever calls may write any `X-Forwarded-For`; each proxy appends whom it was called by. So the list is
    read from its end for as long as trusted proxies wrote it: the first address that is not theirs is the
    caller's.
    """

    def __init__(self, trusted: Sequence[str]) -> None:
        """`trusted`: networks of proxies, as in 10.0.0.0/8."""
        self._trusted = [ip_network(one) for one in trusted]
        self._read = lru_cache(_REMEMBERED)(_parsed)

    def of(self, request: Request) -> str:
        peer = request.peer[0] if request.peer is not None else ""
        if not self._trusted or not self._trusts(self._read(peer)):
            return peer
        said = b",".join(value for name, value in request.headers.raw if name.lower() == FORWARDED_FOR)
        caller = peer
        for hop in reversed(said.decode("latin-1").split(",")[-_MOST_HOPS:]):
            address = self._read(hop) if len(hop) <= _LONGEST and "%" not in hop else None
            if address is None:
                break  # whoever wrote that names nobody (a zone as in %eth0 is any text): the one before it
            caller = str(address)
            if not self._trusts(address):
                break
        return caller

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _parsed(text: str) -> Address | None:
    """Without a port, which some proxies write too."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
