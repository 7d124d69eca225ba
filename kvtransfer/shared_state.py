"""What the plugins of one engine's scheduler side share: conversations, host slots, and one lock over both.

The lock is for the feed's thread, which releases and lets time pass while the engine is idle and its
scheduler sleeps. Everything here is bookkeeping; what it means for blocks happens in the next step.

The index of host memory says which block is in which slot. A slot is free, storing (a copy to it is under
way), or stored, and then perhaps being copied back by one or more loads. A block that leaves while a copy
touches its slot gives the slot back when the copy ends. `block_faults` and `host_faults` are what an idle
engine checks.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from math import inf
from typing import Any

from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import (
    FirstKept,
    RetainedConversation,
    RetainedConversations,
    RetentionPhase,
    all_kept,
    block_key,
)
from placement.engines import SplitState

logger = logging.getLogger("conserve.kvtransfer.residence")


class SlotState(StrEnum):
    STORING = "storing"
    STORED = "stored"


@dataclass(slots=True)
class Slot:
    number: int
    generation: int  # of the slot's contents: a copy ordered for other contents is refused
    block: bytes
    state: SlotState = SlotState.STORING
    loads: int = 0  # copies back to the accelerator under way
    dropped: bool = False  # nobody finds it any more; free once no copy touches it

    @property
    def done(self) -> bool:
        return self.dropped and not self.loads and self.state is SlotState.STORED


class HostIndex:
    def __init__(self, slots: int) -> None:
        self.capacity = slots
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, Slot] = {}
        self._by_block: dict[bytes, Slot] = {}
        self._generations = count(1)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots whose block can be found, or will be when its copy ends."""
        return len(self._by_block)

    def __contains__(self, block: bytes) -> bool:
        return block in self._by_block

    def stored(self, block: bytes) -> bool:
        slot = self._by_block.get(block)
        return slot is not None and slot.state is SlotState.STORED

    def stored_prefix(self, chain: list[bytes], start: int, end: int, group: int = 0) -> int:
        """How many blocks from `start` on are stored without a gap."""
        at = start
        while at < end and self.stored(block_key(chain[at], group)):
            at += 1
        return at - start

    def begin_store(self, block: bytes) -> Slot | None:
        """A slot to copy the block to; None when there is none."""
        if not self._free:
            return None
        slot = Slot(self._free.pop(), next(self._generations), block)
        self._slots[slot.number] = self._by_block[block] = slot
        return slot

    def end_store(self, number: int) -> None:
        slot = self._slots[number]
        slot.state = SlotState.STORED
        self._free_if_done(slot)

    def begin_load(self, block: bytes) -> Slot | None:
        """None when the block has left meanwhile."""
        slot = self._by_block.get(block)
        if slot is not None:
            slot.loads += 1
        return slot

    def end_load(self, number: int) -> None:
        slot = self._slots[number]
        slot.loads -= 1
        self._free_if_done(slot)

    def drop(self, block: bytes) -> None:
        """Not wanted any more, or found to be corrupt."""
        slot = self._by_block.pop(block, None)
        if slot is not None:
            slot.dropped = True
            self._free_if_done(slot)

    def drop_slot(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is not None and not slot.dropped:
            self.drop(slot.block)

    def faults(self) -> list[str]:
        """What should not be: nothing, unless slots leak."""
        found = [f"slot {s.number} is dropped, idle, and not free" for s in self._slots.values() if s.done]
        if len(self._free) + len(self._slots) != self.capacity:
            found.append(f"{self.capacity} slots, but {len(self._free)} free and {len(self._slots)} used")
        states = Counter(slot.block for slot in self._slots.values() if not slot.dropped)
        found += [f"a block is in {slots} slots" for slots in states.values() if slots > 1]
        return found

    def blocks(self) -> list[bytes]:
        return list(self._by_block)

    def _free_if_done(self, slot: Slot) -> None:
        if slot.done:
            del self._slots[slot.number]
            self._free.append(slot.number)


def block_faults(
    blocks: Sequence[Any], free_blocks: int, references: Mapping[str, Iterable[int]]
) -> list[str]:
    """References no holder accounts for, and the other way round. `references`: block ids by holder."""
    held: Counter[int] = Counter()
    for ids in references.values():
        held.update(ids)
    found = [
        f"block {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} of them accounted for"
        for block in blocks
        if not block.is_null and block.ref_cnt != held[block.block_id]
    ]
    free = sum(1 for block in blocks if not block.is_null and block.ref_cnt == 0)
    if free != free_blocks:
        found.append(f"{free} blocks have no reference, but {free_blocks} are in the free queue")
    return found


def host_faults(host: HostIndex, conversations: RetainedConversations) -> list[str]:
    orphans = [block for block in host.blocks() if not conversations.wanted_on_host(block)]
    return host.faults() + ([f"{len(orphans)} host slots belong to nobody"] if orphans else [])


class Residence:
    def __init__(
        self,
        config: ConnectorConfig,
        host_slots: int,
        clock: Callable[[], float],
        groups: Sequence[FirstKept] = (all_kept,),
    ) -> None:
        self._config = config
        self.clock = clock
        self.lock = threading.RLock()
        self.host = HostIndex(host_slots)
        self.conversations = RetainedConversations(clock, self.host.drop, groups)
        self.requests: dict[str, tuple[Any, RetainedConversation]] = {}  # requests with a conversation, by id
        self.loading: set[str] = set()  # requests with blocks but no step yet: KV may be on its way
        self.loaded: set[str] = set()  # of these, the ones whose KV is there
        self.departing: set[str] = set()  # ended requests whose blocks vLLM holds until their load ends
        self.held_by_others: set[str] = set()  # ended requests whose blocks another connector holds
        self.confirmed: list[str] = []  # conversations that got blocks since the last report
        self.parked: list[str] = []  # conversations parked since the last report
        self.unparked: list[str] = []  # parked conversations that left the host since
        self.draining = False
        self.fenced = False  # no KV comes from elsewhere or goes there: layers are shared with another engine
        self.split: SplitState | None = None
        # Who holds references on blocks, for the integrity check: block ids, one a reference.
        self.references: dict[str, Callable[[], Iterable[int]]] = {}
        # Of those, the ones that the engine's next step ends: an idle engine still has them.
        self.ending: dict[str, Callable[[], Iterable[int]]] = {}
        self.counts: Counter[str] = Counter()

    @property
    def at_rest(self) -> bool:
        """No KV is on its way to blocks or from them, also of requests that ended meanwhile."""
        held = any(any(True for _ in ids()) for ids in self.references.values())
        return not (self.loading - self.loaded or self.departing or held)

    def release(self, key: str, cause: str = "released") -> bool:
        """The conversation ends; its blocks and slots are nobody's from now on."""
        with self.lock:
            known = self.conversations.end(key)
            if known:
                self.counts[f"ended.{cause}"] += 1
            return known

    def park(self, key: str) -> bool:
        """Whether the conversation is parked now: a retained one can be when the host has all of it."""
        with self.lock:
            conversation = self.conversations.get(key)
            if conversation is None or conversation.phase is RetentionPhase.RUNNING:
                return False
            if conversation.phase is RetentionPhase.RETAINED:
                if not self.on_host(conversation):
                    return False
                self._park(conversation, "pressure")
            return True

    def _park(self, conversation: RetainedConversation, cause: str) -> None:
        self.conversations.park(conversation)
        self.counts[f"parked.{cause}"] += 1
        self.parked.append(conversation.key)

    def on_host(self, conversation: RetainedConversation) -> bool:
        return all(map(self.host.stored, self.conversations.keys(conversation)))

    def _reaches_host(self, conversation: RetainedConversation) -> bool:
        """There or on its way: a sleeping engine hears of the ends of its last copies with its next step.
        Until then they hold their blocks, so that nothing is lost by parking."""
        return all(block in self.host for block in self.conversations.keys(conversation))

    def drain(self, draining: bool) -> None:
        """A draining engine retains nothing: what is idle is forgotten, and what runs when its turn ends."""
        with self.lock:
            self.draining = draining

    def let_time_pass(self) -> None:
        """Parks and forgets what was idle for long enough."""
        with self.lock:
            now = self.clock()
            if self.draining:
                for conversation in self.conversations.idle_since(now):
                    self.release(conversation.key, "drained")
            for conversation in self.conversations.idle_since(now):
                idle_s, said = now - conversation.last_used, conversation.park_after_s
                park_after_s = self._config.park_after_s if said is None else said
                ttl_s = conversation.ttl_s or self._config.ttl_s
                if ttl_s is not None and idle_s >= ttl_s:
                    self.release(conversation.key, "ttl")
                elif conversation.phase is not RetentionPhase.RETAINED or now < conversation.kept_until:
                    continue
                elif idle_s >= park_after_s and self._reaches_host(conversation):
                    late = conversation.kept_until > -inf
                    self._park(conversation, "late" if late else "idle" if said is None else "said")

    def relieve(self, missing_blocks: int) -> None:
        """Pressure: parks retained conversations, the oldest first, until so many blocks may go."""
        for conversation in self.conversations.retained_oldest_first():
            if missing_blocks <= 0:
                return
            if self.park(conversation.key):
                missing_blocks -= len(self.conversations.keys(conversation))

    def reset(self) -> None:
        """No KV computed so far is valid."""
        with self.lock:
            for conversation in self.conversations:
                self.conversations.advance(conversation, [])
            for block in self.host.blocks():
                self.host.drop(block)

    def host_slot(self, block: bytes, owner: RetainedConversation) -> Slot | None:
        """A slot for a block; other idle conversations leave the host for it, least recently used first."""
        slot = self.host.begin_store(block)
        if slot is not None:
            return slot
        idle = [c for c in self.conversations if not c.turns and c.on_host and c.chain and c is not owner]
        for conversation in sorted(idle, key=lambda c: c.last_used):
            if conversation.phase is RetentionPhase.PARKED:
                self.unparked.append(conversation.key)
                logger.info("conversation %s leaves a full host: its next turn computes", conversation.key)
            self.conversations.leave_host(conversation)
            self.counts["left_host"] += 1
            slot = self.host.begin_store(block)
            if slot is not None:
                return slot
        return None

    def take_counts(self) -> Mapping[str, float]:
        with self.lock:
            counts, self.counts = self.counts, Counter()
            return counts


def is_offline(request: Any) -> bool:
    return bool(request.priority > 0)


def owner_key(request: Any) -> str | None:
    """Whose blocks these are. A prefill leg's are nobody's here: the conversation lives on its decoder."""
    if is_offline(request):
        return f"offline:{request.request_id}"
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return None
    return str(request.session_id) if request.session_id else None


def note_what_client_said(request: Any, conversation: RetainedConversation) -> None:
    """How long its KV stays where, checked and bounded by the gateway (router/requests/body_parser.py)."""
    said = (request.kv_transfer_params or {}).get("conversation") or {}
    conversation.park_after_s = said.get("park_after_s")
    conversation.ttl_s = said.get("ttl_s", conversation.ttl_s)


def confirmed_blocks(request: Any, block_tokens: int) -> int:
    """Full blocks whose KV is certainly there; a step under way may still be rolled back.

    Not for a request whose background load runs: vLLM counts what is on its way as computed.
    """
    confirmed = request.num_computed_tokens - request.num_in_flight_tokens
    return int(min(max(confirmed, 0) // block_tokens, len(request.block_hashes)))


def admitted_now(scheduler_output: Any) -> set[str]:
    """Requests that entered the batch with this step.

    Their prefix hits may be blocks that another request of this very step has yet to compute: vLLM registers
    blocks before they are computed. From the next step on they are confirmed, or rolled back.
    """
    new = {str(request.req_id) for request in scheduler_output.scheduled_new_reqs}
    return new.union(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
