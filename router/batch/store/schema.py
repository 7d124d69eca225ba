"""The tables. One schema for SQLite and PostgreSQL."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
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
    literal_column,
    text,
)

metadata = MetaData()

# Written out, so that the database sees that the partial index below has all such lines.
LEASED = literal_column("'leased'", String)

# SQLite numbers rows by itself only for an INTEGER key.
_Serial = BigInteger().with_variant(Integer, "sqlite")

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
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("output_ttl_s", BigInteger),
    Column("errors", JSON, nullable=False),
    Column("metadata", JSON),
    Column("model", Text),
    Column("total", BigInteger, nullable=False, server_default="0"),
    Column("completed", BigInteger, nullable=False, server_default="0"),
    Column("failed", BigInteger, nullable=False, server_default="0"),
    Column("est_tokens", BigInteger, nullable=False, server_default="0"),
    Column("input_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default="0"),
    Column("worker", String(64)),  # the dispatcher that validates or finalizes it
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
    Column("dispatcher", String(64)),
    Column("tries", SmallInteger, nullable=False, server_default="0"),
    Column("not_before", Float, nullable=False, server_default="0"),
    # Partial, so that a million finished lines cost the dispatcher nothing.
    Index(
        "batch_requests_pending",
        "batch",
        "prefix",
        "line",
        sqlite_where=text("state = 'pending'"),
        postgresql_where=text("state = 'pending'"),
    ),
    Index(
        "batch_requests_leased",
        "batch",
        "dispatcher",
        sqlite_where=text("state = 'leased'"),
        postgresql_where=text("state = 'leased'"),
    ),
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

dispatchers = Table(
    "batch_dispatchers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("alive_until", Float, nullable=False),
)
