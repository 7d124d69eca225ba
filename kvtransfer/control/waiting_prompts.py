"""Counts the prompt tokens and the KV that waiting turns still need, for the engine's state report."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import (
    CacheGroup,
    beside_tokens,
    block_key,
    transferred_tokens,
)


class WaitingPrompts:
    """Tracks how much of each request's prompt was cached when it arrived."""

    def __init__(
        self,
        kv_state: SharedKvState,
        groups: Sequence[CacheGroup],
        block_tokens: int,
        idle_kv_evictable: bool,
    ) -> None:
        self._kv_state, self._groups, self._block_tokens = kv_state, groups, block_tokens
        self._idle_kv_evictable = idle_kv_evictable
        full = [number for number, group in enumerate(groups) if not group.window]
        self._full = full[0] if full else 0  # the group by which prefixes are looked up
        self.kv_per_token = max(1, len(full))
        self.kv_per_conversation = beside_tokens(groups) if full else 0
        self._held: dict[str, int] = {}  # by request: what `_held_tokens` returned when it arrived
        # By request, until it has blocks: tokens of its prompt whose KV was here or on its way when the
        # request arrived. Once it has blocks, vLLM counts these tokens, without those that failed to arrive.
        self._found: dict[str, int] = {}
        self._allocated: set[str] = set()  # requests that got blocks since the end of the last step
        self._pool: Any = None
        self._manager: Any = None

    def bind(self, manager: Any) -> None:
        self._manager, self._pool = manager, manager.block_pool

    def arrived(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            found = transferred_tokens(self._groups, int(request.num_prompt_tokens))
        else:
            found = self._found_tokens(request)
        self._found[request.request_id] = found
        self._held[request.request_id] = self._held_tokens(request)

    def allocated(self, request_id: str) -> None:
        self._allocated.add(request_id)

    def preempted(self, request: Any) -> None:
        self._found[request.request_id] = self._found_tokens(request)

    def step_ended(self) -> None:
        for request_id in self._allocated:
            self._found.pop(request_id, None)
        self._allocated.clear()

    def finished(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._held.pop(request_id, None)

    def tokens_to_compute(self, request: Any) -> int:
        """Return how many prompt tokens an online request still has to compute before its first token."""
        if request.priority > 0 or request.num_output_tokens:
            return 0
        found = max(request.num_computed_tokens, self._found.get(request.request_id, 0))
        return int(max(0, request.num_prompt_tokens - found))

    def missing_kv_tokens(self, request: Any) -> int:
        """Return how many more tokens of KV a waiting online request needs before it can run."""
        if request.priority > 0 or (request.num_output_tokens and request.status == RequestStatus.RUNNING):
            return 0
        has = self.blocks_of([request]) * self._block_tokens or self._held.get(request.request_id, 0)
        return int(max(0, request.num_tokens * self.kv_per_token + self.kv_per_conversation - has))

    def blocks_of(self, requests: Sequence[Any]) -> int:
        """Return how many blocks these requests hold, without vLLM's null block (block 0)."""
        ids = (self._manager.get_block_ids(request.request_id) for request in requests)
        return sum(1 for groups in ids for group in groups for block in group if block)

    def _held_tokens(self, request: Any) -> int:
        """Return how much of the request's KV, in tokens, is in use or may not be evicted."""
        blocks = 0
        for block in request.block_hashes:
            found = self._pool.get_cached_block(block, [self._full])
            if not found:
                break
            on_host = self._kv_state.host.stored(block_key(block, self._full))
            if not found[0].ref_cnt and (self._idle_kv_evictable or on_host):
                break
            blocks += 1
        return blocks * self._block_tokens * self.kv_per_token

    def _found_tokens(self, request: Any) -> int:
        """Return how many tokens of the request have KV on the accelerator or on the host."""
        chain = request.block_hashes
        blocks = self._kv_state.host.restorable_end(self._groups, chain, 0, len(chain), self._pool)
        return blocks * self._block_tokens
