"""Validates a batch: reads its file once, as a stream, and writes a row for each good line."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash
from sqlalchemy import Row

from router.auth.keys import StructuredOutputs
from router.batch.config import BatchConfig, BatchLimits
from router.batch.metrics import BATCHES_ENDED
from router.batch.store.blobs import Blobs
from router.batch.store.records import (
    EMBEDDINGS,
    BatchError,
    BatchStatus,
    NewRequest,
    estimated_tokens,
    prefix_key,
)
from router.batch.store.store import Store
from router.errors import BadRequest, RouterError, excerpt
from router.gateway.config import ServedModel
from router.requests.body_parser import check_items, is_deep
from router.requests.cost_limits import MOST_OFFLINE_ANSWERS, check_answers
from router.requests.fields import UnknownFields, check_fields, known_part
from router.requests.grammars import grammar_of
from router.requests.hints import HINT_FIELDS

log = logging.getLogger("conserve.router.batch.validation")

_CUSTOM_ID_CHARS = 512
_LINES_A_WRITE = 1_000
_ERRORS_BYTES = 64 * 1024  # JSON of a failed batch's errors, beyond which scanning stops
# Validation runs in a thread. It releases the interpreter lock before the event loop has to wait for it.
_WORK_S = 0.002
_REST_S = 0.0002


class Validator:
    def __init__(self, store: Store, blobs: Blobs, config: BatchConfig, clock: Callable[[], float]) -> None:
        self._store = store
        self._blobs = blobs
        self._limits = config.limits
        self._models = {name: model for model in config.models for name in (model.name, *model.aliases)}
        self._clock = clock

    def validate(self, batch: Row[Any]) -> None:
        """Validate a batch from its first line on. The batch is then in progress or has failed."""
        self._store.requests.clear(batch.seq)
        seen = _Seen()
        errors: list[BatchError] = []
        good: list[NewRequest] = []
        try:
            chunks = self._blobs.chunks(batch.input_file_id)
            for line in _in_turns(split_lines(chunks, self._limits.line_bytes)):
                try:
                    request = self._check(line, batch.endpoint, seen)
                except BadLine as bad:
                    errors.append(bad.at(line.number))
                    many = len(errors) >= self._limits.reported_errors
                    if many or len(orjson.dumps(errors)) > _ERRORS_BYTES:
                        break
                    continue
                if errors:
                    continue  # the batch fails, so that only further errors matter
                good.append(request)
                if len(good) >= _LINES_A_WRITE:
                    if not self._store.requests.load(batch.seq, good):
                        return
                    good.clear()
        except FileNotFoundError:
            gone = "The input file is gone. Upload it again."
            errors.append(BatchError("file_not_found", gone, "input_file_id"))
        if not errors and seen.total == 0:
            empty = "The input file is empty. Please ensure that the batch contains at least one request."
            errors.append(BatchError("empty_file", empty))
        if errors:
            self.fail(batch, errors)
            return
        lines = self._store.requests
        if (not good or lines.load(batch.seq, good)) and lines.enqueue(batch.seq):
            now = self._clock()
            if self._store.batches.begin(batch.seq, seen.model, seen.total, seen.est_tokens, now):
                log.info("batch accepted batch=%s requests=%d", batch.id, seen.total)

    def _check(self, line: "Line", endpoint: str, seen: "_Seen") -> NewRequest:
        checked = check_line(line.data, endpoint, self._limits, self._models)
        refused = self._limits.structured_outputs is StructuredOutputs.REFUSE
        if refused and (asked := grammar_of(checked.body)) is not None:
            text = f"This fleet accepts no grammar or schema: leave '{asked.field}' out."
            raise BadLine("structured_outputs_refused", text, f"body.{asked.field}")
        digest = xxhash.xxh3_128_intdigest(checked.custom_id.encode())
        if digest in seen.ids:
            text = (
                f"The custom_id '{checked.custom_id}' for this request is a duplicate of another request. "
                "The custom_id parameter must be unique for each request in a batch."
            )
            raise BadLine("duplicate_custom_id", text, "custom_id")
        if seen.model is not None and checked.model != seen.model:
            text = (
                f"The model '{checked.model}' differs from '{seen.model}' of the lines before it. "
                "All requests of a batch must be for one model."
            )
            raise BadLine("model_mismatch", text, "body.model")
        if seen.total >= self._limits.requests_per_batch:
            text = f"A batch holds at most {self._limits.requests_per_batch} requests."
            raise BadLine("too_many_tasks", text)
        seen.ids.add(digest)
        seen.model = checked.model
        seen.total += 1
        seen.est_tokens += checked.est_tokens
        key = prefix_key(checked.body)
        return NewRequest(line.number, checked.custom_id, line.offset, line.length, key, checked.est_tokens)

    def fail(self, batch: Row[Any], errors: list[BatchError]) -> None:
        if self._store.batches.fail(batch.seq, errors, self._clock()):
            BATCHES_ENDED.labels(BatchStatus.FAILED).inc()
            log.info("batch failed batch=%s errors=%d first=%s", batch.id, len(errors), errors[0].code)
            self._store.requests.clear(batch.seq)


@dataclass(slots=True)
class _Seen:
    """Facts about the lines read so far. A million custom ids, kept as 128-bit digests, take about 100 MB."""

    ids: set[int] = field(default_factory=set)
    model: str | None = None
    total: int = 0
    est_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1, as people and editors count
    offset: int
    length: int
    data: bytes | None  # None: the line is longer than allowed


def split_lines(chunks: Iterable[bytes], longest: int) -> Iterator[Line]:
    """Split a stream into lines, keeping at most `longest` bytes and one chunk in memory."""
    number = 1
    offset = 0  # where the current line began
    length = 0
    held: list[bytes] = []

    def finish() -> Line:
        return Line(number, offset, length, b"".join(held) if length <= longest else None)

    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            length += end - start
            if length <= longest:
                held.append(chunk[start:end])
            yield finish()
            number, offset, length, start = number + 1, offset + length + 1, 0, end + 1
            held.clear()
        length += len(chunk) - start
        if length <= longest:
            held.append(chunk[start:])
        else:
            held.clear()
    if length:
        yield finish()


def _in_turns(lines: Iterator[Line]) -> Iterator[Line]:
    until = time.perf_counter() + _WORK_S
    for line in lines:
        yield line
        if time.perf_counter() > until:
            time.sleep(_REST_S)
            until = time.perf_counter() + _WORK_S


# Checks of one line. Errors have OpenAI's codes and words where OpenAI has some.


class BadLine(RouterError):
    """A line of an input file that cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def at(self, line: int) -> BatchError:
        return BatchError(self.code, self.message, self.param, line)


@dataclass(frozen=True, slots=True)
class CheckedLine:
    custom_id: str
    model: str
    body: dict[str, Any]  # without its unknown fields
    est_tokens: int


def check_line(
    data: bytes | None, endpoint: str, limits: BatchLimits, models: Mapping[str, ServedModel]
) -> CheckedLine:
    if data is None:
        raise BadLine("line_too_large", f"This line is longer than the {limits.line_bytes} bytes allowed.")
    entry = _parse(data)
    custom_id = _required(entry, "custom_id", "a string")
    if not custom_id or "\0" in custom_id:
        wrong = "contain U+0000" if custom_id else "be empty"
        raise BadLine("invalid_value", f"Invalid 'custom_id': it must not {wrong}.", "custom_id")
    if len(custom_id) > _CUSTOM_ID_CHARS:
        text = f"'custom_id' is longer than {_CUSTOM_ID_CHARS} characters."
        raise BadLine("string_above_max_length", text, "custom_id")
    method = _required(entry, "method", "a string")
    if method != "POST":
        text = f"Invalid value: '{excerpt(method)}'. The only supported value is 'POST'."
        raise BadLine("invalid_method", text, "method")
    url = _required(entry, "url", "a string")
    if url != endpoint:
        text = f"The URL '{excerpt(url)}' of this request is not the batch's endpoint '{endpoint}'."
        raise BadLine("url_mismatch", text, "url")
    body = _required(entry, "body", "an object")
    name = _required(body, "model", "a string", "body.model")
    model = models.get(name)
    if model is None:
        raise BadLine(
            "model_not_found", f"The model '{excerpt(name)}' is not served by this fleet.", "body.model"
        )
    if endpoint == EMBEDDINGS and not model.embeddings:
        raise BadLine("unsupported", f"The model '{name}' generates text: it makes no embeddings.", "url")
    body = _check_common(endpoint, body, limits.unknown_fields)
    if endpoint == "/v1/chat/completions":
        _check_messages(_required(body, "messages", "an array", "body.messages"))
    else:
        prompt = "prompt" if endpoint == "/v1/completions" else "input"
        if not _required(body, prompt, "a string or an array", f"body.{prompt}"):
            raise BadLine("invalid_value", f"'{prompt}' must not be empty.", f"body.{prompt}")
    return CheckedLine(custom_id, name, body, estimated_tokens(len(data), body))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        where = f"byte {error.start} of the line"
        raise BadLine("invalid_encoding", f"This line is not valid UTF-8 ({where}).") from None
    if not data.strip():
        raise BadLine("invalid_json_line", "This line is empty.")
    try:
        entry = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        why = f"This line is not parseable as valid JSON: {error.msg}."
        raise BadLine("invalid_json_line", why) from None
    if not isinstance(entry, dict):
        raise BadLine("invalid_json_line", "This line is not a JSON object.")
    return entry


_KINDS: dict[str, type | tuple[type, ...]] = {
    "a string": str,
    "an integer": int,
    "an array": list,
    "an object": dict,
    "a string or an array": (str, list),
}
_NAMES = {float: "a number", bool: "a boolean", type(None): "null"}


def _required(entry: dict[str, Any], name: str, kind: str, param: str = "") -> Any:
    if name not in entry:
        missing = f"Missing required parameter: '{param or name}'."
        raise BadLine("missing_required_parameter", missing, param or name)
    return _of_kind(entry[name], kind, param or name)


def _of_kind(value: Any, kind: str, param: str) -> Any:
    if isinstance(value, _KINDS[kind]) and not isinstance(value, bool):
        return value
    names = _NAMES | {types: name for name, types in _KINDS.items() if isinstance(types, type)}
    text = f"Invalid type for '{param}': expected {kind}, but got {names[type(value)]} instead."
    raise BadLine("invalid_type", text, param)


def _check_common(endpoint: str, body: dict[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Check a line's body, and return it without its unknown fields, whose values are not checked."""
    if is_deep(body):
        raise BadLine("invalid_request", "'body' is nested too deeply.", "body")
    if body.get("stream"):
        raise BadLine("invalid_request", "Streaming is not supported in a batch.", "body.stream")
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            text = "A line belongs to no conversation: send the messages instead."
            raise BadLine("invalid_request", text, f"body.{name}")
    for name in sorted(HINT_FIELDS):
        if body.get(name) is not None:
            text = f"Offline work takes no hints and has no class: leave '{name}' out."
            raise BadLine("invalid_request", text, f"body.{name}")
    try:
        check_items(body)
        check_fields(endpoint, body, unknown)
        body = known_part(endpoint, body)
        check_answers(body, MOST_OFFLINE_ANSWERS)
    except BadRequest as wrong:
        code = "invalid_request" if wrong.code == wrong.default_code else wrong.code
        raise BadLine(code, f"{wrong.message}.", f"body.{wrong.param}") from None
    return body


def _check_messages(messages: list[Any]) -> None:
    if not messages:
        raise BadLine("empty_array", "'messages' must hold at least one message.", "body.messages")
    for index, message in enumerate(messages):
        param = f"body.messages[{index}]"
        _of_kind(message, "an object", param)
        if not isinstance(message.get("role"), str):
            text = f"Missing required parameter: '{param}.role'."
            raise BadLine("missing_required_parameter", text, f"{param}.role")
        if message.get("content") is not None:
            _of_kind(message["content"], "a string or an array", f"{param}.content")
