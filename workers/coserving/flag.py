"""The preemption flag: a page of shared memory between an engine's scheduler process and its workers.

Every armed iteration has an epoch, and whoever raises the flag writes the epoch it wants gone. A signal that
comes late therefore names an iteration that is over, and stops nothing; nothing has to be reset in between.
"""

import mmap
import os
import time
from pathlib import Path

_FIELDS = 16
_LAYER_BITS = 12

RAISED = 0  # epoch of the iteration to abort
RAISED_NS = 1
DECIDED = 2  # rank 0's word on it: epoch and layer in one number, so that no rank reads half of it
RUNNING = 3  # epoch of the armed iteration in the model now; 0: none
ABORTED = 4  # epoch of the last iteration aborted
ABORTED_NS = 5
ABORTED_LAYER = 6
ABORTS = 7  # how many iterations have been aborted
GAP_NS = 8  # at the last abort: time since the check before it, that is, how long the layers between took


def new_epoch() -> int:
    """Where an engine's epochs start: past every epoch that a crashed predecessor left in the page."""
    return time.time_ns() >> 20


def pack(epoch: int, layer: int) -> int:
    return epoch << _LAYER_BITS | layer


def unpack(decision: int) -> tuple[int, int]:
    return decision >> _LAYER_BITS, decision & ((1 << _LAYER_BITS) - 1)


class Flag:
    """Fields are aligned eight-byte integers, so that each is read and written whole."""

    def __init__(self, name: str) -> None:
        self.path = Path("/dev/shm") / name
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _FIELDS * 8)
            self._map = mmap.mmap(handle, _FIELDS * 8)
        finally:
            os.close(handle)
        self.fields = memoryview(self._map).cast("q")

    def raise_for(self, epoch: int) -> None:
        """Asks the workers to abort that iteration, if it still runs."""
        self.fields[RAISED_NS] = time.monotonic_ns()
        self.fields[RAISED] = epoch

    def aborted(self, epoch: int) -> bool:
        return self.fields[ABORTED] == epoch

    def abort_wait_s(self) -> float:
        """Of the last abort: from the signal to the safepoint that heeded it."""
        return max(self.fields[ABORTED_NS] - self.fields[RAISED_NS], 0) / 1e9

    def close(self) -> None:
        self.fields.release()
        self._map.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
