"""Decides which blocks move from host memory to the disk: first those of conversations idle for longest."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvtransfer.checkpoint.copy_orders import DiskMove
from kvtransfer.retention.parking import SharedKvState

logger = logging.getLogger("conserve.kvtransfer.checkpoint")

KEPT_FREE: Final = 8  # one of this many host slots stays free, for the blocks that are stored next
LOOKS_A_STEP: Final = 512  # blocks that a step examines at most, which bounds its cost
WALK_S: Final = 0.05  # least time between two walks, which begin at the conversation idle for longest
PAUSE_S: Final = 30.0  # how long no move begins after a failed write
SILENT_S: Final = 30.0  # the disk counts as failing if moves are under way and none ends for this long
# The most that one step adds to the disk's silence, because an engine without requests rarely steps.
LONGEST_STEP_S: Final = 1.0


class DiskMoves:
    """Keeps a part of host memory free by moving blocks to the disk. Callers hold `SharedKvState.lock`.

    When the disk is full, the conversation that has been idle for longest loses its KV. For a while after a
    failed write, and while the disk does not answer, conversations displace each other in host memory, as
    without a disk.
    """

    def __init__(self, state: SharedKvState, ranks: int) -> None:
        self._state = state
        self._ranks = ranks
        self._walk: Iterator[bytes] = iter(())
        self._next_walk_at = 0.0
        self._paused_until = 0.0
        self._began_at = 0.0  # the last call of `begin`
        self._silent_s = 0.0  # how long moves have been under way and none has ended
        self._done: Counter[int] = Counter()  # disk slot -> number of ranks that ended the move
        self._failed: set[int] = set()  # disk slots that a rank could not write

    def begin(self) -> list[DiskMove]:
        """Begin moves to the disk if host memory is short, and return them."""
        host, now = self._state.host, self._state.clock()
        self._watch(now)
        self._state.moves_to_disk = bool(host.disk_capacity) and now >= self._paused_until
        missing = max(1, host.capacity // KEPT_FREE) - host.free - host.moving
        if missing <= 0 or not self._state.moves_to_disk:
            return []
        if not host.free_on_disk:
            self._state.give_up_longest_idle()
        moves: list[DiskMove] = []
        for _ in range(LOOKS_A_STEP):
            block = next(self._walk, None)
            if block is None:
                if now < self._next_walk_at:
                    break
                self._walk, self._next_walk_at = self._state.idle_blocks(), now + WALK_S
            elif (move := host.begin_move(block)) is not None:
                moves.append(move)
                if len(moves) == missing:
                    break
        return moves

    def _watch(self, now: float) -> None:
        before, since = self._silent_s, min(now - self._began_at, LONGEST_STEP_S)
        self._began_at = now
        self._silent_s = before + since if self._state.host.moving else 0.0
        if self._silent_s < SILENT_S:
            return
        self._paused_until = now + PAUSE_S
        if before < SILENT_S:
            self._state.counts["failed_disk_moves"] += 1
            logger.error("no block could be moved to the disk for %g s: the disk does not answer", SILENT_S)

    def on_report(self, moved: Counter[int], unmoved: set[int]) -> Counter[str]:
        """End the moves that all ranks have done; return how many were written and how many failed."""
        counts: Counter[str] = Counter()
        self._failed |= unmoved
        self._silent_s = 0.0 if moved else self._silent_s
        for disk_slot, ranks in moved.items():
            self._done[disk_slot] += ranks
            if self._done[disk_slot] < self._ranks:
                continue
            del self._done[disk_slot]
            failed = disk_slot in self._failed
            self._failed.discard(disk_slot)
            self._state.host.end_move(disk_slot, written=not failed)
            counts["failed_disk_moves" if failed else "disk_blocks"] += 1
            if failed:
                self._paused_until = self._state.clock() + PAUSE_S
        return counts
