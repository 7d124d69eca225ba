"""Snapshot of an engine: its `EngineState`, computed from requests, conversations and the block pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from kvtransfer.config import ConnectorConfig
from kvtransfer.control.control_socket import RecentChanges
from kvtransfer.control.waiting_prompts import WaitingPrompts
from kvtransfer.retention.owned_blocks import EvictionList
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import RetentionPhase
from placement.engines import EngineState
from placement.scheduling.prompt_order import PromptRate


@dataclass(slots=True)
class PromptSpeed:
    """Measured speed at which the engine computes prompts.

    The schedulers in `workers/engine/coserving` set it.
    """

    rate: PromptRate = field(default_factory=PromptRate)
    share: float = 1.0  # share of the engine's time that decoding requests leave to prompts
    long_prompts: int = 0  # iterations with more than a few prompt tokens
    curve: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class IdleBlocks:
    """Counts of the blocks of idle conversations."""

    retained_free: int  # blocks of retained conversations that no request uses
    evictable: int  # those of them that may be evicted without loss
    parked: int  # blocks that only parked conversations own


class EngineSnapshot:
    """Computes the engine's state for the control socket, in the socket's thread."""

    def __init__(
        self, config: ConnectorConfig, kv_state: SharedKvState, prompts: WaitingPrompts, block_tokens: int
    ) -> None:
        self._config, self._kv_state, self._prompts = config, kv_state, prompts
        self._block_tokens = block_tokens
        self.speed = PromptSpeed()
        self.pool: Any = None
        self._seq = 0
        self._confirmed, self._parked, self._unparked = (RecentChanges() for _ in range(3))

    def take(self, requests: Sequence[Any]) -> EngineState:
        """Park and end the conversations that are due, and return the engine's state.

        Sums may be slightly wrong, because a running step may change them while they are computed.
        """
        prompts, tokens = self._prompts, self._block_tokens
        self._kv_state.park_and_expire()
        with self._kv_state.lock:
            offline_blocks = prompts.blocks_of([r for r in requests if r.priority > 0])
            lacking = sum(map(prompts.missing_kv_tokens, requests))
            free = int(self.pool.get_num_free_blocks())
            used = int(self.pool.num_gpu_blocks) - 1 - free
            idle = self._idle_blocks()
            host = self._kv_state.host
            host_used, host_free, disk_used, disk_free = (
                count * tokens for count in (host.used, host.free, host.used_on_disk, host.free_on_disk)
            )
            self._take_changes()
            parked = {key: seq for key, seq in self._parked.all().items() if self._is_parked(key)}
            unparked = {key: seq for key, seq in self._unparked.all().items() if not self._is_parked(key)}
            draining = self._kv_state.draining
        running = [r for r in requests if r.status == RequestStatus.RUNNING]
        offline_running = sum(1 for r in running if r.priority > 0)
        offline = sum(1 for r in requests if r.priority > 0)
        live = max(0, used - offline_blocks) + idle.retained_free
        return EngineState(
            engine=self._config.engine,
            epoch=self._config.epoch,
            seq=self._seq,
            live_tokens=live * tokens,
            parked_tokens=idle.parked * tokens,
            offline_tokens=offline_blocks * tokens,
            free_tokens=max(0, free - idle.retained_free) * tokens,
            running=len(running) - offline_running,
            waiting=len(requests) - offline - (len(running) - offline_running),
            offline_running=offline_running,
            offline_waiting=offline - offline_running,
            confirmed=self._confirmed.all(),
            draining=draining,
            host_used_tokens=host_used,
            host_free_tokens=host_free,
            disk_used_tokens=disk_used,
            disk_free_tokens=disk_free,
            parked=parked,
            unparked=unparked,
            named_after=self._confirmed.after,
            idle_tokens=idle.evictable * tokens,
            waiting_prompt_tokens=sum(map(prompts.tokens_to_compute, requests)),
            prompt_tokens_per_s=self.speed.rate.tokens_per_s,
            prompt_share=self.speed.share if running else 1.0,
            waiting_kv_tokens=lacking,
            split=self._kv_state.split,
            kv_per_token=prompts.kv_per_token,
            kv_per_conversation=prompts.kv_per_conversation,
            prompts=self.speed.long_prompts,
            prefill_curve=self.speed.curve,
        )

    def _take_changes(self) -> None:
        self._seq += 1
        changes = self._kv_state.changes
        for recent, keys in (
            (self._confirmed, changes.confirmed),
            (self._parked, changes.parked),
            (self._unparked, changes.unparked),
        ):
            recent.add(keys, self._seq)
            keys.clear()

    def _idle_blocks(self) -> IdleBlocks:
        """Count the blocks of idle conversations.

        A block is evictable if the host has a copy. All blocks count as evictable if idle KV may be lost
        (`idle_kv_evictable`), or if the engine can share layers with another one: nothing is copied while
        layers are shared, and idle conversations alone are no reason to share them.
        """
        blocks = self._kv_state.conversations.blocks
        lists: list[EvictionList] = []
        parked = uses_of_shared = 0
        for conversation in self._kv_state.conversations:
            if conversation.phase is RetentionPhase.RETAINED:
                lists.append(conversation.free)
                uses_of_shared += conversation.owned - conversation.exclusive
            elif conversation.phase is RetentionPhase.PARKED:
                parked += conversation.exclusive
        # It is not recorded which conversations share a block. Retained ones use at most this many.
        retained_shared = min(len(blocks.shared), uses_of_shared)
        parked += len(blocks.shared) - retained_shared
        free = sum(map(len, lists)) + retained_shared
        if self._config.idle_kv_evictable or self._kv_state.split is not None:
            return IdleBlocks(free, free, parked)
        stored = sum(one.stored for one in lists) + min(blocks.shared.stored, retained_shared)
        return IdleBlocks(free, stored, parked)

    def _is_parked(self, key: str) -> bool:
        conversation = self._kv_state.conversations.get(key)
        return conversation is not None and conversation.phase is RetentionPhase.PARKED
