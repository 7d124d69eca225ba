"""Keep: conversations' blocks stay on the accelerator between turns, softly.

No reference is held: every block stays allocatable, so that nothing can block a running turn. What is kept is
only moved, by public methods of vLLM's block pool, towards the young end of its free queue.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from kvtransfer.config import ConfigError
from kvtransfer.parts import EngineContext, Match, Part, SchedulerHalf, WorkerHalf
from kvtransfer.residence.conversations import Conversation, Rank
from kvtransfer.residence.protection import in_danger, young_end
from kvtransfer.residence.requests import admitted_now, confirmed_blocks, is_offline, owner_key

logger = logging.getLogger("conserve.kvtransfer.keep")


class KeepScheduler(SchedulerHalf):
    def __init__(self, context: EngineContext) -> None:
        scheduler = context.vllm_config.scheduler_config
        self._residence = context.residence
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        # The most blocks one step can take.
        self._window = -(-scheduler.max_num_batched_tokens // self._block_tokens) + scheduler.max_num_seqs
        self._pool: Any = None
        self._ordered_at = -1  # `changed` of the conversations when free blocks were last put in order

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool
        if self._pool.hash_block_size != self._block_tokens:
            raise ConfigError(
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
            self._residence.requests[request.request_id] = request, conversation

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
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
            if scheduler_output.preempted_req_ids:
                self._residence.conversations.freed_strangers()
            self._residence.let_time_pass()
            if self._residence.host.capacity:
                self._relieve()
            self._put_in_order()

    def on_finished(self, request: Any, block_ids: list[int]) -> None:
        with self._residence.lock:
            owned = self._residence.requests.pop(request.request_id, None)
            if owned is None:
                self._residence.conversations.freed_strangers()
            else:
                if request.request_id not in self._residence.loading:
                    self._advance(*owned)
                self._residence.conversations.end_turn(owned[1])

    def _advance(self, request: Any, conversation: Conversation) -> None:
        full = confirmed_blocks(request, self._block_tokens)
        if full > len(conversation.chain):
            self._residence.conversations.advance(conversation, request.block_hashes[:full])

    def _relieve(self) -> None:
        kept = self._residence.conversations.owned(Rank.KEPT)
        free = self._pool.get_num_free_blocks()
        if free - len(kept) >= self._window:
            return
        if not in_danger(self._free_queue(), self._rank_of, self._window, above=Rank.PARKED):
            return  # most steps on a full accelerator: the count below is a pass over all that is kept
        kept_free = sum(1 for block in map(self._block_of, kept) if block is not None and block.ref_cnt == 0)
        self._residence.relieve(self._window - (free - kept_free))

    def _put_in_order(self) -> None:
        """Only when somebody's block is about to be taken and the order may be wrong: it costs a pass."""
        changed = self._residence.conversations.changed
        if changed == self._ordered_at:
            return
        if not in_danger(self._free_queue(), self._rank_of, self._window):
            return
        order = young_end(self._residence.conversations, self._block_of)
        self._pool.touch(order)
        self._pool.free_blocks(order)
        self._ordered_at = changed
        self._residence.counts["reordered_blocks"] += len(order)

    def _free_queue(self) -> Iterator[Any]:
        return iter(self._pool.free_block_queue.iter_blocks_after(None))

    def _rank_of(self, block: Any) -> Rank:
        if block.block_hash is None:
            return Rank.NOTHING
        return self._residence.conversations.rank_of(get_block_hash(block.block_hash))

    def _block_of(self, block_hash: bytes) -> Any | None:
        found = self._pool.get_cached_block(block_hash, [0])
        return found[0] if found else None

    def reset(self) -> None:
        self._residence.reset()

    def take_counts(self) -> Mapping[str, float]:
        return self._residence.take_counts()


class KeepPart(Part):
    name = "keep"

    def scheduler_half(self, context: EngineContext) -> KeepScheduler:
        return KeepScheduler(context)

    def worker_half(self, context: EngineContext, rank: int) -> WorkerHalf:
        return WorkerHalf()
