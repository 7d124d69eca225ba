"""Prefetches: blocks of a parked conversation return to the accelerator before its next turn.

The keeper asks for a prefetch through the control socket. Between two steps, blocks are taken from vLLM's
pool and loaded from the host like those of a waiting request; then they are registered in the prefix cache
and freed. No request takes part, so nothing is computed.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.checkpoint.copy_orders import BlockCopy, BlockLoad
from kvtransfer.compat.block_cache import PREFETCHING, cache_blocks, wake_engine
from kvtransfer.compat.relied_on import verify
from kvtransfer.control.control_socket import EngineCommand, Reply
from kvtransfer.plugins import EngineContext
from kvtransfer.retention.retained_conversations import RetainedConversation, RetentionPhase, block_key


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A requested prefetch that has not begun."""

    left_at: float  # when the conversation's last turn ended: another turn voids the prefetch
    due_in_s: float
    give_up_at: float


@dataclass(slots=True)
class PrefetchLoad:
    """A prefetch whose blocks are being copied."""

    conversation: str
    prefetch: Prefetch
    chain: list[bytes]
    places: list[tuple[int, int]]  # index in the chain and KV cache group of each loaded block
    blocks: list[Any]  # taken from the pool, in the order of `places`
    kept: list[Any]  # cached blocks of the conversation, referenced so that they stay
    slots: list[int]
    ranks_done: int = 0
    unfilled: set[int] = field(default_factory=set)
    void: bool = False  # the prefix cache was reset meanwhile


class Prefetches:
    """Carries out one prefetch at a time. Callers hold the lock of the shared state."""

    def __init__(self, context: EngineContext) -> None:
        verify(PREFETCHING)
        self._state = context.kv_state
        self._groups = context.groups
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._ranks = int(context.vllm_config.parallel_config.world_size)
        self._waiting: dict[str, Prefetch] = {}
        self._load: PrefetchLoad | None = None
        self._may_begin = False  # something changed since the waiting prefetches were last looked at
        self.pool: Any = None
        self._state.holders.references["prefetches"] = self._block_ids

    @property
    def pending(self) -> bool:
        """Return whether the engine has to step for a prefetch, even without requests."""
        return self._load is not None or (bool(self._waiting) and self._may_begin)

    @property
    def arriving(self) -> set[bytes]:
        """Return the keys of the blocks that are being loaded."""
        load = self._load
        return {block_key(load.chain[at], group) for at, group in load.places} if load is not None else set()

    def ask(self, command: EngineCommand) -> Reply:
        """Queue a prefetch. The reply says whether at least half of the KV can be restored.

        Runs in the control socket's thread. An engine that publishes vLLM's KV cache events refuses, because
        the events need tokens and only hashes are known here.
        """
        if self.pool.enable_kv_cache_events:
            return Reply(error="an engine that publishes KV cache events does not prefetch")
        with self._state.lock:
            conversation = self._state.conversations.get(command.conversation)
            if conversation is None or conversation.turns or not self._is_restorable(conversation):
                return Reply(done=False)
            now = self._state.clock()
            prefetch = Prefetch(conversation.last_used, command.due_in_s, now + command.due_in_s)
            self._waiting[conversation.key] = prefetch
            self._may_begin = True
        wake_engine()
        return Reply(done=True)

    def begin_next(self, allowed: bool) -> BlockLoad | None:
        """Begin the first waiting prefetch that fits in free blocks, if it is `allowed`; return its load."""
        if self._load is not None:
            return None
        self._may_begin = False
        for key, prefetch in list(self._waiting.items()):
            conversation = self._state.conversations.get(key)
            if self._is_void(prefetch, conversation):
                del self._waiting[key]
            elif allowed and conversation is not None and (order := self._begin(prefetch, conversation)):
                del self._waiting[key]
                return order
        return None

    def on_report(self, loaded: Counter[str], unfilled: set[int]) -> int:
        """Record what the ranks report of the running prefetch after a step.

        Returns how many blocks the prefetch has restored if it ended with this step, and 0 otherwise.
        """
        load = self._load
        if load is None or not loaded:
            return 0
        load.ranks_done += loaded.total()
        load.unfilled |= unfilled
        if load.ranks_done < self._ranks:
            return 0
        self._load, self._may_begin = None, True
        for slot in load.slots:
            self._state.host.end_load(slot)
        if not load.void:
            self._register(load)
        self.pool.free_blocks([*reversed(load.blocks), *reversed(load.kept)])
        if not (load.void or load.unfilled):
            prefetch = load.prefetch
            self._state.conversations.prefetched(load.conversation, prefetch.left_at, prefetch.due_in_s)
        return len(load.blocks) - len(load.unfilled)

    def reset(self) -> None:
        """Forget all waiting prefetches, and discard the blocks that the running prefetch loads."""
        self._waiting.clear()
        if self._load is not None:
            self._load.void = True

    def _block_ids(self) -> list[int]:
        load = self._load
        return [block.block_id for block in (*load.blocks, *load.kept)] if load is not None else []

    def _is_void(self, prefetch: Prefetch, conversation: RetainedConversation | None) -> bool:
        if conversation is None or conversation.turns or conversation.last_used != prefetch.left_at:
            return True
        late = self._state.clock() > prefetch.give_up_at
        return (
            late or conversation.phase is not RetentionPhase.PARKED or not self._is_restorable(conversation)
        )

    def _is_restorable(self, conversation: RetainedConversation) -> bool:
        """Return whether at least half of the conversation's KV is on the accelerator or the host."""
        chain = conversation.chain
        return bool(chain) and 2 * self._restorable_end(chain) >= len(chain)

    def _restorable_end(self, chain: list[bytes]) -> int:
        return self._state.host.restorable_end(self._groups, chain, 0, len(chain), self.pool)

    def _begin(self, prefetch: Prefetch, conversation: RetainedConversation) -> BlockLoad | None:
        """Take blocks and slots for a prefetch, and return its load; None if the pool lacks free blocks."""
        chain = list(conversation.chain)
        end = self._restorable_end(chain)
        kept: list[Any] = []
        places: list[tuple[int, int]] = []
        for number, group in enumerate(self._groups):
            for at in range(group.first_kept(end), end):
                cached = self.pool.get_cached_block(chain[at], [number])
                if cached:
                    kept += cached
                else:
                    places.append((at, number))
        if len(places) > int(self.pool.get_num_free_blocks()) - sum(1 for one in kept if not one.ref_cnt):
            return None
        self.pool.touch(kept)
        blocks = self.pool.get_new_blocks(len(places))
        found = [self._state.host.begin_load(block_key(chain[at], number)) for at, number in places]
        slots = [slot for slot in found if slot is not None]
        assert len(slots) == len(places)  # the lock is held since `_restorable_end`
        copies = [
            BlockCopy(block.block_id, slot.number, slot.generation)
            for block, slot in zip(blocks, slots, strict=True)
        ]
        numbers = [slot.number for slot in slots]
        self._load = PrefetchLoad(conversation.key, prefetch, chain, places, blocks, kept, numbers)
        return BlockLoad(f"prefetch:{conversation.key}", copies, prefetch=True)

    def _register(self, load: PrefetchLoad) -> None:
        """Register the blocks that a prefetch has filled in vLLM's prefix cache."""
        for number in range(len(self._groups)):
            filled = {
                at: block
                for (at, group), block in zip(load.places, load.blocks, strict=True)
                if group == number and block.block_id not in load.unfilled
            }
            cache_blocks(self.pool, load.chain, filled, self._block_tokens, number)
