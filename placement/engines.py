"""What the fleet knows about its engines: plain data that crosses between packages."""

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
    """What an engine reports. All KV sizes are tokens (blocks x block size): `takes` says how many of them a
    conversation needs.

    Cumulative: a report replaces those before it, so that whoever passes it on keeps only the newest. What
    happened to a conversation is named with the report (`seq`) that named it first, and stays in the reports
    for a while: a reader takes what is later than the last report it had. One that was away for longer has
    missed something only if its last report is earlier than `named_after`.
    """

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
    confirmed: Mapping[str, int] = field(default_factory=dict)  # conversations whose KV became visible
    draining: bool = False
    host_used_tokens: int = 0  # in host memory, of conversations and offline work
    host_free_tokens: int = 0
    parked: Mapping[str, int] = field(default_factory=dict)  # conversations parked lately, and still so
    unparked: Mapping[str, int] = field(default_factory=dict)  # that left a full host lately, parked no more
    named_after: int = 0  # `confirmed` is complete for later reports
    # Of the live, between turns: what gives way, because it is on the host as well or layers can be shared.
    idle_tokens: int = 0
    waiting_prompt_tokens: int = 0  # to compute before the first tokens of turns that wait for one
    prompt_tokens_per_s: float = 0.0  # computed lately while some waited; 0: none yet
    prompt_share: float = 1.0  # of its time that the TBT targets of running turns leave to prompts
    prompts: int = 0  # iterations so far that say what prompts take: with more than a few tokens of them
    # Of n tokens alone: a + b n + c n n seconds, by its latency model, which follows its iterations.
    prefill_curve: tuple[float, float, float] | None = None

    # Of KV, for waiting turns to run: also what comes from the host or from a prefiller.
    waiting_kv_tokens: int = 0
    kv_per_token: int = 1  # where layers that keep all of a prompt are several groups of blocks
    split: "SplitState | None" = None  # None: it cannot share its layers
    kv_per_conversation: int = 0  # blocks of windows and of states, however short it is

    def takes(self, tokens: int) -> int:
        """Of its KV, a conversation of so many tokens."""
        return tokens * self.kv_per_token + self.kv_per_conversation

    @property
    def shares_layers(self) -> bool:
        return self.split is not None and self.split.epoch > 0

    @property
    def drained(self) -> bool:
        """It was asked to leave and holds nothing any more: its end costs nobody anything."""
        busy = self.running or self.waiting or self.offline_running or self.offline_waiting
        held = self.live_tokens or self.parked_tokens or self.offline_tokens or self.host_used_tokens
        return self.draining and not busy and not held


@dataclass(frozen=True, slots=True)
class SplitState:
    """Of an engine that can share its layers with others of its kind."""

    peer: str  # host:port at which the others reach it
    shape: EngineShape
    epoch: int = 0  # in which it shares them; 0: its model is whole
    kv_tokens: int = 0  # that fit now
    newest: int = 0  # epoch that it was told of; the next one is later
    partners: tuple[str, ...] = ()  # `peer` of each engine that it shares them with
