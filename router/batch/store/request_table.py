"""Stores the lines of batches and their results.

A line is pending (and in the queue), leased (in flight) or done. The first result of a line counts; later
ones are discarded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, func, insert, select, update

from router.batch.store.database import LEASED, Database, batches, queue, requests, results
from router.batch.store.records import (
    Backlog,
    BatchStatus,
    ClaimedRequest,
    NewRequest,
    RequestState,
    Result,
)

_PAGE_LINES = 200
_LINES_A_WRITE = 2_000


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """Line at the end of its batch, with its result; `status` is None if it has none."""

    line: int
    custom_id: str
    status: int | None
    body: bytes | None
    request_id: str | None


@dataclass(frozen=True, slots=True)
class PutBack:
    """Line that returns to the queue because its attempt gave no result."""

    batch: int
    line: int
    not_before: float
    counts_as_try: bool


class RequestTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, batch: int, lines: Sequence[NewRequest]) -> bool:
        """Add lines to a batch; return False if its validation is over. `begin` makes the lines durable."""
        return self._insert(batch, requests, [{"batch": batch, **asdict(line)} for line in lines])

    def enqueue(self, batch: int) -> bool:
        """Queue all loaded lines, ordered by prefix; return False if the batch is no longer validating."""
        lines = select(requests.c.batch, requests.c.prefix, requests.c.line).where(requests.c.batch == batch)
        in_order = lines.order_by(requests.c.prefix, requests.c.line)
        with self._database.read() as reading:
            found = reading.execution_options(yield_per=_LINES_A_WRITE).execute(in_order).mappings()
            return all(self._insert(batch, queue, some) for some in found.partitions())

    def _insert(self, batch: int, table: Table, values: Sequence[Any]) -> bool:
        validating = select(batches.c.seq).where(
            batches.c.seq == batch, batches.c.status == BatchStatus.VALIDATING
        )
        with self._database.write(durable=False) as connection:
            if connection.execute(validating).scalar() is None:
                return False
            connection.execute(insert(table), values)
            return True

    def clear(self, batch: int, lines: int = 20_000) -> None:
        """Delete a batch's lines and results, `lines` per transaction, so that other writes can go ahead."""
        with self._database.write(durable=False) as connection:
            connection.execute(delete(queue).where(queue.c.batch == batch))
        for table in (results, requests):
            some = select(table.c.line).where(table.c.batch == batch).limit(lines)
            statement = delete(table).where(table.c.batch == batch, table.c.line.in_(some))
            deleted = lines
            while deleted == lines:
                with self._database.write(durable=False) as connection:
                    deleted = connection.execute(statement).rowcount

    def requeue(self) -> int:
        """Make the lines that an earlier process had leased pending again; return how many there were."""
        is_leased = requests.c.state == LEASED
        leased = select(requests.c.batch, requests.c.prefix, requests.c.line).where(is_leased)
        pending = update(requests).where(is_leased).values(state=RequestState.PENDING)
        with self._database.write() as connection:
            connection.execute(insert(queue).from_select(["batch", "prefix", "line"], leased))
            return connection.execute(pending).rowcount

    def backlog(self) -> list[Backlog]:
        """Return the backlog of each batch that takes results; the query counts the few leased lines only."""
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

    def claim(self, wanted: Mapping[int, int], now: float) -> list[ClaimedRequest]:
        """Lease up to `wanted` pending lines of each batch, ordered by prefix."""
        claimed: list[ClaimedRequest] = []
        with self._database.write() as connection:
            for batch, count in wanted.items():
                claimed += _claim_of_one(connection, batch, count, now)
        return claimed

    def record(self, arrived: Sequence[Result]) -> set[tuple[int, int]]:
        """Make results durable; return the lines that had no result before."""
        accepted: set[tuple[int, int]] = set()
        by_batch: dict[int, list[Result]] = {}
        for result in arrived:
            by_batch.setdefault(result.batch, []).append(result)
        with self._database.write() as connection:
            for batch, group in by_batch.items():
                accepted |= _record_of_one(connection, batch, group)
        return accepted

    def put_back(self, lines: Iterable[PutBack]) -> None:
        """Put each line back into the queue if it is still leased, as its batch may have ended meanwhile."""
        with self._database.write() as connection:
            for line in lines:
                this = and_(requests.c.batch == line.batch, requests.c.line == line.line)
                tried = requests.c.tries + int(line.counts_as_try)
                pending = update(requests).where(this, requests.c.state == LEASED)
                pending = pending.values(state=RequestState.PENDING, tries=tried)
                prefix = connection.execute(pending.returning(requests.c.prefix)).scalar()
                if prefix is not None:
                    at = {"batch": line.batch, "prefix": prefix, "line": line.line}
                    connection.execute(insert(queue).values(**at, not_before=line.not_before))

    def outcomes(self, batch: int) -> Iterator[LineOutcome]:
        """Yield a batch's lines in the order of the input file, read in pages as results can be large."""
        after = -1
        result_of = and_(results.c.batch == requests.c.batch, results.c.line == requests.c.line)
        found = (results.c.status, results.c.body, results.c.request_id)
        while True:
            query = (
                select(requests.c.line, requests.c.custom_id, *found)
                .join(results, result_of, isouter=True)
                .where(requests.c.batch == batch, requests.c.line > after)
                .order_by(requests.c.line)
                .limit(_PAGE_LINES)
            )
            with self._database.read() as connection:
                page = [LineOutcome(*row) for row in connection.execute(query)]
            yield from page
            if len(page) < _PAGE_LINES:
                return
            after = page[-1].line


def _claim_of_one(connection: Connection, batch: int, count: int, now: float) -> list[ClaimedRequest]:
    running = and_(
        batches.c.seq == batch, batches.c.status == BatchStatus.IN_PROGRESS, batches.c.outcome.is_(None)
    )
    of_batch = (batches.c.owner, batches.c.endpoint, batches.c.input_file_id)
    source = connection.execute(select(*of_batch).where(running)).mappings().first()
    if source is None:
        return []
    due = (
        select(queue.c.prefix, queue.c.line)
        .where(queue.c.batch == batch, queue.c.not_before <= now)
        .order_by(queue.c.prefix, queue.c.line)
        .limit(count)
    )
    keys = connection.execute(due).all()
    if not keys:
        return []
    one = (queue.c.batch == batch, queue.c.prefix == bindparam("at"), queue.c.line == bindparam("is"))
    connection.execute(delete(queue).where(*one), [{"at": key.prefix, "is": key.line} for key in keys])
    these = and_(requests.c.batch == batch, requests.c.line.in_([key.line for key in keys]))
    leasing = update(requests).where(these).values(state=RequestState.LEASED).returning(*requests.c)
    found = sorted(connection.execute(leasing).mappings(), key=lambda row: (row["prefix"], row["line"]))
    of_line = ("batch", "line", "offset", "length", "prefix", "est_tokens", "tries")
    return [ClaimedRequest(**source, **{name: row[name] for name in of_line}) for row in found]


def _record_of_one(connection: Connection, batch: int, group: list[Result]) -> set[tuple[int, int]]:
    open_batch = select(batches.c.seq).where(batches.c.seq == batch, batches.c.outcome.is_(None))
    if connection.execute(open_batch).scalar() is None:
        return set()
    known = select(results.c.line).where(
        results.c.batch == batch, results.c.line.in_([result.line for result in group])
    )
    done = set(connection.execute(known).scalars())
    fresh = {result.line: result for result in reversed(group) if result.line not in done}
    if not fresh:
        return set()
    columns = ("batch", "line", "status", "body", "request_id")
    connection.execute(
        insert(results), [{name: getattr(one, name) for name in columns} for one in fresh.values()]
    )
    connection.execute(
        update(requests)
        .where(requests.c.batch == batch, requests.c.line.in_(fresh))
        .values(state=RequestState.DONE)
    )
    good = sum(result.succeeded for result in fresh.values())
    more = {"completed": good, "failed": len(fresh) - good}
    for kind in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"):
        more[kind] = sum(getattr(result.usage, kind) for result in fresh.values())
    added = {name: batches.c[name] + count for name, count in more.items()}
    connection.execute(update(batches).where(batches.c.seq == batch).values(added))
    return {(batch, line) for line in fresh}
