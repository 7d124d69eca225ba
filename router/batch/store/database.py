"""Connections and transactions. SQLite in WAL mode, one writer at a time; or PostgreSQL."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url

from router.batch.store import schema

BUSY_TIMEOUT_MS = 30_000
_WRITES = "conserve_writes"
_SCHEMA_LOCK = 0x636F6E73


class Database:
    """Hands out transactions. `write` is durable when it returns."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self.dialect = parsed.get_backend_name()
        if self.dialect not in ("sqlite", "postgresql"):
            raise ValueError(
                f"the batch store is SQLite or PostgreSQL, not {self.dialect!r}: set another store URL"
            )
        if self.dialect == "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise ValueError("the batch store must be a file: sqlite:////path/to/batch.db")
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = create_engine(parsed)
            _prepare_sqlite(self._engine)
        else:
            self._engine = create_engine(parsed, pool_size=8, max_overflow=8, pool_pre_ping=True)
        self._turn: AbstractContextManager[object] = Lock() if self.dialect == "sqlite" else nullcontext()
        with self.write() as connection:
            if self.dialect == "postgresql":  # several gateways may start at once
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
            schema.metadata.create_all(connection)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        # SQLite's own waiting for the writer's lock sleeps ever longer; inside a process a queue is faster.
        with (
            self._turn,
            self._engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        self._engine.dispose()


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            "journal_mode = WAL",
            "synchronous = FULL",  # an acknowledged change outlives a power cut, not only a killed process
            "foreign_keys = ON",
            "cache_size = -8192",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        # A transaction that starts by reading and then writes cannot be retried by the busy timeout:
        # writers take the lock at once.
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
