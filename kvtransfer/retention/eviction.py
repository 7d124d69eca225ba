"""Retention: keeps conversations' blocks on the accelerator between turns by ordering their eviction.

Retention holds no reference on a block. Every block stays allocatable, so that retention cannot delay a
running turn. vLLM's free queue is replaced by one that takes blocks without an owner first, then blocks of
offline work, of parked conversations, of retained ones, and last the prefixes that several conversations
share. Of retained conversations the oldest is evicted first, and of one conversation the last block. No step
visits all blocks: the order is kept up to date where a block is freed or used, and where a conversation
changes.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from kvtransfer.compat.free_queue import take_owned_blocks_last
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
from kvtransfer.retention.owned_blocks import EvictionRank
from kvtransfer.retention.retained_conversations import RetainedConversation

PARKS_EVERY_S = 0.05  # between checks while requests run, because a check visits every conversation


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
        self._parks_at = -inf
        if context.config.own_transfer:
            context.commands["tokens"] = self.tokens_of

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool
        if self._pool.hash_block_size != self._block_tokens:
            raise ConnectorConfigError(
                f"a block has {self._block_tokens} tokens, and vLLM hashes {self._pool.hash_block_size} at a "
                "time: start the engine without a separate hash block size"
            )
        take_owned_blocks_last(self._pool, self._kv_state.conversations.blocks, self._kv_state.lock)

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
            now = self._kv_state.clock()
            # An engine may sleep after a step without requests, so such a step always checks.
            if now >= self._parks_at or not scheduler_output.num_scheduled_tokens:
                self._parks_at = now + PARKS_EVERY_S
                self._kv_state.park_and_expire()
            if self._kv_state.host.capacity:
                self._relieve()

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        with self._kv_state.lock:
            owned = self._kv_state.requests.pop(request.request_id, None)
            if owned is not None:
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
        """Park conversations if one step could otherwise evict KV that is not on the host."""
        free = self._kv_state.conversations.blocks.free
        retained = free[EvictionRank.RETAINED] + free[EvictionRank.SHARED]
        evictable = self._pool.get_num_free_blocks() - retained
        if evictable < self.window:
            self._kv_state.park_for_pressure(self.window - evictable)

    def reset(self) -> None:
        self._kv_state.reset()

    def take_counts(self) -> Mapping[str, float]:
        return self._kv_state.take_counts()


class RetentionPlugin(Plugin):
    name = "retention"
    scheduler = RetentionScheduler
