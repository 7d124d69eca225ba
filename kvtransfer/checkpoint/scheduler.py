"""Scheduler side of the checkpoint: decides which blocks are copied to the host, and which are loaded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT, BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.checkpoint.disk_moves import DiskMoves
from kvtransfer.checkpoint.prefetches import Prefetches
from kvtransfer.plugins import LATER, EngineContext, Match, SchedulerSide, StepOutcome
from kvtransfer.request_facts import confirmed_blocks, is_offline
from kvtransfer.retention.retained_conversations import RetainedConversation, block_key

NOWHERE = -1
STORES_A_STEP = 512  # most blocks stored in a step, except of ended turns; bounds what copies hold


class CheckpointScheduler(SchedulerSide):
    """Scheduler side of the checkpoint. It runs after the retention plugin, which updates the chains."""

    hit_source = "host"

    def __init__(self, context: EngineContext) -> None:
        self._kv_state = context.kv_state
        self._kv_state.holders.references["checkpoint"] = self.copying_block_ids
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._ranks = int(context.vllm_config.parallel_config.world_size)
        self._groups = context.groups
        self._manager: Any = None
        self._pool: Any = None
        self._next = CheckpointOrder()
        self._was_beside_step = False  # as of the last order
        self._owned: dict[str, tuple[Any, RetainedConversation]] = {}  # request and conversation, by id
        self._visited: dict[str, int] = {}  # request -> how many first blocks have a slot or need none
        self._behind: dict[str, None] = {}  # requests with full blocks that could not be stored in their step
        self._late: dict[str, int] = {}  # idle conversation -> first block that may lack a slot
        self.copying: dict[int, Any] = {}  # slot -> block that we reference until it is copied
        self._stored: Counter[int] = Counter()  # slot -> number of ranks that ended the copy
        self._loading: dict[str, list[int]] = {}  # request -> slots
        self._arriving: dict[str, set[bytes]] = {}  # request -> keys of the blocks that it loads
        self._counts: Counter[str] = Counter()
        # Set by the engine's scheduler before each step, because loads take blocks without asking it.
        self.offline_may_start = True
        self.prefetches = Prefetches(context)
        self._disk_moves = DiskMoves(context.kv_state, self._ranks)
        context.commands["prefetch"] = self.prefetches.ask

    def copying_block_ids(self) -> list[int]:
        return [block.block_id for block in self.copying.values()]

    def bind(self, manager: Any) -> None:
        self._manager = manager
        self._pool = self.prefetches.pool = manager.block_pool

    def on_new_request(self, request: Any) -> None:
        if owned := self._kv_state.requests.get(request.request_id):
            self._owned[request.request_id] = owned

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        """Return how much of a request's KV the host has, or `LATER` if that KV is being loaded already.

        The last token of a request is always computed.
        """
        if is_offline(request) and not self.offline_may_start:
            return None
        blocks = self.restorable_blocks(request, computed_tokens)
        if blocks and self._on_its_way(request, computed_tokens // self._block_tokens):
            return LATER
        return Match(blocks * self._block_tokens, background=True) if blocks else None

    def _on_its_way(self, request: Any, block: int) -> bool:
        """Return whether a prefetch or another request already loads the block with this index."""
        keys = {block_key(request.block_hashes[block], number) for number in range(len(self._groups))}
        return any(keys & arriving for arriving in (*self._arriving.values(), self.prefetches.arriving))

    def restorable_blocks(self, request: Any, computed_tokens: int) -> int:
        """Return how many of the request's blocks after `computed_tokens` can be loaded from the host."""
        start = computed_tokens // self._block_tokens
        end = int(min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes)))
        with self._kv_state.lock:
            return self._kv_state.host.restorable_end(self._groups, request.block_hashes, start, end) - start

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        self._visited.pop(request.request_id, None)
        self._behind.pop(request.request_id, None)  # its prefix hits are confirmed after this step
        if match is None:
            return
        count = match.tokens // self._block_tokens
        places: list[tuple[int, bytes]] = []  # block id, and the key of what it will hold
        for number, (group, ids) in enumerate(zip(self._groups, blocks.get_block_ids(), strict=True)):
            end = len(ids)  # a background load is allocated exactly what it loads
            first = max(end - count, group.first_kept(end))
            keys = (block_key(one, number) for one in request.block_hashes[first:end])
            places += zip(ids[first:], keys, strict=True)
        with self._kv_state.lock:
            slots = [self._kv_state.host.begin_load(key) for _, key in places]
        # A block released since `match` has no slot: its load fails the check, and it is computed.
        copies = [
            BlockCopy(block, slot.number, slot.generation) if slot else BlockCopy(block, NOWHERE, 0)
            for (block, _), slot in zip(places, slots, strict=True)
        ]
        self._next.loads.append(BlockLoad(request.request_id, copies))
        self._loading[request.request_id] = [slot.number for slot in slots if slot]
        self._arriving[request.request_id] = {key for _, key in places}

    def order(self, scheduler_output: Any) -> CheckpointOrder | None:
        with self._kv_state.lock:
            behind, self._behind = self._behind, {}
            for request_id in behind | dict.fromkeys(self._kv_state.growing):
                owned = self._owned.get(request_id)
                if owned and request_id in scheduler_output.num_scheduled_tokens:
                    self._store(*owned, None)
                elif owned:
                    self._behind[request_id] = None
            if self._may_store_late():
                self._store_late()
            may_load = self.offline_may_start and not self._kv_state.kv_io_suspended
            if (load := self.prefetches.begin_next(may_load)) is not None:
                self._next.loads.append(load)
            self._next.moves = self._disk_moves.begin()
        order, self._next = self._next, CheckpointOrder()
        order.beside_step = bool(scheduler_output.num_scheduled_tokens)
        if not order and (order.beside_step == self._was_beside_step or not self._copies_go_on()):
            return None
        self._was_beside_step = order.beside_step
        return order

    def _copies_go_on(self) -> bool:
        moving = self._kv_state.host.moving
        return bool(self._loading or self.copying or self.prefetches.arriving or moving)

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        owned = self._owned.pop(request.request_id, None)
        if owned is not None and request.request_id not in self._kv_state.loads.loading:
            with self._kv_state.lock:
                self._store(*owned, block_ids)
                if not owned[1].turns and owned[1].lacking:
                    self._late[owned[1].key] = 0
        self._visited.pop(request.request_id, None)

    def _store(
        self, request: Any, conversation: RetainedConversation, block_ids: Sequence[list[int]] | None
    ) -> None:
        """Schedule copies to the host of the request's full blocks whose KV is certainly computed.

        The request's own hashes are used, because the conversation's chain may be a concurrent turn's.
        """
        hashes = request.block_hashes
        at = self._visited.get(request.request_id, 0)
        end = confirmed_blocks(request, self._block_tokens)
        if at >= end or not conversation.on_host:
            return
        if self._kv_state.kv_io_suspended:
            self._behind[request.request_id] = None
            return
        ids = block_ids if block_ids is not None else self._manager.get_block_ids(request.request_id)
        end = min(end, *map(len, ids))
        most = STORES_A_STEP if block_ids is None else sum(map(len, ids))
        while at < end and len(self._next.stores) < most:
            of_groups = [(block_key(hashes[at], number), group[at]) for number, group in enumerate(ids)]
            if not all(self._begin_store(key, block, conversation) for key, block in of_groups):
                self._counts["host_full"] += 1
                break
            at += 1
        self._visited[request.request_id] = at
        if at < end and block_ids is None:
            self._behind[request.request_id] = None

    def _may_store_late(self) -> bool:
        return bool(self._late and self._kv_state.host.free and not self._kv_state.kv_io_suspended)

    def _store_late(self) -> None:
        """Store blocks of idle conversations that found no free slot when their turns ended."""
        for key, at in list(self._late.items()):
            conversation = self._kv_state.conversations.get(key)
            if conversation is None or conversation.turns or not conversation.lacking:
                del self._late[key]
                continue
            chain = conversation.chain
            firsts = [group.first_kept(len(chain)) for group in self._groups]
            while at < len(chain) and len(self._next.stores) < STORES_A_STEP:
                found = (
                    (block_key(chain[at], number), self._pool.get_cached_block(chain[at], [number]))
                    for number, first in enumerate(firsts)
                    if at >= first
                )
                if not all(
                    self._begin_store(key, one[0].block_id, conversation) for key, one in found if one
                ):
                    break
                at += 1
            self._late[key] = at
            if at < len(chain):
                return
            del self._late[key]

    def _begin_store(self, key: bytes, block_id: int, conversation: RetainedConversation) -> bool:
        """Order the copy of a block that is wanted on the host; return False if no slot is free."""
        if not self._is_wanted(key) or (block := self._pool.blocks[block_id]).is_null:
            return True
        slot = self._kv_state.claim_host_slot(key, conversation)
        if slot is None:
            return False
        self._pool.touch([block])
        self.copying[slot.number] = block
        self._next.stores.append(BlockCopy(block_id, slot.number, slot.generation))
        return True

    def _is_wanted(self, block: bytes) -> bool:
        wanted = self._kv_state.conversations.wanted_on_host(block)
        return wanted and block not in self._kv_state.host

    def on_outcome(self, outcome: StepOutcome) -> None:
        with self._kv_state.lock:
            for request_id in outcome.loaded & self._loading.keys():
                slots = self._loading.pop(request_id)
                del self._arriving[request_id]
                for slot in slots:
                    self._kv_state.host.end_load(slot)
                    self._counts["disk_restored_blocks"] += slot >= FIRST_DISK_SLOT
                self._counts["restored_blocks"] += len(slots)
                self._counts["restores"] += 1
            if outcome.report is not None:
                self._end_stores(outcome.report.stored)
                self._counts += self._disk_moves.on_report(outcome.report.moved, outcome.report.unmoved)
                if restored := self.prefetches.on_report(outcome.report.prefetched, outcome.report.unfilled):
                    self._counts["restored_blocks"] += restored
                    self._counts["restores"] += 1
                self._drop("corrupt_blocks", outcome.report.corrupt)
                self._drop("failed_copies", outcome.report.failed)

    def _drop(self, cause: str, slots: set[int]) -> None:
        for slot in slots - {NOWHERE}:
            self._kv_state.host.drop_slot(slot)
            self._counts[cause] += 1

    def _end_stores(self, stored: Counter[int]) -> None:
        self._stored.update(stored)
        done = [slot for slot in stored if self._stored[slot] >= self._ranks]
        for slot in done:
            del self._stored[slot]
            self._kv_state.host.end_store(slot)
        if done:
            self._pool.free_blocks([self.copying.pop(slot) for slot in done])
            self._counts["stored_blocks"] += len(done)

    def saved_blocks(self, request_id: str) -> int:
        """Return how many leading blocks of a request are on the host or on their way there."""
        owned = self._owned.get(request_id)
        return self._visited.get(request_id, 0) if owned is None or owned[1].on_host else 0

    def needs_step(self) -> bool:
        moving = self._kv_state.moves_to_disk and bool(self._late) and self._kv_state.host.moving > 0
        return self.prefetches.pending or self._may_store_late() or moving

    def reset(self) -> None:
        with self._kv_state.lock:
            self.prefetches.reset()

    def take_counts(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts
