"""The lines of the batches: who works on which, and their results.

A line is pending, leased by one dispatcher, or done. A lease lives as long as its dispatcher's heartbeat.
The first result of a line is the result: later ones are not taken.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import (
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from router.batch.records import (
    Backlog,
    BatchStatus,
    ClaimedRequest,
    NewRequest,
    RequestState,
    Result,
)
from router.batch.store.database import Database
from router.batch.store.schema import LEASED, batches, dispatchers, requests, results

_STREAM_ROWS = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line at the end of its batch; status None where it has no result."""

    line: int
    custom_id: str
    status: int | None
    body: bytes | None
    request_id: str | None


@dataclass(frozen=True, slots=True)
class PutBack:
    batch: int
    line: int
    not_before: float
    counts_as_try: bool


class RequestTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, batch: int, worker: str, lines: Sequence[NewRequest]) -> bool:
        """Add lines of a batch under validation; False when it is no longer this worker's to validate."""
        mine = select(batches.c.seq).where(
            batches.c.seq == batch,
            batches.c.worker == worker,
            exists().where(dispatchers.c.id == worker),
        )
        with self._database.write() as connection:
            if connection.execute(mine.with_for_update()).scalar() is None:
                return False
            connection.execute(insert(requests), [{"batch": batch, **asdict(line)} for line in lines])
            return True

    def clear(self, batch: int, rows: int = 20_000) -> None:
        """Forget the lines and results of a batch, some at a time so that other writers get their turn."""
        for table in (results, requests):
            while True:
                some = select(table.c.line).where(table.c.batch == batch).limit(rows)
                with self._database.write() as connection:
                    statement = delete(table).where(table.c.batch == batch, table.c.line.in_(some))
                    if connection.execute(statement).rowcount < rows:
                        break

    def heartbeat(self, dispatcher: str, now: float, lease_s: float) -> int:
        """Renew this dispatcher's leases, take away those of dead ones; how many lines were taken away."""
        upsert = _upsert(self._database.dialect)(dispatchers).values(id=dispatcher, alive_until=now + lease_s)
        with self._database.write() as connection:
            connection.execute(
                upsert.on_conflict_do_update(index_elements=["id"], set_={"alive_until": now + lease_s})
            )
            connection.execute(delete(dispatchers).where(dispatchers.c.alive_until < now))
            return connection.execute(
                update(requests)
                .where(
                    requests.c.state == LEASED,
                    ~exists().where(dispatchers.c.id == requests.c.dispatcher),
                )
                .values(state=RequestState.PENDING, dispatcher=None)
            ).rowcount

    def dispatchers_alive(self) -> int:
        with self._database.read() as connection:
            return connection.execute(select(func.count()).select_from(dispatchers)).scalar_one()

    def leave(self, dispatcher: str) -> None:
        """Give every lease back at once: an orderly stop."""
        with self._database.write() as connection:
            connection.execute(
                update(requests)
                .where(requests.c.state == LEASED, requests.c.dispatcher == dispatcher)
                .values(state=RequestState.PENDING, dispatcher=None)
            )
            connection.execute(delete(dispatchers).where(dispatchers.c.id == dispatcher))

    def backlog(self) -> list[Backlog]:
        """One row for each batch that takes results. Counts only leased lines, of which there are few."""
        leased = (
            select(requests.c.batch, func.count().label("leased"))
            .where(requests.c.state == LEASED)
            .group_by(requests.c.batch)
            .subquery()
        )
        query = (
            select(batches, func.coalesce(leased.c.leased, 0).label("leased"))
            .join(leased, leased.c.batch == batches.c.seq, isouter=True)
            .where(
                batches.c.status.in_((BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)),
                batches.c.outcome.is_(None),
            )
            .order_by(batches.c.seq)
        )
        with self._database.read() as connection:
            return [
                Backlog(
                    batch=row["seq"],
                    owner=row["owner"],
                    pending=row["total"] - row["completed"] - row["failed"] - row["leased"],
                    leased=row["leased"],
                    accepting=row["status"] == BatchStatus.IN_PROGRESS,
                    est_tokens=max(1, row["est_tokens"] // max(1, row["total"])),
                    created_at=row["created_at"],
                    expires_at=row["expires_at"],
                )
                for row in connection.execute(query).mappings()
            ]

    def claim(self, wanted: Mapping[int, int], dispatcher: str, now: float) -> list[ClaimedRequest]:
        """Lease up to so many pending lines of each batch, those with a common prefix next to one another."""
        claimed: list[ClaimedRequest] = []
        with self._database.write() as connection:
            alive = connection.execute(
                select(dispatchers.c.id).where(dispatchers.c.id == dispatcher)
            ).scalar()
            if alive is None:  # a lease without a heartbeat would be taken away at once
                return []
            for batch, count in wanted.items():
                claimed += _claim_of_one(connection, batch, count, dispatcher, now)
        return claimed

    def record(self, arrived: Sequence[Result]) -> set[tuple[int, int]]:
        """Make results durable; returns the lines whose result this is."""
        accepted: set[tuple[int, int]] = set()
        by_batch: dict[int, list[Result]] = {}
        for result in arrived:
            by_batch.setdefault(result.batch, []).append(result)
        with self._database.write() as connection:
            for batch, group in sorted(by_batch.items()):
                accepted |= self._record_of_one(connection, batch, group)
        return accepted

    def _record_of_one(self, connection: Connection, batch: int, group: list[Result]) -> set[tuple[int, int]]:
        open_batch = (
            select(batches.c.seq).where(batches.c.seq == batch, batches.c.outcome.is_(None)).with_for_update()
        )
        if connection.execute(open_batch).scalar() is None:
            return set()
        known = select(results.c.line).where(
            results.c.batch == batch, results.c.line.in_([result.line for result in group])
        )
        done = set(connection.execute(known).scalars())
        fresh = {result.line: result for result in reversed(group) if result.line not in done}
        if not fresh:
            return set()
        connection.execute(
            insert(results),
            [
                {
                    "batch": batch,
                    "line": r.line,
                    "status": r.status,
                    "body": r.body,
                    "request_id": r.request_id,
                }
                for r in fresh.values()
            ],
        )
        connection.execute(
            update(requests)
            .where(requests.c.batch == batch, requests.c.line.in_(fresh))
            .values(state=RequestState.DONE, dispatcher=None)
        )
        good = sum(result.succeeded for result in fresh.values())
        usages = [result.usage for result in fresh.values()]
        connection.execute(
            update(batches)
            .where(batches.c.seq == batch)
            .values(
                completed=batches.c.completed + good,
                failed=batches.c.failed + len(fresh) - good,
                input_tokens=batches.c.input_tokens + sum(u.input_tokens for u in usages),
                cached_tokens=batches.c.cached_tokens + sum(u.cached_tokens for u in usages),
                output_tokens=batches.c.output_tokens + sum(u.output_tokens for u in usages),
                reasoning_tokens=batches.c.reasoning_tokens + sum(u.reasoning_tokens for u in usages),
            )
        )
        return {(batch, line) for line in fresh}

    def put_back(self, lines: Iterable[PutBack], dispatcher: str) -> None:
        statement = (
            update(requests)
            .where(
                requests.c.batch == bindparam("of_batch"),
                requests.c.line == bindparam("of_line"),
                requests.c.state == LEASED,
                requests.c.dispatcher == dispatcher,
            )
            .values(
                state=RequestState.PENDING,
                dispatcher=None,
                not_before=bindparam("until"),
                tries=requests.c.tries + bindparam("tried"),
            )
        )
        rows = [
            {
                "of_batch": line.batch,
                "of_line": line.line,
                "until": line.not_before,
                "tried": int(line.counts_as_try),
            }
            for line in lines
        ]
        if rows:
            with self._database.write() as connection:
                connection.execute(statement, rows)

    def outcomes(self, batch: int) -> Iterator[Outcome]:
        """Every line in the order of the input file, a page at a time: results can be larger than memory."""
        after = -1
        while True:
            query = (
                select(
                    requests.c.line,
                    requests.c.custom_id,
                    results.c.status,
                    results.c.body,
                    results.c.request_id,
                )
                .join(
                    results,
                    and_(results.c.batch == requests.c.batch, results.c.line == requests.c.line),
                    isouter=True,
                )
                .where(requests.c.batch == batch, requests.c.line > after)
                .order_by(requests.c.line)
                .limit(_STREAM_ROWS)
            )
            with self._database.read() as connection:
                page = [Outcome(*row) for row in connection.execute(query)]
            yield from page
            if len(page) < _STREAM_ROWS:
                return
            after = page[-1].line


def _claim_of_one(
    connection: Connection, batch: int, count: int, dispatcher: str, now: float
) -> list[ClaimedRequest]:
    running = and_(
        batches.c.seq == batch, batches.c.status == BatchStatus.IN_PROGRESS, batches.c.outcome.is_(None)
    )
    source = connection.execute(
        select(batches.c.owner, batches.c.endpoint, batches.c.input_file_id).where(running)
    ).first()
    if source is None:
        return []
    rows = (
        connection.execute(
            select(requests)
            .where(
                requests.c.batch == batch,
                requests.c.state == RequestState.PENDING,
                or_(requests.c.not_before == 0, requests.c.not_before <= now),
            )
            .order_by(requests.c.prefix, requests.c.line)
            .limit(count)
            .with_for_update(skip_locked=True)
        )
        .mappings()
        .all()
    )
    if rows:
        connection.execute(
            update(requests)
            .where(requests.c.batch == batch, requests.c.line.in_([row["line"] for row in rows]))
            .values(state=RequestState.LEASED, dispatcher=dispatcher)
        )
    return [
        ClaimedRequest(
            batch=batch,
            owner=source.owner,
            endpoint=source.endpoint,
            input_file_id=source.input_file_id,
            **{
                name: row[name]
                for name in ("line", "custom_id", "offset", "length", "prefix", "est_tokens", "tries")
            },
        )
        for row in rows
    ]


def _upsert(dialect: str) -> type[sqlite.Insert] | type[postgresql.Insert]:
    return sqlite.Insert if dialect == "sqlite" else postgresql.Insert
