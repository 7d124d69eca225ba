"""What the fleet knows about its engines: plain data that crosses between rooms."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # serves whole conversations alone: the collocated baseline


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. Announced once per epoch; a restart of the engine is a new epoch."""

    engine: str
    tier: str
    role: Role
    epoch: int
    http: str  # host:port of vLLM's own OpenAI server
    transfer: str  # host:port of the KV transfer server, empty where there is none
    control: str  # host:port of its keeper's gRPC control service
    kv_tokens: int  # tokens of KV that fit on the accelerator
    block_tokens: int
    max_context: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine last reported. All KV sizes are tokens (blocks x block size)."""

    engine: str
    epoch: int
    seq: int  # grows with every report of one epoch
    live_tokens: int  # on the accelerator, held for live conversations (running or kept)
    parked_tokens: int  # on the host only, held for live conversations
    offline_tokens: int  # on the accelerator, held for offline work
    free_tokens: int
    running: int
    waiting: int
    offline_running: int = 0
    offline_waiting: int = 0
    confirmed: tuple[str, ...] = ()  # conversations whose KV became visible since the last report
    draining: bool = False
    host_used_tokens: int = 0  # in host memory, of conversations and offline work
    host_free_tokens: int = 0
    host_offline_tokens: int = 0  # of the used: offline work's
    parked: tuple[str, ...] = ()  # conversations parked since the last report
    idle_tokens: int = 0  # of the live: between turns and on the host as well, so it gives way at no cost

    @property
    def drained(self) -> bool:
        """It was asked to leave and holds nothing any more: its end costs nobody anything."""
        busy = self.running or self.waiting or self.offline_running or self.offline_waiting
        held = self.live_tokens or self.parked_tokens or self.offline_tokens or self.host_used_tokens
        return self.draining and not busy and not held
