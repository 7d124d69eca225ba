"""Defines the tables of the batch store and runs its transactions, on SQLite in WAL mode or PostgreSQL.

One process writes. A process that starts takes the store over with a higher epoch, and every writing
transaction compares the stored epoch with its own. Writes of an earlier process that still runs are refused.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    inspect,
    literal_column,
    make_url,
    select,
    text,
    update,
)

from router.errors import GatewayConfigError, Unavailable
from router.process import SteadyClock

metadata = MetaData()

# A literal, not a parameter, so that the database can use the partial index below.
LEASED = literal_column("'leased'", String)

# SQLite numbers rows by itself only for an INTEGER key.
_Serial = BigInteger().with_variant(Integer, "sqlite")


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")


files = Table(
    "batch_files",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("owner", String(64), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("deleted_at", BigInteger),
    Index("batch_files_by_owner", "owner", "seq"),
)

batches = Table(
    "batches",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("owner", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("outcome", String(16)),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    *(
        Column(f"{moment}_at", BigInteger)
        for moment in (
            *("in_progress", "finalizing", "completed", "failed"),
            *("expired", "cancelling", "cancelled"),
        )
    ),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("output_ttl_s", BigInteger),
    Column("errors", JSON, nullable=False),
    Column("metadata", JSON),
    Column("model", Text),
    *(_count(name) for name in ("total", "completed", "failed", "est_tokens")),
    *(_count(f"{kind}_tokens") for kind in ("input", "cached", "output", "reasoning")),
    Index("batches_by_owner", "owner", "seq"),
    Index("batches_by_status", "status"),
)

requests = Table(
    "batch_requests",
    metadata,
    Column("batch", _Serial, ForeignKey("batches.seq"), primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("prefix", String(24), nullable=False),
    Column("est_tokens", BigInteger, nullable=False),
    Column("state", String(8), nullable=False, server_default="pending"),
    Column("tries", SmallInteger, nullable=False, server_default="0"),
    # Partial, so that a million finished lines cost the dispatcher nothing.
    Index(
        "batch_requests_leased",
        "batch",
        sqlite_where=text("state = 'leased'"),
        postgresql_where=text("state = 'leased'"),
    ),
)

# The pending lines, in the order in which they are claimed. They are also inserted in that order, because
# otherwise almost every line would write another page of the index.
queue = Table(
    "batch_queue",
    metadata,
    Column("batch", BigInteger, primary_key=True),
    Column("prefix", String(24), primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("not_before", Float, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

results = Table(
    "batch_results",
    metadata,
    Column("batch", _Serial, ForeignKey("batches.seq"), primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("status", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("request_id", String(64), nullable=False),
)

epochs = Table("batch_epoch", metadata, Column("id", Integer, primary_key=True), _count("epoch"))

# One row: the version of the tables.
stores = Table(
    "batch_store",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
)
VERSION = 1

_BUSY_TIMEOUT_MS = 30_000
_WRITES, _DURABLE = "conserve_writes", "conserve_durable"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_TAKING_OVER = 0x636F6E73  # PostgreSQL's number of our advisory lock


class StoreTakenOver(Unavailable):
    """Another batch process has taken over the store, so this one has to end."""


def reason_of(error: Exception) -> str:
    """Return the error text of the driver or the system; SQLAlchemy's own text contains clients' data."""
    return str(getattr(error, "orig", None) or error)


def disk_problem(error: Exception) -> str:
    """Return a disk error in words for clients, without paths; return an empty text for other errors."""
    cause = getattr(error, "orig", error)
    if isinstance(cause, sqlite3.Error) and ("full" in str(cause) or "I/O" in str(cause)):
        return str(cause)
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS else ""


class Database:
    """Runs transactions on the store. A `write` is durable when it returns."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        dialect = parsed.get_backend_name()
        if dialect not in ("sqlite", "postgresql"):
            wrong = f"the batch store is SQLite or PostgreSQL, not {dialect!r}: set another URL"
            raise GatewayConfigError(wrong)
        self._sqlite = dialect == "sqlite"
        if self._sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise GatewayConfigError("the batch store must be a file: sqlite:////path/to/batch.db")
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = create_engine(parsed, hide_parameters=True)
            _prepare_sqlite(self._engine)
        else:
            self._engine = create_engine(
                parsed, hide_parameters=True, pool_size=8, max_overflow=8, pool_pre_ping=True
            )
        # SQLite waits for the writer's lock with ever longer sleeps; a lock within the process is faster.
        self._writing = Lock()
        self._epoch: int | None = None

    def take_over(self, clock: SteadyClock) -> None:
        """Make this process the only writer, and move `clock` forward to the newest stored time."""
        with self._engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
            if not self._sqlite:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_TAKING_OVER})")
            _prepare_tables(connection)
            clock.not_before(_newest(connection))
            next_epoch = update(epochs).values(epoch=epochs.c.epoch + 1).returning(epochs.c.epoch)
            epoch = connection.execute(next_epoch).scalar()
            if epoch is None:
                epoch = 1
                connection.execute(insert(epochs).values(id=1, epoch=epoch))
        self._epoch = epoch

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """Begin a writing transaction. If it is not durable, the next durable one makes it so."""
        options = {_WRITES: True, _DURABLE: durable}
        writing = self._engine.connect().execution_options(**options)
        with self._writing, writing as connection, connection.begin():
            if not durable and not self._sqlite:
                connection.exec_driver_sql("SET LOCAL synchronous_commit TO OFF")
            # The lock on this row makes PostgreSQL's writers queue as SQLite's do.
            if connection.execute(select(epochs.c.epoch).with_for_update()).scalar() != self._epoch:
                raise StoreTakenOver("Another batch process has taken the store over.", retry_after_s=2.0)
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        self._engine.dispose()


def _prepare_tables(connection: Connection) -> None:
    """Create the tables; raise GatewayConfigError if the store has tables of another version."""
    there = inspect(connection)
    version = VERSION  # of a new store
    if there.has_table(stores.name):
        version = connection.execute(select(stores.c.version)).scalar_one()
    elif there.has_table(files.name):
        version = 0  # from before versions were recorded
    if version != VERSION:
        raise GatewayConfigError(
            f"the batch store has version {version}, and this conserve reads only {VERSION}: start the "
            "version of conserve that wrote it, or set another batch.database"
        )
    metadata.create_all(connection)
    if connection.execute(update(stores).values(version=VERSION)).rowcount == 0:
        connection.execute(insert(stores).values(id=1, version=VERSION))


def _newest(connection: Connection) -> float:
    times = (select(func.max(table.c.created_at)) for table in (files, batches))
    return max(connection.execute(newest).scalar() or 0 for newest in times)


def _prepare_sqlite(engine: Any) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in (
            f"busy_timeout = {_BUSY_TIMEOUT_MS}",
            "journal_mode = WAL",
            "foreign_keys = ON",
            "cache_size = -8192",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        # Writers take the lock at the beginning: the busy timeout does not help a transaction that reads
        # first and writes later.
        options = connection.get_execution_options()
        if options.get(_WRITES):
            # FULL: an acknowledged change outlives a power cut, not only a killed process.
            level = "FULL" if options.get(_DURABLE, True) else "NORMAL"
            connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")
