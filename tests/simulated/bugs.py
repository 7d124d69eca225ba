"""Deliberate bugs of the product, each a small patch, that the simulation has to find.

Each stands for a line that somebody might leave out. `python -m tests.simulated --bug NAME` runs with one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from placement.routing.placer import Placer
from router.auth.rate_limits import Meters
from router.batch.store.database import Database
from router.batch.store.request_table import RequestTable
from router.directory.api.cache import Cache, EngineList
from router.directory.api.calls import ActivityReports
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import Placed
from router.directory.api.rpc import TermFence
from router.directory.directory import Directory
from router.directory.journal import Journal
from router.directory.server import PlaceCall
from router.directory.table import BindingTable


def lost_fsync() -> None:
    """SQLite does not sync the journal."""
    prepare = Journal._prepare

    def prepared(journal: Journal) -> int:
        sequence = prepare(journal)
        journal._rows.execute("PRAGMA synchronous = OFF")
        return sequence

    Journal._prepare = prepared  # type: ignore[method-assign]


def answer_before_journal() -> None:
    """A placement is answered before its binding is in the journal."""

    async def at_once(directory: Directory) -> None:
        pass

    Directory.durable = at_once  # type: ignore[method-assign]


def binding_told_before_journal() -> None:
    """Other gateways are told of a binding before it is in the journal."""
    settle = PlaceCall._settle

    def told(call: PlaceCall, index: int, outcome: Any) -> None:
        settle(call, index, outcome)
        if isinstance(outcome, Placed):
            call._directory.gateways.tell_bound([outcome])

    PlaceCall._settle = told  # type: ignore[method-assign]


def epoch_ignored_by_gateway() -> None:
    """A gateway uses a binding whose engine has begun a new epoch."""
    EngineList.alive = lambda engines, engine, epoch: engines.get(engine)  # type: ignore[method-assign]


def epoch_ignored_by_directory() -> None:
    """A new epoch of an engine voids no binding to an older one."""
    BindingTable._void = lambda table, engine, epoch: []  # type: ignore[method-assign]


def reservation_leaked() -> None:
    """The end of a conversation gives its reservation back only if an engine reported the conversation."""
    Placer.release = lambda placer, key, now: None  # type: ignore[method-assign]


def report_lost() -> None:
    """A report that was not delivered is not sent again."""
    send = ActivityReports._send

    async def once(reports: ActivityReports, batch: Any) -> bool:
        await send(reports, batch)
        return True

    ActivityReports._send = once  # type: ignore[method-assign]


def report_taken_twice() -> None:
    """A report that arrives twice is applied twice."""
    Directory.activities_seen = lambda *_: 0  # type: ignore[method-assign]


def gateway_never_gone() -> None:
    """The turns of a gateway that crashed never end."""
    Directory._gateway_gone = lambda directory, gateway: None  # type: ignore[method-assign]


def gateway_without_stream_never_gone() -> None:
    """The turns of a gateway that crashed before it opened its stream again never end."""
    Directory.heard_from = lambda directory, gateway: None  # type: ignore[method-assign]


def reports_forgotten_in_silence() -> None:
    """When a gateway is cut off for a while, the directory forgets which of its reports it has applied."""
    gone = Directory._gateway_gone

    def forgets(directory: Directory, gateway: str) -> None:
        if gateway not in directory.gateways:
            directory._activities.pop(gateway, None)
        gone(directory, gateway)

    Directory._gateway_gone = forgets  # type: ignore[method-assign]


def term_ignored() -> None:
    """Keepers obey a directory that a newer one has replaced."""
    TermFence.refuses = lambda fence, term: ""  # type: ignore[method-assign]


def known_binding_kept() -> None:
    """A gateway keeps a conversation's binding after another gateway has bound the conversation elsewhere."""
    serve_elsewhere = Cache.serve_elsewhere

    def kept(cache: Cache, key: str, engine: str = "", epoch: int = 0) -> None:
        if cache.get(key) is None:
            serve_elsewhere(cache, key, engine, epoch)

    Cache.serve_elsewhere = kept  # type: ignore[method-assign]


def _do_not_apply_spent(unit: str) -> None:
    apply = Meters.apply_spent

    def applied(meters: Meters, reports: Any) -> None:
        apply(meters, [(gateway, replace(spent, **{unit: 0})) for gateway, spent in reports])

    Meters.apply_spent = applied  # type: ignore[method-assign]


def turns_elsewhere_ignored() -> None:
    """A gateway grants turns as if its keys had none at other gateways."""
    _do_not_apply_spent("turns")


def requests_elsewhere_ignored() -> None:
    """A gateway grants requests as if its keys had sent none to other gateways."""
    _do_not_apply_spent("requests")


def tokens_elsewhere_ignored() -> None:
    """A gateway grants tokens as if its keys had used none at other gateways."""
    _do_not_apply_spent("tokens")


def leased_lines_lost() -> None:
    """Lines that a batch process had in flight when it crashed are not queued again."""
    RequestTable.requeue = lambda table: 0  # type: ignore[method-assign]


def results_not_synced() -> None:
    """Results of a batch's lines are written, but not synced."""
    record = RequestTable.record

    def recorded(table: RequestTable, arrived: Any) -> Any:
        database = table._database
        database.write = partial(Database.write, database, durable=False)  # type: ignore[method-assign]
        try:
            return record(table, arrived)
        finally:
            del database.write  # type: ignore[method-assign]

    RequestTable.record = recorded  # type: ignore[method-assign]


def place_without_end() -> None:
    """A gateway waits for a placement for as long as the directory does not answer."""
    place = DirectoryClient._place

    async def for_ever(client: DirectoryClient, ask: Any) -> Any:
        while True:
            try:
                return await place(client, ask)
            except Exception:  # noqa: BLE001
                continue

    DirectoryClient._place = for_ever  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        lost_fsync,
        answer_before_journal,
        binding_told_before_journal,
        epoch_ignored_by_gateway,
        epoch_ignored_by_directory,
        reservation_leaked,
        report_lost,
        report_taken_twice,
        gateway_never_gone,
        gateway_without_stream_never_gone,
        reports_forgotten_in_silence,
        term_ignored,
        known_binding_kept,
        turns_elsewhere_ignored,
        requests_elsewhere_ignored,
        tokens_elsewhere_ignored,
        leased_lines_lost,
        results_not_synced,
        place_without_end,
    )
}
