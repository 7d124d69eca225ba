"""Retention: keeps conversations' blocks on the accelerator between turns by ordering their eviction.

No reference is held. Every block stays allocatable, so that retention cannot block a running turn. Retained
blocks are only moved, by public methods of vLLM's block pool, to the end of its free queue that is taken
last.

Free blocks are evicted in this order: blocks without an owner, blocks of offline work, of parked
conversations, of retained ones, and last the prefixes that several conversations share. Of retained
conversations the oldest is evicted first, and of one conversation the last block. vLLM takes blocks from one
end of its queue and appends freed ones with a hash to the other, so a conversation's blocks are in order by
themselves. Blocks that change their rank are not: conversations that end, are parked or are offline, and
shared prefixes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from kvtransfer.compat.kv_connector import free_queue
from kvtransfer.config import ConnectorConfigError
from kvtransfer.control.control_socket import EngineCommand, Reply
from kvtransfer.growing_requests import GrowingRequests
from kvtransfer.plugins import EngineContext, Match, Plugin, SchedulerSide
from kvtransfer.request_facts import (
    admitted_now,
    apply_client_hints,
    confirmed_blocks,
    depends_on_tokens_only,
    is_offline,
    owner_key,
)
from kvtransfer.retention.retained_conversations import (
    EvictionRank,
    RetainedConversation,
    RetainedConversations,
    RetentionPhase,
    block_key,
)

LOOK_AHEAD = 3  # in steps that take as many blocks as they can


def in_danger(
    queue: Iterable[Any],
    rank_of: Callable[[Any], EvictionRank],
    window: int,
    above: EvictionRank = EvictionRank.NOTHING,
) -> bool:
    """Return whether one of the next `window` blocks in the queue has a rank above `above`."""
    return any(rank_of(block) > above for block in islice(queue, window))


def rank_of(conversations: RetainedConversations, block: Any) -> EvictionRank:
    if block.block_hash is None:
        return EvictionRank.NOTHING
    return conversations.rank_of(block_key(get_block_hash(block.block_hash), get_group_id(block.block_hash)))


def leading_unowned(queue: Iterable[Any], rank_of: Callable[[Any], EvictionRank], most: int) -> int:
    """Count the blocks without an owner at the head of the queue, up to `most`."""
    unowned = 0
    for block in islice(queue, most):
        if block.block_hash is not None and rank_of(block) > EvictionRank.NOTHING:
            return unowned
        unowned += 1
    return unowned


def taken_by_running(scheduler_output: Any) -> int:
    """Count the blocks that a step took for requests that were already running."""
    taken = filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids)
    return sum(len(group) for groups in taken for group in groups)


def eviction_order(
    conversations: RetainedConversations, block_of: Callable[[bytes, int], Any | None]
) -> list[Any]:
    """Return the free blocks that have an owner, in eviction order."""
    shared = shared_order(conversations, block_of)
    order: list[Any] = []
    placed = set(map(id, shared))
    # Filled from the end, so that a block shared by a turn and an offline request has the turn's place.
    for conversation in sorted(conversations, key=_retention_order, reverse=True):
        for owned in conversations.blocks(conversation):
            block = block_of(*owned)
            if block is not None and block.ref_cnt == 0 and id(block) not in placed:
                placed.add(id(block))
                order.append(block)
    order.reverse()
    return order + shared


def shared_order(
    conversations: RetainedConversations, block_of: Callable[[bytes, int], Any | None]
) -> list[Any]:
    """Return the free blocks that several conversations share, in eviction order."""
    found = (block_of(*owned) for owned in conversations.shared)
    return [block for block in found if block is not None and block.ref_cnt == 0]


def _retention_order(conversation: RetainedConversation) -> tuple[EvictionRank, bool, float]:
    return conversation.rank, conversation.phase is RetentionPhase.RUNNING, conversation.used_at


class RetentionScheduler(SchedulerSide):
    """Tracks which conversation owns which blocks, and keeps the free queue in eviction order."""

    def __init__(self, context: EngineContext) -> None:
        scheduler = context.vllm_config.scheduler_config
        self._kv_state = context.kv_state
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        a_group = -(-scheduler.max_num_batched_tokens // self._block_tokens) + scheduler.max_num_seqs
        self.window = a_group * len(context.groups)  # the most blocks that one step can take
        self._pool: Any = None
        self._growing = GrowingRequests(self._block_tokens)
        # `changed` of the conversations and of shared blocks when free blocks were last put in order.
        self._ordered_at = self._shared_at = -1
        self._unowned = 0  # blocks at the head of the queue that are known to have no owner
        self._blocks = 0  # size of the pool when that was counted
        if context.config.own_transfer:
            context.commands["tokens"] = self.tokens_of

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool
        if self._pool.hash_block_size != self._block_tokens:
            raise ConnectorConfigError(
                f"blocks of {self._block_tokens} tokens are hashed by {self._pool.hash_block_size}: "
                "start the engine without a separate hash block size"
            )

    def on_new_request(self, request: Any) -> None:
        key = owner_key(request)
        if key is None:
            return
        with self._kv_state.lock:
            conversation = self._kv_state.conversations.begin_turn(
                key, request.block_hashes, is_offline(request)
            )
            apply_client_hints(request, conversation)
            self._kv_state.requests[request.request_id] = request, conversation

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        self._unowned = 0  # blocks that a prompt finds in the cache leave the queue anywhere
        self._kv_state.loads.loading.add(request.request_id)
        owned = self._kv_state.requests.get(request.request_id)
        if owned is not None and not owned[1].offline:
            self._kv_state.changes.confirmed.append(owned[1].key)

    def order(self, scheduler_output: Any) -> None:
        with self._kv_state.lock:
            if self._kv_state.loads.loading:
                self._kv_state.loads.loading.difference_update(scheduler_output.num_scheduled_tokens)
            admitted = admitted_now(scheduler_output)
            growing = self._growing.of_step(scheduler_output, self._kv_state.requests)
            self._kv_state.growing = [one for one in growing if one not in admitted]
            for request_id in self._kv_state.growing:
                self._advance(*self._kv_state.requests[request_id])
            self._unowned -= taken_by_running(scheduler_output)
            if self._pool.num_gpu_blocks != self._blocks:
                self._unowned, self._blocks = 0, self._pool.num_gpu_blocks  # the pool shrank or grew
            if scheduler_output.preempted_req_ids:
                self._unowned = 0  # its blocks have joined the other end
                self._kv_state.conversations.order_changed()
            self._kv_state.park_and_expire()
            if self._kv_state.host.capacity:
                self._relieve()
            self._put_in_order()

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        with self._kv_state.lock:
            owned = self._kv_state.requests.pop(request.request_id, None)
            if owned is None:
                self._kv_state.conversations.order_changed()
            else:
                if request.request_id not in self._kv_state.loads.loading:
                    self._advance(*owned)
                owned[1].tokens = request.all_token_ids if depends_on_tokens_only(request) else ()
                owned[1].salt = request.cache_salt or ""
                self._kv_state.conversations.end_turn(owned[1])

    def tokens_of(self, command: EngineCommand) -> Reply:
        """Return the tokens of an idle conversation, so that it can be moved to another engine."""
        with self._kv_state.lock:
            conversation = self._kv_state.conversations.get(command.conversation)
            if conversation is None or conversation.turns or not conversation.tokens:
                return Reply(done=False)
            return Reply(done=True, tokens=tuple(conversation.tokens), salt=conversation.salt)

    def _advance(self, request: Any, conversation: RetainedConversation) -> None:
        full = confirmed_blocks(request, self._block_tokens)
        if full > len(conversation.chain):
            self._kv_state.conversations.advance(conversation, request.block_hashes[:full])

    def _relieve(self) -> None:
        conversations = self._kv_state.conversations
        free = self._pool.get_num_free_blocks()
        kept = len(conversations.owned(EvictionRank.RETAINED)) + len(conversations.shared)
        if free - kept >= self.window or self._unowned >= self.window:
            return
        if not in_danger(free_queue(self._pool), self._rank_of, self.window, above=EvictionRank.PARKED):
            return  # most steps on a full accelerator: the count below visits all retained blocks
        ranked = (one for one in conversations if one.rank is EvictionRank.RETAINED)
        retained = {owned for one in ranked for owned in conversations.blocks(one)}
        blocks = (self._block_of(*owned) for owned in retained.union(conversations.shared))
        retained_free = sum(1 for block in blocks if block is not None and block.ref_cnt == 0)
        self._kv_state.park_for_pressure(self.window - (free - retained_free))

    def _put_in_order(self) -> None:
        """Reorder the free blocks if the order is stale and a block with an owner is about to be taken.

        Ordering visits all owned blocks, or only the shared ones if nothing but the ends of turns changed.
        """
        conversations = self._kv_state.conversations
        changed, shared = conversations.changed, conversations.shared.changed
        if (changed, shared) == (self._ordered_at, self._shared_at):
            return
        if self._unowned >= self.window:
            return
        # Counted further than one step can take, so that the next steps need not count again.
        self._unowned = leading_unowned(free_queue(self._pool), self._rank_of, LOOK_AHEAD * self.window)
        if self._unowned >= min(self.window, self._pool.get_num_free_blocks()):
            return
        self._unowned = 0
        whole = changed != self._ordered_at
        order = (eviction_order if whole else shared_order)(conversations, self._block_of)
        self._pool.touch(order)
        self._pool.free_blocks(order)
        self._ordered_at, self._shared_at = changed, shared
        self._kv_state.counts["reordered_blocks"] += len(order)

    def _rank_of(self, block: Any) -> EvictionRank:
        return rank_of(self._kv_state.conversations, block)

    def _block_of(self, block_hash: bytes, group: int) -> Any | None:
        found = self._pool.get_cached_block(block_hash, [group])
        return found[0] if found else None

    def reset(self) -> None:
        self._kv_state.reset()

    def take_counts(self) -> Mapping[str, float]:
        return self._kv_state.take_counts()


class RetentionPlugin(Plugin):
    name = "retention"
    scheduler = RetentionScheduler
