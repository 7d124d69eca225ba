"""The things the store keeps, as plain data."""

import secrets
from dataclasses import dataclass
from enum import StrEnum


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


LIVE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class RequestState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    seq: int
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed: one bad line, or the file as a whole (line None)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    id: str
    seq: int
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    outcome: BatchStatus | None  # the state that finalizing leads to
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    output_ttl_s: int | None
    errors: tuple[BatchError, ...]
    metadata: dict[str, str] | None
    model: str | None
    total: int
    completed: int
    failed: int
    est_tokens: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A line that passed validation: where its bytes are and what the dispatcher must know of it."""

    line: int
    custom_id: str
    offset: int
    length: int
    prefix: str
    est_tokens: int


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A line this dispatcher holds the lease of."""

    batch: int  # the batch's seq
    line: int
    owner: str
    endpoint: str
    input_file_id: str
    custom_id: str
    offset: int
    length: int
    prefix: str
    est_tokens: int
    tries: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a line: an HTTP answer, or an error of our own (status 0)."""

    batch: int
    line: int
    status: int
    body: bytes  # one line of JSON: the answer's body, or {"code", "message"}
    request_id: str
    usage: Usage = Usage()

    @property
    def succeeded(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class Backlog:
    """What one batch still has to do."""

    batch: int
    owner: str
    pending: int
    leased: int
    accepting: bool  # more lines may be started; False while it is being cancelled
    est_tokens: int  # of an average line
    created_at: int
    expires_at: int


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(16)}"
