"""Moves batches through their states: validation, end of window, cancellation, output files and clean-up.

Validation runs in another thread than the rest, so that a large file does not delay the ends of other
batches. Each step may be interrupted anywhere: the next try continues from the state in the store.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy import Row
from sqlalchemy.exc import DataError, SQLAlchemyError

from router.batch.config import MAX_WINDOW_S
from router.batch.dispatch.validation import Validator
from router.batch.metrics import BATCHES_ENDED, BATCHES_LIVE
from router.batch.store.blobs import Blobs, BlobWriter
from router.batch.store.database import StoreTakenOver
from router.batch.store.records import LIVE, BatchError, BatchStatus, FileRecord
from router.batch.store.request_table import LineOutcome
from router.batch.store.store import ENDS, VALIDATES, Store

log = logging.getLogger("conserve.router.batch.lifecycle")

_SWEEP_EVERY_S = 60.0
_UNAVAILABLE = (SQLAlchemyError, OSError, StoreTakenOver)  # the next pass may succeed
_FAULT = BatchError(
    "server_error",
    "The server cannot validate this file, and its log says why. Tell the operator. To find the line at "
    "which it fails, submit the lines in smaller batches.",
)
_UNDONE = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
    BatchStatus.COMPLETED: ("no_result", "This request has no result: submit it again."),
}


class BatchLifecycle:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        validator: Validator,
        cancel_grace_s: float,
        clock: Callable[[], float],
        keep_s: float | None = None,
    ) -> None:
        """Create a lifecycle. It keeps a batch's record for `keep_s` plus one batch window, or for ever."""
        self._store = store
        self._blobs = blobs
        self._validator = validator
        self._cancel_grace_s = cancel_grace_s
        self._clock = clock
        self._keep_s = keep_s
        self._swept = float("-inf")
        self.live = 1  # batches that have not ended, when last counted; 1 until the first count

    def validate_one(self) -> bool:
        """Validate the oldest new batch; return True if there may be more new batches.

        If the validation itself has an error, the batch fails, because later batches wait for it.
        """
        batch = self._store.batches.first(VALIDATES)
        if batch is not None:
            try:
                self._validator.validate(batch)
            except Exception as error:
                if isinstance(error, _UNAVAILABLE) and not isinstance(error, DataError):
                    raise
                log.exception("batch cannot be validated batch=%s", batch.id)
                self._validator.fail(batch, [_FAULT])
        return batch is not None

    def end_one(self) -> bool:
        """Close the batches that are done, late or cancelled, and finish the oldest closed one.

        Returns True if there may be more to finish.
        """
        now = self._clock()
        self._store.batches.settle(now, self._cancel_grace_s)
        live = self._store.batches.count_live()
        self.live = sum(live.values())
        for status in LIVE:
            BATCHES_LIVE.labels(status).set(live.get(status, 0))
        if now - self._swept >= _SWEEP_EVERY_S:
            self._sweep(now)
            self._swept = now
        batch = self._store.batches.first(ENDS)
        if batch is not None:
            self._finish(batch)
        return batch is not None

    def _sweep(self, now: float) -> None:
        """Delete what nobody needs: lines of ended batches, deleted and expired files, old batches."""
        for seq in self._store.batches.ended_with_lines():
            self._store.requests.clear(seq)
        while gone := self._store.files.unreferenced(now):
            for file_id in gone:
                self._blobs.delete(file_id)
            self._store.files.forget(gone)
            log.info("deleted or expired files removed files=%d", len(gone))
        if self._keep_s is not None:
            self._store.batches.forget(now - self._keep_s - MAX_WINDOW_S)

    def _finish(self, batch: Row[Any]) -> None:
        """Write the output and error files of a batch. A second call overwrites both."""
        output, error = _file_of(batch, "output"), _file_of(batch, "error")
        good = failed = 0
        with self._blobs.create(output) as good_lines, self._blobs.create(error) as failed_lines:
            if batch.in_progress_at is not None:  # else it ended before its lines were accepted
                for outcome in self._store.requests.outcomes(batch.seq):
                    line = result_line(outcome, BatchStatus(batch.outcome))
                    if outcome.status == 200:
                        good_lines.write(line)
                        good += 1
                    else:
                        failed_lines.write(line)
                        failed += 1
            output_file = self._kept(batch, output, "output", good_lines)
            error_file = self._kept(batch, error, "error", failed_lines)
        if self._store.batches.finish(batch, output_file, error_file, good, failed, self._clock()):
            BATCHES_ENDED.labels(batch.outcome).inc()
            log.info(
                "batch finished batch=%s outcome=%s good=%d failed=%d", batch.id, batch.outcome, good, failed
            )
        self._store.requests.clear(batch.seq)

    def _kept(self, batch: Row[Any], name: str, kind: str, writer: BlobWriter) -> FileRecord | None:
        if not writer.written:
            return None
        writer.commit()
        now = int(self._clock())
        expires = now + batch.output_ttl_s if batch.output_ttl_s else None
        filename = f"{batch.id}_{kind}.jsonl"
        return FileRecord(name, batch.owner, filename, "batch_output", writer.written, now, expires)


def _file_of(batch: Row[Any], kind: str) -> str:
    """Return the id of a batch's output or error file, which is the same at a second attempt."""
    return f"file-{hashlib.sha256(f'{batch.id}/{kind}'.encode()).hexdigest()[:32]}"


def result_line(outcome: LineOutcome, ended: BatchStatus) -> bytes:
    """Return one line of an output or error file, into which the answer's JSON is inserted unchanged."""
    if outcome.status is None or outcome.status == 0:
        code, message = _UNDONE[ended]
        error = orjson.dumps({"code": code, "message": message}) if outcome.body is None else outcome.body
        response = b"null"
    else:
        assert outcome.body is not None
        error = b"null"
        response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
            outcome.status,
            orjson.dumps(outcome.request_id),
            outcome.body,
        )
    line_id = (outcome.request_id or f"{outcome.line:032x}").encode()
    return b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":%b}\n' % (
        line_id,
        orjson.dumps(outcome.custom_id),
        response,
        error,
    )
