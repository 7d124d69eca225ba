"""Stores files, batches and their lines. Each method is one transaction, which is durable when it returns."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from router.batch.store.database import LEASED, Database, batches, files, requests, results
from router.batch.store.records import LIVE, BatchError, BatchStatus, FileRecord, NewBatch
from router.batch.store.request_table import RequestTable
from router.process import SteadyClock

VALIDATES = batches.c.status == BatchStatus.VALIDATING
ENDS = or_(
    batches.c.status == BatchStatus.FINALIZING,
    and_(batches.c.status == BatchStatus.CANCELLING, batches.c.outcome.is_not(None)),
)

_READ = exists().where(batches.c.input_file_id == files.c.id, batches.c.status.in_(LIVE))


class FileTable:
    """Table of files. A file's row is added only after its bytes are durable (`blobs.py`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: FileRecord, most_bytes: int | None = None) -> bool:
        """Add a file; return False if its owner would then have more than `most_bytes`."""
        with self._database.write() as connection:
            stored = _bytes_of(connection, file.owner, file.created_at) + file.bytes
            if most_bytes is not None and stored > most_bytes:
                return False
            _add_file(connection, file)
            return True

    def full(self, owner: str, most_bytes: int | None, now: float) -> bool:
        with self._database.read() as connection:
            return most_bytes is not None and _bytes_of(connection, owner, now) >= most_bytes

    def get(self, owner: str, file_id: str, now: float) -> Row[Any] | None:
        query = select(files).where(files.c.id == file_id, _visible(owner, now))
        with self._database.read() as connection:
            return connection.execute(query).first()

    def page(
        self, owner: str, now: float, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> list[Row[Any]]:
        """Return up to `limit` files that follow the file `after`, in the requested order."""
        query = select(files).where(_visible(owner, now))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            cursor = select(files.c.seq).where(files.c.id == after, files.c.owner == owner).scalar_subquery()
            query = query.where(files.c.seq > cursor if ascending else files.c.seq < cursor)
        query = query.order_by(files.c.seq.asc() if ascending else files.c.seq.desc()).limit(limit)
        with self._database.read() as connection:
            return list(connection.execute(query))

    def delete(self, owner: str, file_id: str, now: float) -> bool:
        """Hide a file from its owner. Its bytes stay until no live batch reads them (`unreferenced`)."""
        statement = (
            update(files)
            .where(files.c.id == file_id, files.c.owner == owner, files.c.deleted_at.is_(None))
            .values(deleted_at=int(now))
        )
        with self._database.write() as connection:
            return connection.execute(statement).rowcount == 1

    def unreferenced(self, now: float, limit: int = 100) -> list[str]:
        """Return up to `limit` deleted or expired files that no live batch reads."""
        gone = or_(files.c.deleted_at.is_not(None), files.c.expires_at <= now)
        with self._database.read() as connection:
            return list(connection.execute(select(files.c.id).where(gone, ~_READ).limit(limit)).scalars())

    def forget(self, file_ids: list[str]) -> None:
        with self._database.write() as connection:
            connection.execute(delete(files).where(files.c.id.in_(file_ids)))


class BatchTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self, batch_id: str, owner: str, wanted: NewBatch, now: float, most: int | None = None
    ) -> Row[Any] | None:
        """Create a batch; return None if its owner already has `most` batches that have not ended."""
        state = {"status": BatchStatus.VALIDATING, "created_at": int(now), "errors": []}
        values = {"id": batch_id, "owner": owner, **asdict(wanted), **state}
        values["expires_at"] = int(now) + values.pop("window_s")
        unended = select(func.count()).where(batches.c.owner == owner, batches.c.status.in_(LIVE))
        with self._database.write() as connection:
            if most is not None and connection.execute(unended).scalar_one() >= most:
                return None
            return connection.execute(insert(batches).values(values).returning(*batches.c)).one()

    def get(self, owner: str, batch_id: str) -> Row[Any] | None:
        query = select(batches).where(batches.c.id == batch_id, batches.c.owner == owner)
        with self._database.read() as connection:
            return connection.execute(query).first()

    def page(self, owner: str, after: str | None, limit: int) -> list[Row[Any]]:
        query = select(batches).where(batches.c.owner == owner)
        if after is not None:
            cursor = select(batches.c.seq).where(batches.c.id == after, batches.c.owner == owner)
            query = query.where(batches.c.seq < cursor.scalar_subquery())
        query = query.order_by(batches.c.seq.desc()).limit(limit)
        with self._database.read() as connection:
            return list(connection.execute(query))

    def count_live(self) -> dict[str, int]:
        live = select(batches.c.status, func.count()).where(batches.c.status.in_(LIVE))
        with self._database.read() as connection:
            return {row.status: row[1] for row in connection.execute(live.group_by(batches.c.status))}

    def cancel(self, owner: str, batch_id: str, now: float) -> Row[Any] | None:
        """Cancel a batch if it is still open, and return it; its status says whether it was cancelled."""
        mine = and_(batches.c.id == batch_id, batches.c.owner == owner)
        still_open = batches.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS))
        cancelling = {"status": BatchStatus.CANCELLING, "cancelling_at": int(now)}
        with self._database.write() as connection:
            connection.execute(update(batches).where(mine, still_open).values(cancelling))
            return connection.execute(select(batches).where(mine)).first()

    def settle(self, now: float, cancel_grace_s: float) -> int:
        """Close batches that are complete, out of time, or cancelled with no work left; return their number.

        Closing a batch sets its `outcome`, and `RequestTable.record` then accepts no more results for it.
        """
        undecided = batches.c.outcome.is_(None)
        in_flight = exists().where(requests.c.batch == batches.c.seq, requests.c.state == LEASED)
        running = batches.c.status == BatchStatus.IN_PROGRESS
        through = and_(running, undecided, batches.c.completed + batches.c.failed >= batches.c.total)
        late = and_(or_(running, VALIDATES), batches.c.expires_at <= now)
        waited = batches.c.cancelling_at <= now - cancel_grace_s
        drained = and_(batches.c.status == BatchStatus.CANCELLING, undecided, or_(~in_flight, waited))
        finalizing = {"status": BatchStatus.FINALIZING, "finalizing_at": int(now)}
        moved = 0
        with self._database.write() as connection:
            for which, values in (
                (through, {**finalizing, "outcome": BatchStatus.COMPLETED}),
                (late, {**finalizing, "outcome": BatchStatus.EXPIRED}),
                (drained, {"outcome": BatchStatus.CANCELLED}),
            ):
                moved += connection.execute(update(batches).where(which).values(values)).rowcount
        return moved

    def first(self, which: ColumnElement[bool]) -> Row[Any] | None:
        """Return the oldest batch for which the condition `which` holds, or None."""
        query = select(batches).where(which).order_by(batches.c.seq).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first()

    def ended_with_lines(self) -> list[int]:
        """Return ended batches whose lines have not been deleted yet."""
        lines = exists().where(requests.c.batch == batches.c.seq)
        with self._database.read() as connection:
            query = select(batches.c.seq).where(batches.c.status.not_in(LIVE), lines)
            return list(connection.execute(query).scalars())

    def forget(self, before: float) -> int:
        """Delete ended batches without lines that were created before the given time."""
        lines = exists().where(requests.c.batch == batches.c.seq)
        found = exists().where(results.c.batch == batches.c.seq)
        old = and_(batches.c.status.not_in(LIVE), batches.c.created_at <= before, ~lines, ~found)
        with self._database.write() as connection:
            return connection.execute(delete(batches).where(old)).rowcount

    def begin(self, seq: int, model: str | None, total: int, est_tokens: int, now: float) -> bool:
        """Start a validated batch; return False if it was cancelled or has run out of time."""
        running = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": int(now)}
        return self._validated(seq, {**running, "model": model, "total": total, "est_tokens": est_tokens})

    def fail(self, seq: int, errors: Sequence[BatchError], now: float) -> bool:
        wrong = [asdict(error) for error in errors]
        failed = {"status": BatchStatus.FAILED, "failed_at": int(now), "errors": wrong}
        return self._validated(seq, failed)

    def _validated(self, seq: int, values: dict[str, Any]) -> bool:
        validating = update(batches).where(batches.c.seq == seq, VALIDATES)
        with self._database.write() as connection:
            return connection.execute(validating.values(values)).rowcount == 1

    def finish(
        self,
        batch: Row[Any],
        output: FileRecord | None,
        error: FileRecord | None,
        completed: int,
        failed: int,
        now: float,
    ) -> bool:
        """Add the output files and the batch's final state together; return False if it had ended before."""
        ended = {"status": batch.outcome, f"{batch.outcome}_at": int(now)}
        counts = {"total": completed + failed, "completed": completed, "failed": failed}
        named = {"output_file_id": output and output.id, "error_file_id": error and error.id}
        with self._database.write() as connection:
            ending = update(batches).where(batches.c.seq == batch.seq, ENDS)
            if connection.execute(ending.values({**ended, **counts, **named})).rowcount != 1:
                return False
            for file in (output, error):
                if file is not None:
                    _add_file(connection, file)
            return True


def _visible(owner: str, now: float) -> ColumnElement[bool]:
    unexpired = or_(files.c.expires_at.is_(None), files.c.expires_at > now)
    return and_(files.c.owner == owner, files.c.deleted_at.is_(None), unexpired)


def _bytes_of(connection: Connection, owner: str, now: float) -> int:
    """Return the bytes of an owner's files, including deleted files that a batch still reads."""
    stays = or_(_visible(owner, now), and_(files.c.owner == owner, _READ))
    query = select(func.coalesce(func.sum(files.c.bytes), 0)).where(stays)
    return int(connection.execute(query).scalar_one())


def _add_file(connection: Connection, file: FileRecord) -> None:
    connection.execute(insert(files).values(asdict(file)))


class Store:
    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self.files = FileTable(self._database)
        self.batches = BatchTable(self._database)
        self.requests = RequestTable(self._database)

    def take_over(self, clock: SteadyClock | None = None) -> int:
        """Make this process the only writer; return how many lines an earlier process had in flight."""
        self._database.take_over(clock or SteadyClock())
        return self.requests.requeue()

    def close(self) -> None:
        self._database.close()
