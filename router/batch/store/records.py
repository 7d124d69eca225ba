"""Defines the plain data of offline work, and makes a request's body, size estimate and prefix key."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
import xxhash

from router.requests.cost_limits import count_answers
from router.requests.fields import MAX_TOKENS, OFFLINE_PRIORITY
from router.requests.hints import HINT_FIELDS


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
    """File to be added to the store; stored files are rows of `database.files`."""

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
    """Reason why a batch failed: a bad line, or the file as a whole if `line` is None."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Checked parameters of a new batch, which is not yet a row of `database.batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    output_ttl_s: int | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Validated line: where its bytes are in the file, and what the dispatcher needs to know."""

    line: int
    custom_id: str
    offset: int
    length: int
    prefix: str
    est_tokens: int


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """Leased line that is at an engine, or is about to be sent to one."""

    batch: int  # the batch's seq
    line: int
    owner: str
    endpoint: str
    input_file_id: str
    offset: int
    length: int
    prefix: str
    est_tokens: int
    tries: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a line: an engine's HTTP answer, or an error of the batch process (status 0)."""

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
    """Lines of one batch that have no result yet, and what the policy needs to know of the batch."""

    batch: int
    owner: str
    pending: int
    leased: int
    accepting: bool  # more lines may be started; False while it is being cancelled
    est_tokens: int  # estimated tokens of an average line
    created_at: int
    expires_at: int


BYTES_PER_TOKEN = 4  # an estimate for fair shares, which each answer's usage corrects
DEFAULT_OUTPUT_TOKENS = 256
_NOT_OFFLINE = frozenset({"service_tier", "session_id"}) | HINT_FIELDS


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """Flex request in the form that the dispatcher needs."""

    prefix: str  # the prefix key
    est_tokens: int
    body: bytes  # body as it goes to an engine


@dataclass(frozen=True, slots=True)
class OfflineBodyParser:
    """Parses the body of a flex request, which a gateway has checked."""

    space: str

    def parse(self, pieces: Sequence[bytes]) -> OfflineRequest:
        raw = b"".join(pieces)
        body = orjson.loads(raw)
        return OfflineRequest(prefix_key(body), estimated_tokens(len(raw), body), offline_body(body))


def offline_body(body: Mapping[str, Any]) -> bytes:
    """Return a request's body for an engine, marked as offline by its `priority`."""
    marked = {name: value for name, value in body.items() if name not in _NOT_OFFLINE}
    return orjson.dumps({**marked, "priority": OFFLINE_PRIORITY})


def estimated_tokens(size: int, body: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request of `size` bytes, and of its answers (at most `MAX_TOKENS`).

    `body` must have known fields only, because the values of other fields have not been checked.
    """
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    named = (body[name] for name in names if isinstance(body.get(name), int | float))
    answer = int(next(named, DEFAULT_OUTPUT_TOKENS))  # a whole number: router/requests/fields.py
    return size // BYTES_PER_TOKEN + min(answer * count_answers(body), MAX_TOKENS)


# A prefix key consists of digests of the first 256, 2,048 and 16,384 characters that the engine will read.
# Sorted by prefix key, lines with long common beginnings are next to one another. The first two digests name
# a group of lines that should run on one engine, whose prefix cache then holds the common beginning.

_STEPS = (256, 2_048, 16_384)
_GROUP_CHARS = 2 * 8  # hexadecimal digits


def prefix_key(body: Mapping[str, object]) -> str:
    text = _leading_text(body, _STEPS[-1])
    return "".join(xxhash.xxh32_hexdigest(text[:step].encode()) for step in _STEPS)


def group_of(key: str) -> str:
    return key[:_GROUP_CHARS]


def _leading_text(body: Mapping[str, object], enough: int) -> str:
    pieces: list[str] = []
    length = 0
    for piece in _pieces(body):
        pieces.append(piece[: enough - length])
        length += len(pieces[-1])
        if length >= enough:
            break
    return "".join(pieces)


def _pieces(body: Mapping[str, object]) -> Iterator[str]:
    """Yield the text parts of a request in the order in which chat templates render them."""
    yield str(body.get("model"))
    if body.get("tools"):
        yield orjson.dumps(body["tools"]).decode()
    if isinstance(body.get("instructions"), str):
        yield str(body["instructions"])
    for name in ("messages", "prompt", "input"):
        content = body.get(name)
        if isinstance(content, str):
            yield content
        elif isinstance(content, Sequence):
            for item in content:
                yield item if isinstance(item, str) else orjson.dumps(item).decode()
