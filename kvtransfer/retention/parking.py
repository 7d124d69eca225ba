"""Parks and ends an engine's conversations, and holds the state that its plugins share, under one lock.

The control socket's thread needs the lock: it releases and parks conversations while the engine is idle and
its scheduler sleeps. Everything here is bookkeeping; blocks are touched in the next step.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvtransfer.checkpoint.host_index import HostIndex, Slot
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import (
    FirstKept,
    RetainedConversation,
    RetainedConversations,
    RetentionPhase,
    all_kept,
)
from placement.engines import SplitState

logger = logging.getLogger("conserve.kvtransfer.parking")

LEAVES_WITHIN_S = 75.0  # how long a draining engine keeps an idle conversation that may move with its KV

BlockIds = Callable[[], Iterable[int]]


@dataclass(slots=True)
class RequestLoads:
    """Ids of requests by the state of their KV load.

    Retention adds ids to `loading`, the connector maintains `held_by_others`, and the state report makes all
    other changes.
    """

    loading: set[str] = field(default_factory=set)  # have blocks but no step yet: KV may be on its way
    loaded: set[str] = field(default_factory=set)  # requests whose KV has arrived
    departing: set[str] = field(default_factory=set)  # ended; vLLM holds their blocks until the load ends
    held_by_others: set[str] = field(default_factory=set)  # ended; another connector holds their blocks

    @property
    def in_flight(self) -> bool:
        return bool(self.loading - self.loaded or self.departing)


@dataclass(slots=True)
class UnreportedChanges:
    """Conversations that changed since the last report. The state report clears the lists."""

    confirmed: list[str] = field(default_factory=list)  # got blocks
    parked: list[str] = field(default_factory=list)
    unparked: list[str] = field(default_factory=list)  # parked conversations that left the host


@dataclass(slots=True)
class BlockHolders:
    """References on blocks by the plugin that holds them, for the integrity check.

    Each plugin registers a function that returns a block id for each of its references.
    """

    references: dict[str, BlockIds] = field(default_factory=dict)

    @property
    def any_held(self) -> bool:
        return any(True for ids in self.references.values() for _ in ids())


class SharedKvState:
    """Conversations and host slots of an engine, and which conversations are due to be parked or ended."""

    def __init__(
        self,
        config: ConnectorConfig,
        host_slots: int,
        clock: Callable[[], float],
        groups: Sequence[FirstKept] = (all_kept,),
        disk_slots: int = 0,
    ) -> None:
        self._config = config
        self.clock = clock
        self.lock = threading.RLock()
        self.host = HostIndex(host_slots, disk_slots)
        self.conversations = RetainedConversations(clock, self.host.drop, groups)
        self.host.on_copy = self.conversations.blocks.on_host_copy
        self.requests: dict[str, tuple[Any, RetainedConversation]] = {}  # requests with a conversation, by id
        self.growing: list[str] = []  # ids of `requests` that may have one more full block; set by retention
        self.loads = RequestLoads()
        self.changes = UnreportedChanges()
        self.holders = BlockHolders()
        self.drains_since: float | None = None  # None: the engine does not drain
        self.moves_to_disk = False  # idle conversations make room in host memory by moving to the disk
        self.kv_io_suspended = False  # no copy or transfer starts: layers are shared with another engine
        self.split: SplitState | None = None
        self.counts: Counter[str] = Counter()

    @property
    def no_kv_in_flight(self) -> bool:
        """Return whether no KV is being copied, even for requests that have ended."""
        return not (self.loads.in_flight or self.holders.any_held)

    def release(self, key: str, cause: str = "released") -> bool:
        """End a conversation, so that its blocks and slots lose their owner; return whether it was known."""
        with self.lock:
            known = self.conversations.end(key)
            if known:
                self.counts[f"ended.{cause}"] += 1
            return known

    def park(self, key: str) -> bool:
        """Park a retained conversation that is entirely on the host; return whether it is parked now."""
        with self.lock:
            conversation = self.conversations.get(key)
            if conversation is None or conversation.phase is RetentionPhase.RUNNING:
                return False
            if conversation.phase is RetentionPhase.RETAINED:
                if conversation.unstored:
                    return False
                self._park(conversation, "pressure")
            return True

    def _park(self, conversation: RetainedConversation, cause: str) -> None:
        self.conversations.park(conversation)
        self.counts[f"parked.{cause}"] += 1
        self.changes.parked.append(conversation.key)

    @property
    def draining(self) -> bool:
        return self.drains_since is not None

    def drain(self, draining: bool) -> None:
        """Begin or end a drain, during which conversations leave the engine.

        An idle conversation is kept for `LEAVES_WITHIN_S`, so that it can move with its KV. An engine without
        transfers ends it immediately.
        """
        with self.lock:
            if draining != self.draining:
                self.drains_since = self.clock() if draining else None

    def park_and_expire(self) -> None:
        """Park and end conversations that have been idle for long enough.

        A conversation is parked only if all its blocks are on the host or on their way there. Copies under
        way hold references to their blocks, so parking loses nothing.
        """
        with self.lock:
            now = self.clock()
            if self.drains_since is not None:
                patience_s = LEAVES_WITHIN_S if self._config.transfer else 0.0
                if self.drains_since <= now - patience_s:
                    for conversation in self.conversations.idle_since(now - patience_s):
                        self.release(conversation.key, "drained")
            for conversation in self.conversations.idle_since(now):
                idle_s, wish = now - conversation.last_used, conversation.park_after_s
                park_after_s = self._config.park_after_s if wish is None else wish
                ttl_s = conversation.ttl_s or self._config.ttl_s
                if ttl_s is not None and idle_s >= ttl_s:
                    self.release(conversation.key, "ttl")
                elif conversation.phase is not RetentionPhase.RETAINED or now < conversation.kept_until:
                    continue
                elif idle_s >= park_after_s and not conversation.lacking:
                    late = conversation.kept_until > -inf
                    self._park(conversation, "late" if late else "idle" if wish is None else "said")

    def park_for_pressure(self, missing_blocks: int) -> None:
        """Park retained conversations, oldest first, until `missing_blocks` can be evicted."""
        for conversation in self.conversations.retained_oldest_first():
            if missing_blocks <= 0:
                return
            if self.park(conversation.key):
                missing_blocks -= conversation.owned

    def reset(self) -> None:
        """Forget all computed KV, because it is no longer valid."""
        with self.lock:
            for conversation in self.conversations:
                self.conversations.advance(conversation, [])
            for block in self.host.blocks():
                self.host.drop(block)

    def claim_host_slot(self, block: bytes, owner: RetainedConversation) -> Slot | None:
        """Reserve a slot for a block of `owner`, or return None if the host is full for it.

        A conversation displaces checkpoints of offline work first, then the idle conversation that was least
        recently used. If conversations move to the disk, the block waits for a move instead. Offline work
        displaces no blocks: an offline request without a checkpoint only computes more after a preemption,
        and so would the request whose checkpoint it took.
        """
        slot = self.host.begin_store(block)
        if slot is not None or owner.offline:
            return slot
        for conversation in self._displaceable_by(owner):
            if self.moves_to_disk and not conversation.offline:
                return None
            self._leave_host(conversation)
            slot = self.host.begin_store(block)
            if slot is not None:
                return slot
        return None

    def give_up_longest_idle(self) -> None:
        """Make room on a full disk: drop the host's KV of the conversation that has been idle for longest."""
        if oldest := next(iter(self._idle_on_host()), None):
            self._leave_host(oldest)

    def _leave_host(self, conversation: RetainedConversation) -> None:
        if conversation.phase is RetentionPhase.PARKED:
            self.changes.unparked.append(conversation.key)
            logger.info("the host is full, KV is lost conversation=%s", conversation.key)
        self.conversations.leave_host(conversation)
        self.counts["left_host"] += not conversation.offline

    def idle_blocks(self) -> Iterator[bytes]:
        """Yield the keys of blocks that may be in host memory, from the conversation idle for longest on."""
        for conversation in self._idle_on_host():
            if conversation.on_disk:  # most idle conversations may be there
                continue
            on_disk = True
            for block in self.conversations.keys(conversation):
                if conversation.turns:
                    break
                on_disk &= self.host.on_disk(block)
                yield block
            conversation.on_disk = on_disk and not conversation.turns

    def _idle_on_host(self) -> list[RetainedConversation]:
        idle = (c for c in self.conversations if c.on_host and c.chain and not (c.turns or c.offline))
        return sorted(idle, key=lambda c: c.last_used)

    def _displaceable_by(self, owner: RetainedConversation) -> list[RetainedConversation]:
        """Return the conversations whose host slots `owner` may take: offline work first, then idle ones."""
        there = (c for c in self.conversations if c.on_host and c.chain and c is not owner)
        found = [c for c in there if c.offline or not c.turns]
        return sorted(found, key=lambda c: (not c.offline, c.last_used))

    def take_counts(self) -> Mapping[str, float]:
        with self.lock:
            counts, self.counts = self.counts, Counter()
            return counts
