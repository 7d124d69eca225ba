"""Data that describe an engine to the rest of the fleet: its identity, and the reports of its state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from placement.overload.drop_plan import EngineShape


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # serves whole conversations alone: the collocated baseline


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Identity and size of an engine. It is announced once per epoch; a restart is a new epoch."""

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
    """Report of an engine. All KV sizes are in tokens, counted in whole blocks.

    A report is cumulative: it replaces all reports before it, so readers keep only the newest. An event of a
    conversation (in `confirmed`, `parked` and `unparked`) stays in the reports for a while, with the
    number (`seq`) of the first report that had it. A reader applies the events that are newer than the last
    report that it read. It has missed confirmations only if that report is older than `named_after`.
    """

    engine: str
    epoch: int
    seq: int  # grows with every report of one epoch
    live_tokens: int  # on the accelerator, held for live conversations (running or retained)
    parked_tokens: int  # on the host only, held for live conversations
    offline_tokens: int  # on the accelerator, held for offline work
    free_tokens: int
    running: int
    waiting: int
    offline_running: int = 0
    offline_waiting: int = 0
    confirmed: Mapping[str, int] = field(default_factory=dict)  # conversations whose KV is in `live_tokens`
    draining: bool = False
    host_used_tokens: int = 0  # in host memory, of conversations and offline work
    host_free_tokens: int = 0
    disk_used_tokens: int = 0  # on the disk, of idle conversations
    disk_free_tokens: int = 0
    parked: Mapping[str, int] = field(default_factory=dict)  # conversations that were parked and still are
    unparked: Mapping[str, int] = field(default_factory=dict)  # parked conversations that a full host lost
    named_after: int = 0  # `confirmed` is complete for readers that know the report of this number
    # Live tokens of conversations between turns that may be evicted: their KV is on the host too, or may be
    # lost, or the engine can share its layers.
    idle_tokens: int = 0
    waiting_prompt_tokens: int = 0  # tokens to compute before waiting turns get their first tokens
    prompt_tokens_per_s: float = 0.0  # rate of recent iterations that had prompts; 0: no prompt yet
    prompt_share: float = 1.0  # share of the engine's time that running turns' TBT targets leave to prompts
    prompts: int = 0  # iterations so far with enough prompt tokens to measure
    # (a, b, c) of the time to prefill n tokens alone, a + b n + c n n seconds, from the latency model.
    prefill_curve: tuple[float, float, float] | None = None

    waiting_kv_tokens: int = 0  # KV that waiting turns lack, including KV on the host or a prefiller
    kv_per_token: int = 1  # above 1 where layers that keep the whole prompt form several groups of blocks
    split: "SplitState | None" = None  # None: it cannot share its layers
    kv_per_conversation: int = 0  # for sliding windows and recurrent states, at any length

    def takes(self, tokens: int) -> int:
        """Return the KV tokens that a conversation of `tokens` occupies on this engine."""
        return tokens * self.kv_per_token + self.kv_per_conversation

    @property
    def shares_layers(self) -> bool:
        return self.split is not None and self.split.epoch > 0

    @property
    def drained(self) -> bool:
        """Return whether the engine is draining and holds nothing, so that it can be stopped at no cost."""
        busy = self.running or self.waiting or self.offline_running or self.offline_waiting
        held = self.live_tokens or self.parked_tokens or self.offline_tokens
        return self.draining and not (busy or held or self.host_used_tokens or self.disk_used_tokens)


@dataclass(frozen=True, slots=True)
class SplitState:
    """State of an engine that can share its layers with equal engines."""

    peer: str  # host:port at which the other members reach it
    shape: EngineShape
    epoch: int = 0  # epoch of the group with which it shares its layers; 0: its model is whole
    kv_tokens: int = 0  # tokens of KV that fit now
    newest: int = 0  # latest group epoch that it was ordered into; the next order must have a later epoch
    partners: tuple[str, ...] = ()  # `peer` of each other member
