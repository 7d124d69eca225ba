"""Plain data of the store: files, batches, their lines and results."""

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

EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", EMBEDDINGS)


class RequestState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it is added; read, it is a row of `database.files`."""

    id: str
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
class NewBatch:
    """What the caller asked for, checked; then it is a row of `database.batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    output_ttl_s: int | None = None
    metadata: dict[str, str] | None = None


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
    """A line that is leased: at an engine, or on its way there."""

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
