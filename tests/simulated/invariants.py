"""Invariants of the control plane, observed from outside its processes.

The monitor reads rows on their way into the journal, placements on their way out of a gateway's client, and
turns on their way to an engine. It changes none of them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.auth.keys import Key, Limits
from router.auth.rate_limits import Meter, Meters
from router.batch.store.request_table import RequestTable
from router.directory.api.cache import Cache
from router.directory.api.calls import ActivityReports
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import Activity, Ask, Placed
from router.directory.journal import Journal, Row
from router.directory.server import DirectoryServer
from router.directory.table import BindingTable
from router.gateway.turn.binding import Route
from router.gateway.turn.execution import TurnRunner
from tests.simulated.loop import SimulatedProcess, current

if TYPE_CHECKING:
    from tests.simulated.world import World

State = tuple[str, int] | None  # engine and epoch that a conversation is bound to
PLACE_GRACE_S = 4.0  # by which a placement may exceed the wait that its turn asks for
STALE_S = 4.0  # a gateway learns of a new binding within this time, if it reaches the directory
SHARED_S = 2.0  # a gateway learns of other gateways' turns within this time, if no message is late


@dataclass
class Decisions:
    """Decisions of the directory about one conversation, in journal order."""

    states: list[tuple[float, State]] = field(default_factory=lambda: [(0.0, None)])
    acknowledged: int = 0  # index of the newest state that a gateway was told


class Monitor:
    """Watches one world, and records the first violation."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.violations: list[str] = []
        self.counts: dict[str, int] = {}
        self.directory: DirectoryServer | None = None
        self.directory_began_at = 0.0  # by the directory's clock
        self._journals: dict[str, dict[str, Decisions]] = {}  # host of a directory -> conversation
        self._told: dict[tuple[SimulatedProcess, int], tuple[str, int]] = {}  # gateway, turn -> newest place
        self._finished: Counter[str] = Counter()  # conversation -> turns that gateways reported as finished
        # Limits, gateway, unit, amount and time of each grant. An amount given back is negative.
        self._spent: list[tuple[Limits, SimulatedProcess, str, int, float]] = []
        self._answered: set[tuple[int, int]] = set()  # lines of batches that have a result
        self._granted: dict[tuple[str, SimulatedProcess], list[float]] = defaultdict(list)  # key, gateway

    def now(self) -> float:
        return self.world.loop.time()

    def violated(self, invariant: str, what: str) -> None:
        self.violations.append(f"{invariant}: {what} (at {self.now():.3f} s)")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # Bindings

    def row_appended(self, row: Row) -> None:
        """Record a decision that is written to the journal."""
        if row.subject.startswith("c:") and (row.slot == "binding" or not row.slot):
            state = _state_of(row)
            self._history(row.subject[2:], current().host).states.append((self.now(), state))

    def journal_copied(self, source: str, target: str) -> None:
        """Record that the directory on `target` continues from a copy of the journal on `source`."""
        self._journals[target] = deepcopy(self._journals.get(source, {}))

    def journal_read(self, rows: list[Row]) -> None:
        """Compare the rows that a restarted directory reads with those that its former life acknowledged."""
        read = {row.subject[2:]: _state_of(row) for row in rows if row.slot == "binding"}
        for key, history in self._journals.get(current().host, {}).items():
            state = read.get(key)
            later = [index for index, (_, one) in enumerate(history.states) if one == state]
            if not later or later[-1] < history.acknowledged:
                said = history.states[history.acknowledged][1]
                self.violated(
                    "an acknowledged binding survives", f"{key} was bound to {said}, and is now to {state}"
                )
                continue
            del history.states[later[-1] + 1 :]

    def placed(self, gateway: SimulatedProcess, turn: int, placed: Placed) -> None:
        """Record that a gateway was given a placement."""
        wanted = self._told[gateway, turn] = placed.engine, placed.epoch
        self.count("placed")
        self._acknowledge(placed.key, wanted, -1)

    def told_of_binding(self, key: str, engine: str, epoch: int) -> None:
        """Record that a gateway was told the binding, maybe an old one, of another gateway's conversation."""
        self._acknowledge(key, (engine, epoch), 0)

    def _acknowledge(self, key: str, wanted: State, which: int) -> None:
        for host in reversed(self._journals):  # the newest directory first
            history = self._history(key, host)
            found = [index for index, (_, one) in enumerate(history.states) if one == wanted]
            if found:
                history.acknowledged = max(history.acknowledged, found[which])
                return
        self.violated("an acknowledged binding is in the journal", f"{key} to {wanted}")

    def waited(self, gateway: SimulatedProcess, began: float, frozen_s: float, limit_s: float) -> None:
        """Check that a turn waited at most `limit_s` for placement, except while its gateway was frozen."""
        waited_s = self.now() - began - (gateway.frozen_s - frozen_s)
        if waited_s > limit_s:
            self.violated("no turn waits beyond its limit", f"a place took {waited_s:.1f} of {limit_s:.1f} s")

    def turn_runs(self, gateway: SimulatedProcess, key: str, route: Route) -> None:
        """Check that a gateway runs a turn on the decoder to which its conversation is bound."""
        self.count("turns")
        engine, epoch = route.decoder.engine, route.decoder.epoch
        runs = self.world.engine_runs
        bound = route.known.engine, route.known.epoch
        # If another turn of the conversation found the engine lost, this turn will find that, too.
        elsewhere = bound != (engine, epoch) and runs(engine, epoch)
        if elsewhere or self._told.get((gateway, route.turn), bound) != (engine, epoch):
            self.violated("a turn runs where it is bound", f"{key} on {engine} epoch {epoch}, not on {bound}")
        since, state = self._history(key, self.world.directory.host).states[-1]
        if state is None or state == (engine, epoch) or self.now() - since < STALE_S:
            return
        if runs(engine, epoch) and runs(*state) and self.world.reached_directory(gateway, STALE_S):
            self.violated(
                "a conversation is bound to one live epoch",
                f"{key} runs on {engine} epoch {epoch}; the directory has bound it to {state} for "
                f"{self.now() - since:.1f} s",
            )

    @contextmanager
    def turn_granted(self, gateway: SimulatedProcess, key: Key) -> Iterator[None]:
        """Check a key's limit of turns, counting those at other gateways that `gateway` must know of."""
        began, here = self.now(), self._granted[key.id, gateway]
        here.append(began)
        elsewhere = sum(
            began - one > SHARED_S and self.world.shares(gateway, other, SHARED_S)
            for (name, other), turns in self._granted.items()
            if name == key.id and other is not gateway
            for one in turns
        )
        if (limit := key.limits.turns) is not None and len(here) + elsewhere > limit:
            what = f"{key.id} may have {limit} turns, and has {len(here)} here and {elsewhere} elsewhere"
            self.violated("limits hold over gateways", what)
        try:
            yield
        finally:
            here.remove(began)

    def spent(self, meter: Meter, unit: str, amount: int) -> None:
        self._spent.append((meter.limits, current(), unit, amount, self.now()))

    def admitted(self, meter: Meter, unit: str) -> None:
        """Check that a gateway keeps to a limit per minute. Other gateways may have granted a part of it.

        Their grants count once this gateway must have been told of them. Amounts that a gateway gave back
        count immediately.
        """
        here, now, limit = current(), self.now(), meter.buckets[unit].per_minute
        known = [
            (at, amount)
            for limits, gateway, what, amount, at in self._spent
            if (limits, what) == (meter.limits, unit)
            and (gateway is here or amount < 0 or self._told_of_spent(here, gateway, now - at))
        ]
        granted, seconds = sum(amount for _, amount in known), now - known[0][0]
        if granted > limit * (1.0 + seconds / 60.0):
            what = f"{granted} {unit} in {seconds:.1f} s, where {limit} a minute are allowed"
            self.violated("limits hold over gateways", what)

    def _told_of_spent(self, here: SimulatedProcess, other: SimulatedProcess, ago_s: float) -> bool:
        return ago_s > SHARED_S and self.world.shares(here, other, ago_s + SHARED_S)

    def results_taken(self, taken: set[tuple[int, int]]) -> None:
        """Check that no line of a batch gets a second result."""
        if twice := self._answered & taken:
            self.violated("a batch line has one result", f"two were taken for {sorted(twice)}")
        self._answered |= taken
        if taken:
            self.world.results_taken()

    def turn_finished(self, key: str) -> None:
        self._finished[key] += 1

    def _history(self, key: str, host: str) -> Decisions:
        return self._journals.setdefault(host, {}).setdefault(key, Decisions())

    def now_and_then(self) -> None:
        """Check the directory's table for bindings to ended epochs, and for turns that are counted twice."""
        server = self.directory
        if server is None or not self.world.directory_serves():
            return
        for binding in server.table._bindings:
            info = server.table.fleet.info(binding.engine)
            if info is not None and binding.epoch < info.epoch:
                what = f"{binding.key} to {binding.engine} epoch {binding.epoch}, which is in {info.epoch}"
                self.violated("a conversation is bound to a live epoch", what)
        for one in server.table.conversations:
            # A directory that crashed between a report and its answer may have written the turn's count.
            if one.created_at > self.directory_began_at and one.turns > self._finished[one.key]:
                what = f"{one.key} has {one.turns}, and its gateways reported {self._finished[one.key]}"
                self.violated("a finished turn counts once", what)

    # The end of a run

    def at_the_end(self) -> None:
        """Check that no process holds state of turns or conversations after all load has ended."""
        if self.directory is None:
            self.violated("the directory serves", "it did not start again")
        for what in self.left():
            self.violated("reservations return to zero", what)

    def left(self) -> list[str]:
        """Return descriptions of the state that processes still hold after all load has ended."""
        found = []
        if self.directory is not None:
            table = self.directory.table
            state = table._placer._state
            left = {
                "reservations": list(state.decoders._reservations),
                "queued prefills": list(state.prefillers._engine_of),
                "waiting turns": table.waiting,
                "conversations": [one.key for one in table.conversations],
                "running turns": [one.key for one in table.conversations if one.running],
            }
            found += [f"{what}: {those}" for what, those in left.items() if those]
        for gateway in self.world.live_gateways():
            client, meters = gateway.directory, gateway._meters._meters.values()
            left = {
                "running turns": list(client.cache._running),
                "unreported activities": client.unreported,
                "counted turns": sum(meter.turns for meter in meters),
                "placings": list(gateway._turns.binder._placing),
            }
            found += [f"{what} of {client.gateway}: {those}" for what, those in left.items() if those]
        return found


def _state_of(row: Row) -> State:
    if row.payload is None:
        return None
    engine, epoch, *_ = json.loads(row.payload)
    return engine, epoch


def install(monitor: Callable[[], Monitor]) -> None:
    """Install the monitor's hooks in the product's classes."""

    def after(owner: type, name: str, look: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *args: Any, **named: Any) -> Any:
            result = original(self, *args, **named)
            look(self, result, *args)
            return result

        setattr(owner, name, watched)

    def made(server: DirectoryServer, *_: Any) -> None:
        monitor().directory, monitor().directory_began_at = server, server.clock()

    after(Journal, "append", lambda journal, _, row: monitor().row_appended(row))
    after(Journal, "read", lambda journal, rows: monitor().journal_read(rows))
    after(RequestTable, "record", lambda table, taken, _: monitor().results_taken(taken))

    def added(_: ActivityReports, __: None, activity: Activity) -> None:
        if activity.ended is not None and activity.ended.prompt_tokens:
            monitor().turn_finished(activity.key)

    def taken(meter: Meter, amount: int, unit: str, *_: Any) -> None:
        if amount:
            monitor().spent(meter, unit, amount)

    def admitted(meter: Meter, amount: int, unit: str, *_: Any) -> None:
        if amount:
            monitor().admitted(meter, unit)

    def turn_ended(_: BindingTable, __: bool, key: str, gateway: str, now: float, *ended: Any) -> None:
        if ended and ended[0].prompt_tokens:
            monitor().world.turn_ended(gateway)

    after(BindingTable, "turn_ended", turn_ended)
    after(Meter, "take", taken)
    after(Meter, "admit", admitted)

    def told(_: Cache, __: None, key: str, engine: str = "", epoch: int = 0) -> None:
        if engine:
            monitor().told_of_binding(key, engine, epoch)

    after(Cache, "serve_elsewhere", told)
    after(DirectoryServer, "__init__", made)
    after(ActivityReports, "add", added)
    place, run, turn = DirectoryClient.place, TurnRunner.run, Meters.turn

    async def placed(client: DirectoryClient, ask: Ask) -> Any:
        gateway, watcher = current(), monitor()
        began, frozen_s = watcher.now(), gateway.frozen_s
        try:
            outcome, known = await place(client, ask)
        finally:
            watcher.waited(gateway, began, frozen_s, ask.wait_s + PLACE_GRACE_S)
        if isinstance(outcome, Placed):
            monitor().placed(gateway, ask.turn, outcome)
        return outcome, known

    async def runs(runner: TurnRunner, turn: Any, route: Any, *args: Any, **named: Any) -> Any:
        monitor().turn_runs(current(), route.known.key, route)
        return await run(runner, turn, route, *args, **named)

    @contextmanager
    def granted(meters: Meters, key: Key, *args: Any) -> Iterator[Any]:
        with turn(meters, key, *args) as charge, monitor().turn_granted(current(), key):
            yield charge

    DirectoryClient.place = placed  # type: ignore[method-assign]
    TurnRunner.run = runs  # type: ignore[method-assign]
    Meters.turn = granted  # type: ignore[method-assign]
