"""Retention: conversations' blocks stay on the accelerator between turns, softly.

No reference is held: every block stays allocatable, so that nothing can block a running turn. What is
retained is only moved, by public methods of vLLM's block pool, towards the end of its free queue that is used
last.

The eviction order of free blocks: nothing's first, then offline work's, parked conversations', retained
ones', and last what several conversations begin with. Of retained conversations the oldest goes first, and of
one conversation the last block. vLLM takes blocks from one end of its queue, and puts freed ones with a hash
at the other: a conversation's blocks are in order by themselves, what ends, is parked, offline or shared is
not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from kvtransfer.compat.kv_connector import free_queue
from kvtransfer.config import ConnectorConfigError
from kvtransfer.plugins import EngineContext, Match, Plugin, SchedulerSide
from kvtransfer.retention.retained_conversations import (
    EvictionRank,
    RetainedConversation,
    RetainedConversations,
    RetentionPhase,
    block_key,
)
from kvtransfer.shared_state import (
    admitted_now,
    confirmed_blocks,
    is_offline,
    note_what_client_said,
    owner_key,
)

LOOK_AHEAD = 3  # steps that take as much as they can


def in_danger(
    queue: Iterable[Any],
    rank_of: Callable[[Any], EvictionRank],
    window: int,
    above: EvictionRank = EvictionRank.NOTHING,
) -> bool:
    """Whether one of the next `window` blocks to be taken is somebody's, of a rank above this."""
    return any(rank_of(block) > above for block in islice(queue, window))


def rank_of(conversations: RetainedConversations, block: Any) -> EvictionRank:
    if block.block_hash is None:
        return EvictionRank.NOTHING
    return conversations.rank_of(block_key(get_block_hash(block.block_hash), get_group_id(block.block_hash)))


def leading_nobodys(queue: Iterable[Any], rank_of: Callable[[Any], EvictionRank], most: int) -> int:
    """How many of the next `most` blocks to be taken come before the first that is somebody's."""
    nobodys = 0
    for block in islice(queue, most):
        if block.block_hash is not None and rank_of(block) > EvictionRank.NOTHING:
            return nobodys
        nobodys += 1
    return nobodys


def taken_by_running(scheduler_output: Any) -> int:
    """Blocks that a step took for requests that were running before it."""
    taken = filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids)
    return sum(len(group) for groups in taken for group in groups)


def eviction_order(
    conversations: RetainedConversations, block_of: Callable[[bytes, int], Any | None]
) -> list[Any]:
    """The free blocks that are somebody's, in the order in which they go, after all that are nothing's."""
    shared = shared_order(conversations, block_of)
    order: list[Any] = []
    placed = set(map(id, shared))
    # Filled from the end: a block that a turn and an offline request share goes with the turn.
    for conversation in sorted(conversations, key=_staying, reverse=True):
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
    """Its end: the free blocks that several conversations share."""
    found = (block_of(*owned) for owned in conversations.shared)
    return [block for block in found if block is not None and block.ref_cnt == 0]


def _staying(conversation: RetainedConversation) -> tuple[EvictionRank, bool, float]:
    return conversation.rank, conversation.phase is RetentionPhase.RUNNING, conversation.used_at


class RetentionScheduler(SchedulerSide):
    def __init__(self, context: EngineContext) -> None:
        scheduler = context.vllm_config.scheduler_config
        self._residence = context.residence
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        # The most blocks one step can take.
        a_group = -(-scheduler.max_num_batched_tokens // self._block_tokens) + scheduler.max_num_seqs
        self.window = a_group * len(context.groups)
        self._pool: Any = None
        # `changed` of the conversations, and of what they share, when free blocks were last put in order.
        self._ordered_at = self._shared_at = -1
        self._nobodys = 0  # so many of the blocks that are taken next were looked at, and are nobody's
        self._blocks = 0  # of the pool then

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
        with self._residence.lock:
            conversation = self._residence.conversations.begin_turn(
                key, request.block_hashes, is_offline(request)
            )
            note_what_client_said(request, conversation)
            self._residence.requests[request.request_id] = request, conversation

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        self._nobodys = 0  # what a prompt finds in the cache leaves the queue from anywhere
        self._residence.loading.add(request.request_id)
        owned = self._residence.requests.get(request.request_id)
        if owned is not None and not owned[1].offline:
            self._residence.confirmed.append(owned[1].key)

    def order(self, scheduler_output: Any) -> None:
        with self._residence.lock:
            self._residence.loading.difference_update(scheduler_output.num_scheduled_tokens)
            admitted = admitted_now(scheduler_output)
            for request_id in scheduler_output.num_scheduled_tokens:
                owned = self._residence.requests.get(request_id)
                if owned and request_id not in admitted:
                    self._advance(*owned)
            self._nobodys -= taken_by_running(scheduler_output)
            if self._pool.num_gpu_blocks != self._blocks:
                self._nobodys, self._blocks = 0, self._pool.num_gpu_blocks  # it shrank, or grew
            if scheduler_output.preempted_req_ids:
                self._nobodys = 0  # what it took in this step has joined the other end
                self._residence.conversations.freed_strangers()
            self._residence.let_time_pass()
            if self._residence.host.capacity:
                self._relieve()
            self._put_in_order()

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        with self._residence.lock:
            owned = self._residence.requests.pop(request.request_id, None)
            if owned is None:
                self._residence.conversations.freed_strangers()
            else:
                if request.request_id not in self._residence.loading:
                    self._advance(*owned)
                self._residence.conversations.end_turn(owned[1])

    def _advance(self, request: Any, conversation: RetainedConversation) -> None:
        full = confirmed_blocks(request, self._block_tokens)
        if full > len(conversation.chain):
            self._residence.conversations.advance(conversation, request.block_hashes[:full])

    def _relieve(self) -> None:
        conversations = self._residence.conversations
        free = self._pool.get_num_free_blocks()
        kept = len(conversations.owned(EvictionRank.RETAINED)) + len(conversations.shared)
        if free - kept >= self.window or self._nobodys >= self.window:
            return
        if not in_danger(free_queue(self._pool), self._rank_of, self.window, above=EvictionRank.PARKED):
            return  # most steps on a full accelerator: the count below is a pass over all that is retained
        ranked = (one for one in conversations if one.rank is EvictionRank.RETAINED)
        retained = {owned for one in ranked for owned in conversations.blocks(one)}
        blocks = (self._block_of(*owned) for owned in retained.union(conversations.shared))
        retained_free = sum(1 for block in blocks if block is not None and block.ref_cnt == 0)
        self._residence.relieve(self.window - (free - retained_free))

    def _put_in_order(self) -> None:
        """Only when somebody's block is about to be taken and the order may be wrong: it costs a pass. Where
        turns have ended and nothing else, that is one over what is shared."""
        conversations = self._residence.conversations
        changed, shared = conversations.changed, conversations.shared.changed
        if (changed, shared) == (self._ordered_at, self._shared_at):
            return
        if self._nobodys >= self.window:
            return
        # Looked at further than a step may take: as long as nothing is admitted the next ones need not look.
        self._nobodys = leading_nobodys(free_queue(self._pool), self._rank_of, LOOK_AHEAD * self.window)
        if self._nobodys >= min(self.window, self._pool.get_num_free_blocks()):
            return
        self._nobodys = 0
        whole = changed != self._ordered_at
        order = (eviction_order if whole else shared_order)(conversations, self._block_of)
        self._pool.touch(order)
        self._pool.free_blocks(order)
        self._ordered_at, self._shared_at = changed, shared
        self._residence.counts["reordered_blocks"] += len(order)

    def _rank_of(self, block: Any) -> EvictionRank:
        return rank_of(self._residence.conversations, block)

    def _block_of(self, block_hash: bytes, group: int) -> Any | None:
        found = self._pool.get_cached_block(block_hash, [group])
        return found[0] if found else None

    def reset(self) -> None:
        self._residence.reset()

    def take_counts(self) -> Mapping[str, float]:
        return self._residence.take_counts()


class RetentionPlugin(Plugin):
    name = "retention"
    scheduler = RetentionScheduler
