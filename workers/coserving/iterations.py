"""One JSON line an iteration, for whoever wants to know what an engine decided (`iteration_log`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from placement.latency import BatchWork


@dataclass(frozen=True, slots=True)
class IterationRecord:
    at: float  # monotonic clock, at its end
    seconds: float
    predicted_s: float
    new_tokens: int
    attended: int
    context: int
    online_rows: int
    offline_rows: int
    offline_tokens: int
    preempted: int
    late_rows: int
    aborted: bool
    abort_layer: int = -1
    signal_to_abort_s: float = 0.0
    check_gap_s: float = 0.0  # at an abort: time since the check of the flag before
    disowned_blocks: int = 0
    again_tokens: int = 0  # offline tokens that a preemption had lost
    before: int = 0  # sum over the rows of new tokens times context

    @property
    def work(self) -> BatchWork:
        rows = self.online_rows + self.offline_rows
        return BatchWork(self.new_tokens, self.attended, self.context, self.before, rows)


class IterationLog:
    def __init__(self, path: str) -> None:
        self._file: TextIO | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115

    def write(self, record: IterationRecord) -> None:
        if self._file is not None:
            self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_iterations(path: Path) -> list[IterationRecord]:
    """The complete lines of a log that may still be written to."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [IterationRecord(**json.loads(line)) for line in lines]
