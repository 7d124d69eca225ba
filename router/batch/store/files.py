"""File rows. The bytes are in `router.batch.blobs`; a row appears only once its bytes are durable."""

from sqlalchemy import Connection, RowMapping, delete, exists, insert, or_, select, update

from router.batch.records import LIVE, FileRecord
from router.batch.store.database import Database
from router.batch.store.schema import batches, files


class FileTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: FileRecord) -> None:
        with self._database.write() as connection:
            add_file(connection, file)

    def get(self, owner: str, file_id: str, now: float) -> FileRecord | None:
        query = select(files).where(
            files.c.id == file_id,
            files.c.owner == owner,
            files.c.deleted_at.is_(None),
            or_(files.c.expires_at.is_(None), files.c.expires_at > now),
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return _record(row) if row else None

    def page(
        self, owner: str, now: float, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> list[FileRecord]:
        """Up to `limit` files that follow the file `after` in the order asked for."""
        query = select(files).where(
            files.c.owner == owner,
            files.c.deleted_at.is_(None),
            or_(files.c.expires_at.is_(None), files.c.expires_at > now),
        )
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            cursor = select(files.c.seq).where(files.c.id == after, files.c.owner == owner).scalar_subquery()
            query = query.where(files.c.seq > cursor if ascending else files.c.seq < cursor)
        query = query.order_by(files.c.seq.asc() if ascending else files.c.seq.desc()).limit(limit)
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def delete(self, owner: str, file_id: str, now: float) -> bool:
        """Hide the file. Its bytes stay until no live batch reads them: see `unreferenced`."""
        statement = (
            update(files)
            .where(files.c.id == file_id, files.c.owner == owner, files.c.deleted_at.is_(None))
            .values(deleted_at=int(now))
        )
        with self._database.write() as connection:
            return connection.execute(statement).rowcount == 1

    def unreferenced(self, now: float, limit: int = 100) -> list[str]:
        """Deleted or expired files whose bytes no live batch needs."""
        in_use = exists().where(batches.c.input_file_id == files.c.id, batches.c.status.in_(LIVE))
        query = (
            select(files.c.id)
            .where(or_(files.c.deleted_at.is_not(None), files.c.expires_at <= now), ~in_use)
            .limit(limit)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def forget(self, file_ids: list[str]) -> None:
        with self._database.write() as connection:
            connection.execute(delete(files).where(files.c.id.in_(file_ids)))


def add_file(connection: Connection, file: FileRecord) -> None:
    connection.execute(
        insert(files).values(
            id=file.id,
            owner=file.owner,
            filename=file.filename,
            purpose=file.purpose,
            bytes=file.bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
        )
    )


def _record(row: RowMapping) -> FileRecord:
    return FileRecord(**{name: row[name] for name in FileRecord.__dataclass_fields__})
