"""The end of a batch: output and error files are written from the results, then it gets its last state."""

import hashlib
import logging
from collections.abc import Callable

import orjson

from router.batch.blobs import Blobs, Writer
from router.batch.metrics import BATCHES_ENDED
from router.batch.records import BatchRecord, BatchStatus, FileRecord
from router.batch.store.requests import Outcome
from router.batch.store.store import Store

log = logging.getLogger("conserve.router.batch.finish")

_UNDONE = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
    BatchStatus.COMPLETED: ("no_result", "This request has no result: submit it again."),
}


class Finisher:
    def __init__(self, store: Store, blobs: Blobs, clock: Callable[[], float]) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock

    def finish(self, batch: BatchRecord, worker: str) -> None:
        """Safe to cut off and to repeat: files keep their names and appear with the last state."""
        assert batch.outcome is not None
        output, error = _file_of(batch, "output"), _file_of(batch, "error")
        good = failed = 0
        with self._blobs.create(output) as good_lines, self._blobs.create(error) as failed_lines:
            if batch.in_progress_at is not None:  # else it ended before its lines were accepted
                for outcome in self._store.requests.outcomes(batch.seq):
                    line = result_line(outcome, batch.outcome)
                    if outcome.status == 200:
                        good_lines.write(line)
                        good += 1
                    else:
                        failed_lines.write(line)
                        failed += 1
            output_file = self._kept(batch, output, "output", good_lines)
            error_file = self._kept(batch, error, "error", failed_lines)
        if self._store.batches.finish(batch, worker, output_file, error_file, good, failed, self._clock()):
            BATCHES_ENDED.labels(batch.outcome).inc()
            log.info(
                "batch finished batch=%s outcome=%s good=%d failed=%d", batch.id, batch.outcome, good, failed
            )
        self.clean_up(batch, worker)

    def clean_up(self, batch: BatchRecord, worker: str) -> None:
        self._store.requests.clear(batch.seq)
        self._store.batches.release(batch.seq, worker)

    def _kept(self, batch: BatchRecord, name: str, kind: str, writer: Writer) -> FileRecord | None:
        if not writer.written:
            return None
        writer.commit()
        now = int(self._clock())
        expires = now + batch.output_ttl_s if batch.output_ttl_s else None
        return FileRecord(
            name, 0, batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", writer.written, now, expires
        )


def _file_of(batch: BatchRecord, kind: str) -> str:
    """Derived from the batch, so that a second try overwrites the first; not guessable without its id."""
    return f"file-{hashlib.sha256(f'{batch.id}/{kind}'.encode()).hexdigest()[:32]}"


def result_line(outcome: Outcome, ended: BatchStatus) -> bytes:
    """One line of an output or error file. The answer's body, kept as JSON, is spliced in as it is."""
    custom_id = orjson.dumps(outcome.custom_id)
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
        custom_id,
        response,
        error,
    )
