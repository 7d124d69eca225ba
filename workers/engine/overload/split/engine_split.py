"""State of one engine in a split, shared by drop, restore, passes and the peer service.

The worker's thread changes the state, and holds the device lock meanwhile. Threads of the peer server wait
for a phase, take the device lock, and check that the split that they serve still lasts.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.engine.compat import split_runner as internals
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.split.membership import (
    AFTER_EXCHANGE,
    DeviceLock,
    EngineMemory,
    Membership,
    SplitLimits,
    SplitPhase,
)
from workers.engine.overload.split.peer_link import Message, PeerRefused, SplitEnded

logger = logging.getLogger("conserve.workers.overload")

PROTOCOL = 4  # version of phases and messages; engines with different versions do not share layers


class EngineSplit:
    """State of an engine whose layers may be shared: its phase, membership and memory."""

    def __init__(
        self, runner: Any, kv: ReservedKv, weights: LayerWeights, whole_blocks: int, device: DeviceLock
    ) -> None:
        """Start with the whole model, whose pool has `whole_blocks` blocks."""
        self.runner, self.kv, self.weights, self.device = runner, kv, weights, device
        self.whole_blocks = whole_blocks
        self.limits = SplitLimits()
        self.member: Membership | None = None
        self.phase = SplitPhase.WHOLE
        self.last_epoch = 0  # of the last split, whether it lasts or not
        self.lost = False  # whether KV was lost in this iteration, so that nothing may be sampled
        self._changed = threading.Condition()

    @property
    def block_tokens(self) -> int:
        return int(self.runner.cache_config.block_size)

    def most_blocks(self, member: Membership) -> int:
        """Return how many blocks each member's pool may have so that this engine's memory suffices."""
        sizes = [self.weights.layer_bytes(layer) for layer in range(len(self.weights))]
        memory = EngineMemory(self.whole_blocks, self.kv.row_bytes, sizes, self.kv.memory.page_bytes)
        return min(memory.rows_that_fit(member.kept), self.kv.rows) // len(member.parts)

    def layout(self) -> list[int]:
        """Return the facts that must be equal on all members."""
        layers, layer_bytes = len(self.weights), self.weights.layer_bytes(0)
        return [PROTOCOL, layers, self.kv.row_bytes, self.block_tokens, layer_bytes]

    # Changes, in the worker's thread

    def begin(self, member: Membership) -> None:
        with self._changed:
            self.last_epoch, self.member, self.phase = member.epoch, member, SplitPhase.MEETING
            self._changed.notify_all()

    def enter(self, phase: SplitPhase) -> None:
        with self._changed:
            self.phase = phase
            self._changed.notify_all()

    def share(self, member: Membership, used: list[int]) -> None:
        """Copy dropped layers' KV of `used` blocks to the host; turn these layers' memory into KV rows."""
        self.weights.drop(member.dropped)
        self.kv.drop(member.dropped, used)
        self.kv.resize(member.kept, member.rows)
        self._bind_rows(member.rows)

    def make_whole(self, member: Membership) -> None:
        """Restore the dropped layers, with their KV as far as it is on the host, in any phase."""
        with self._changed:
            self.phase, self.member = SplitPhase.WHOLE, None
            self._changed.notify_all()
        self.kv.resize(member.kept, self.whole_blocks)
        self.weights.restore(member.dropped)
        self.kv.restore(self.whole_blocks)
        self._bind_rows(self.whole_blocks)
        member.close()

    def lose(self, member: Membership, error: Exception) -> None:
        """Restore the whole model after a fault. KV that peers had is lost."""
        logger.warning("split %d is lost, requests are computed again: %s", member.epoch, error)
        self.make_whole(member)
        self.lost = True

    def finish_launched_work(self) -> None:
        """Wait for launched kernels before a thread with another stream uses the device."""
        self.kv.memory.driver.synchronize()

    def _bind_rows(self, rows: int) -> None:
        for name, view in self.kv.views(rows):
            internals.bind_kv(self.runner, name, view)
        self.runner.kv_caches[:] = [view for _, view in self.kv.views(rows)]

    # Waits, in threads of the peer server

    def wait_for(self, message: Message, phase: SplitPhase) -> Membership:
        """Wait until this engine reaches `phase` of the split that a message names; return its membership.

        Raises SplitEnded if this split is over here, and PeerRefused if the phase is not reached in time.
        """

        def is_current() -> bool:
            return self.member is not None and self.member.epoch == message.epoch

        def is_decided() -> bool:
            return self.phase >= phase if is_current() else self.last_epoch >= message.epoch

        limit_s = self.limits.order_s if phase in AFTER_EXCHANGE else self.limits.meet_s
        with self._changed:
            decided = self._changed.wait_for(is_decided, limit_s)
            if self.last_epoch >= message.epoch and not is_current():
                raise SplitEnded(f"epoch {message.epoch} is over here")
            if not decided or self.member is None:
                raise PeerRefused(f"epoch {message.epoch} has not reached phase {phase.name.lower()} here")
            return self.member

    @contextmanager
    def device_for(self, member: Membership) -> Iterator[None]:
        """Hold the device lock for work of this split; raise SplitEnded if it is over."""
        with self.device:
            if self.member is not member:
                raise SplitEnded(f"epoch {member.epoch} is over here")
            yield
