"""Batch rows and their states. Each method is one transaction, durable when it returns."""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import RowMapping, and_, exists, func, insert, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from router.batch.records import LIVE, BatchError, BatchRecord, BatchStatus, FileRecord, Usage
from router.batch.store.database import Database
from router.batch.store.files import add_file
from router.batch.store.schema import LEASED, batches, dispatchers, requests

_ENDED_AT = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}
_ENDED = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)
_NOBODY = ""  # not a dispatcher: what it works on is orphaned

VALIDATES = batches.c.status == BatchStatus.VALIDATING
ENDS = or_(
    batches.c.status == BatchStatus.FINALIZING,
    and_(batches.c.status == BatchStatus.CANCELLING, batches.c.outcome.is_not(None)),
    and_(batches.c.status.in_(_ENDED), batches.c.worker.is_not(None)),
)


class BatchTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        batch_id: str,
        owner: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: int,
        output_ttl_s: int | None,
        metadata: dict[str, str] | None,
        now: float,
    ) -> BatchRecord:
        values = {
            "id": batch_id,
            "owner": owner,
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": completion_window,
            "status": BatchStatus.VALIDATING,
            "created_at": int(now),
            "expires_at": int(now) + window_s,
            "output_ttl_s": output_ttl_s,
            "errors": [],
            "metadata": metadata,
        }
        with self._database.write() as connection:
            row = connection.execute(insert(batches).values(values).returning(*batches.c)).mappings().one()
            return _record(row)

    def get(self, owner: str, batch_id: str) -> BatchRecord | None:
        query = select(batches).where(batches.c.id == batch_id, batches.c.owner == owner)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return _record(row) if row else None

    def page(self, owner: str, after: str | None, limit: int) -> list[BatchRecord]:
        query = select(batches).where(batches.c.owner == owner)
        if after is not None:
            cursor = (
                select(batches.c.seq).where(batches.c.id == after, batches.c.owner == owner).scalar_subquery()
            )
            query = query.where(batches.c.seq < cursor)
        query = query.order_by(batches.c.seq.desc()).limit(limit)
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def count_live(self) -> dict[str, int]:
        query = (
            select(batches.c.status, func.count())
            .where(batches.c.status.in_(LIVE))
            .group_by(batches.c.status)
        )
        with self._database.read() as connection:
            return {row.status: row[1] for row in connection.execute(query)}

    def cancel(self, owner: str, batch_id: str, now: float) -> BatchRecord | None:
        """Ask for the end. The caller reads from the record's status whether it was still possible."""
        mine = and_(batches.c.id == batch_id, batches.c.owner == owner)
        open_states = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        with self._database.write() as connection:
            connection.execute(
                update(batches)
                .where(mine, batches.c.status.in_(open_states))
                .values(status=BatchStatus.CANCELLING, cancelling_at=int(now), worker=None)
            )
            row = connection.execute(select(batches).where(mine)).mappings().first()
            return _record(row) if row else None

    def settle(self, now: float, cancel_grace_s: float) -> int:
        """Move batches that are through, out of time or drained of cancelled work on to finalizing.

        From here on no result of theirs is accepted: `outcome` is what `RequestTable.record` looks at.
        """
        in_flight = exists().where(requests.c.batch == batches.c.seq, requests.c.state == LEASED)
        running = and_(batches.c.status == BatchStatus.IN_PROGRESS, batches.c.outcome.is_(None))
        through = and_(running, batches.c.completed + batches.c.failed >= batches.c.total)
        late = and_(
            batches.c.status.in_((BatchStatus.IN_PROGRESS, BatchStatus.VALIDATING)),
            batches.c.expires_at <= now,
        )
        drained = and_(
            batches.c.status == BatchStatus.CANCELLING,
            batches.c.outcome.is_(None),
            or_(~in_flight, batches.c.cancelling_at <= now - cancel_grace_s),
        )
        finalizing = {"status": BatchStatus.FINALIZING, "finalizing_at": int(now), "worker": None}
        moved = 0
        with self._database.write() as connection:
            for which, values in (
                (through, {**finalizing, "outcome": BatchStatus.COMPLETED}),
                (late, {**finalizing, "outcome": BatchStatus.EXPIRED}),
                (drained, {"outcome": BatchStatus.CANCELLED}),
            ):
                moved += connection.execute(update(batches).where(which).values(values)).rowcount
        return moved

    def take_up(self, worker: str, which: ColumnElement[bool]) -> BatchRecord | None:
        """A batch that VALIDATES or ENDS, and that no living dispatcher works on."""
        orphaned = or_(batches.c.worker.is_(None), ~exists().where(dispatchers.c.id == batches.c.worker))
        query = select(batches.c.seq).where(which, orphaned).order_by(batches.c.seq).limit(1)
        with self._database.write() as connection:
            seq = connection.execute(query.with_for_update(skip_locked=True)).scalar()
            if seq is None:
                return None
            row = connection.execute(
                update(batches).where(batches.c.seq == seq).values(worker=worker).returning(*batches.c)
            )
            return _record(row.mappings().one())

    def begin(
        self, seq: int, worker: str, model: str | None, total: int, est_tokens: int, now: float
    ) -> bool:
        return self._move(
            and_(
                batches.c.seq == seq, batches.c.worker == worker, batches.c.status == BatchStatus.VALIDATING
            ),
            status=BatchStatus.IN_PROGRESS,
            in_progress_at=int(now),
            worker=None,
            model=model,
            total=total,
            est_tokens=est_tokens,
        )

    def fail(self, seq: int, worker: str, errors: Sequence[BatchError], now: float) -> bool:
        """The worker stays on the row until it has cleaned up and calls `release`."""
        return self._move(
            and_(
                batches.c.seq == seq, batches.c.worker == worker, batches.c.status == BatchStatus.VALIDATING
            ),
            status=BatchStatus.FAILED,
            failed_at=int(now),
            errors=[asdict(error) for error in errors],
        )

    def finish(
        self,
        batch: BatchRecord,
        worker: str,
        output: FileRecord | None,
        error: FileRecord | None,
        completed: int,
        failed: int,
        now: float,
    ) -> bool:
        """The files' rows and the batch's last state appear together, or not at all."""
        assert batch.outcome is not None
        last_state = {
            "status": batch.outcome,
            _ENDED_AT[batch.outcome]: int(now),
            "output_file_id": output.id if output else None,
            "error_file_id": error.id if error else None,
            "total": completed + failed,
            "completed": completed,
            "failed": failed,
        }
        mine = and_(
            batches.c.seq == batch.seq,
            batches.c.worker == worker,
            batches.c.status.in_((BatchStatus.FINALIZING, BatchStatus.CANCELLING)),
        )
        with self._database.write() as connection:
            if connection.execute(update(batches).where(mine).values(last_state)).rowcount != 1:
                return False
            for file in (output, error):
                if file is not None:
                    add_file(connection, file)
            return True

    def hand_back(self, seq: int, worker: str) -> None:
        """The work on it failed here: somebody is to try again."""
        self._move(and_(batches.c.seq == seq, batches.c.worker == worker), worker=_NOBODY)

    def release(self, seq: int, worker: str) -> None:
        self._move(and_(batches.c.seq == seq, batches.c.worker == worker), worker=None)

    def _move(self, which: ColumnElement[bool], **values: object) -> bool:
        with self._database.write() as connection:
            return connection.execute(update(batches).where(which).values(values)).rowcount == 1


def _record(row: RowMapping) -> BatchRecord:
    special = {"errors", "usage", "status", "outcome"}
    plain = {name: row[name] for name in BatchRecord.__dataclass_fields__ if name not in special}
    return BatchRecord(
        **plain,
        status=BatchStatus(row["status"]),
        outcome=BatchStatus(row["outcome"]) if row["outcome"] else None,
        errors=tuple(BatchError(**error) for error in row["errors"]),
        usage=Usage(row["input_tokens"], row["cached_tokens"], row["output_tokens"], row["reasoning_tokens"]),
    )
