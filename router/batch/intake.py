"""Validation of a batch: its file is read once, as a stream, and each good line gets a row."""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import xxhash

from router.batch.blobs import Blobs
from router.batch.config import BatchLimits
from router.batch.lineerrors import BadLine
from router.batch.lines import Line, split_lines
from router.batch.metrics import BATCHES_ENDED
from router.batch.prefix import prefix_key
from router.batch.records import BatchError, BatchRecord, BatchStatus, NewRequest
from router.batch.store.store import Store
from router.batch.validate import LineRules, check_line

log = logging.getLogger("conserve.router.batch.intake")

_ROWS_A_WRITE = 200
# Threads share the interpreter with the gateway's token path: validation works and rests in turns.
_WORK_S = 0.001
_REST_S = 0.001


@dataclass(slots=True)
class _Seen:
    """What the lines so far have in common. Ids are kept as 128-bit digests: a million take about 100 MB."""

    ids: set[int]
    model: str | None = None
    total: int = 0
    est_tokens: int = 0


class Intake:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        limits: BatchLimits,
        models: Callable[[], Collection[str] | None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._limits = limits
        self._models = models
        self._clock = clock

    def validate(self, batch: BatchRecord, worker: str) -> None:
        """Leads to in_progress or failed. Starts over when an earlier try was cut off."""
        self._store.requests.clear(batch.seq)
        seen = _Seen(set())
        errors: list[BatchError] = []
        rows: list[NewRequest] = []
        try:
            for line in _in_turns(self._lines(batch)):
                try:
                    row = self._check(line, batch.endpoint, seen)
                except BadLine as bad:
                    errors.append(bad.at(line.number))
                    if len(errors) >= self._limits.reported_errors:
                        break
                    continue
                if errors:
                    continue  # the batch fails: only more errors are of interest
                rows.append(row)
                if len(rows) >= _ROWS_A_WRITE:
                    if not self._store.requests.load(batch.seq, worker, rows):
                        return
                    rows.clear()
        except FileNotFoundError:
            errors.append(
                BatchError("file_not_found", "The input file is gone. Upload it again.", "input_file_id")
            )
        if not errors and seen.total == 0:
            errors.append(
                BatchError(
                    "empty_file",
                    "The input file is empty. Please ensure that the batch contains at least one request.",
                )
            )
        if errors:
            self._fail(batch, worker, errors)
            return
        if rows and not self._store.requests.load(batch.seq, worker, rows):
            return
        if self._store.batches.begin(
            batch.seq, worker, seen.model, seen.total, seen.est_tokens, self._clock()
        ):
            log.info("batch accepted batch=%s requests=%d", batch.id, seen.total)

    def _lines(self, batch: BatchRecord) -> Iterator[Line]:
        return split_lines(self._blobs.chunks(batch.input_file_id), self._limits.line_bytes)

    def _check(self, line: Line, endpoint: str, seen: _Seen) -> NewRequest:
        rules = LineRules(endpoint, self._limits.line_bytes, self._limits.custom_id_chars, self._models())
        checked = check_line(line.data, rules)
        digest = xxhash.xxh3_128_intdigest(checked.custom_id.encode())
        if digest in seen.ids:
            raise BadLine(
                "duplicate_custom_id",
                f"The custom_id '{checked.custom_id}' for this request is a duplicate of another request. "
                "The custom_id parameter must be unique for each request in a batch.",
                "custom_id",
            )
        if seen.model is not None and checked.model != seen.model:
            raise BadLine(
                "model_mismatch",
                f"The model '{checked.model}' differs from '{seen.model}' of the lines before it. "
                "All requests of a batch must be for one model.",
                "body.model",
            )
        if seen.total >= self._limits.requests_per_batch:
            raise BadLine(
                "too_many_tasks", f"A batch holds at most {self._limits.requests_per_batch} requests."
            )
        seen.ids.add(digest)
        seen.model = checked.model
        seen.total += 1
        seen.est_tokens += checked.est_tokens
        return NewRequest(
            line.number,
            checked.custom_id,
            line.offset,
            line.length,
            prefix_key(checked.body),
            checked.est_tokens,
        )

    def _fail(self, batch: BatchRecord, worker: str, errors: list[BatchError]) -> None:
        if not self._store.batches.fail(batch.seq, worker, errors, self._clock()):
            return
        BATCHES_ENDED.labels(BatchStatus.FAILED).inc()
        log.info("batch failed batch=%s errors=%d first=%s", batch.id, len(errors), errors[0].code)
        self._store.requests.clear(batch.seq)
        self._store.batches.release(batch.seq, worker)


def _in_turns(lines: Iterator[Line]) -> Iterator[Line]:
    until = time.perf_counter() + _WORK_S
    for line in lines:
        yield line
        if time.perf_counter() > until:
            time.sleep(_REST_S)
            until = time.perf_counter() + _WORK_S
