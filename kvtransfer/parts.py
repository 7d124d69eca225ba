"""How parts plug into the one connector an engine has.

vLLM gives an engine one connector, in two processes: the scheduler's (EngineCore) and one a worker rank.
A *part* is a job of that connector (transfer, checkpoint, keep, safepoint). It has a scheduler half and a
worker half; each half overrides only the hooks it needs. `connector.py` calls the halves in the order they
are listed in and merges what they return. Hooks say when they are called.

What a part's halves tell each other is theirs: the scheduler half returns an *order* for the step, its worker
half gets it before the step; the worker half returns a *report* after the step, its scheduler half gets it
with the step's outcome. Both cross processes, so they are plain picklable data.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from kvtransfer.config import ConnectorConfig
from kvtransfer.metrics import CounterSpec, HistogramSpec
from kvtransfer.residence.residence import Residence


class Report(Protocol):
    """What a worker half tells its scheduler half after a step. Ranks' reports are merged pairwise."""

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What every half is built from. vLLM's objects are typed loosely, so that pure files need no vLLM."""

    config: ConnectorConfig
    vllm_config: Any
    kv_cache_config: Any
    residence: Residence  # conversations and host slots; used on the scheduler's side only


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens of a prompt that a part can bring in, beyond those already on the accelerator."""

    tokens: int
    background: bool  # True: loaded between steps, while other requests run


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the workers did in one step, as one part sees it."""

    report: Any | None  # this part's, merged over the ranks
    loaded: frozenset[str]  # requests whose background load ended, well or not
    failed_blocks: frozenset[int]  # blocks a load did not fill


@dataclass(slots=True)
class LoadsEnded:
    """Background loads that ended since the last step, on one rank."""

    requests: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Half:
    """What both halves have."""

    def take_counts(self) -> Mapping[str, float]:
        """Counts since the last call, by the short names of metrics.py."""
        return {}

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        """Values for histograms since the last call, by short name."""
        return {}

    def shutdown(self) -> None:
        """The process ends."""


class SchedulerHalf(Half):
    """Runs in EngineCore, in its one scheduling thread. Never blocks.

    A half never delays the freeing of a request's blocks: an engine with delayed frees spins while idle and
    hangs a pause. Where blocks must outlive their request, it takes references on the block pool.
    """

    hit_source = "external_unspecified"  # vLLM's name for where this part's matches come from

    def bind(self, manager: Any) -> None:
        """Once, after start: vLLM's `KVCacheManager`."""

    def on_new_request(self, request: Any) -> None:
        """A request arrived (also while the engine was idle)."""

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        """Asked when a request is about to be scheduled; the first part with a match loads it.

        Not asked again when that load failed from its first block on: the prompt is computed.
        """
        return None

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        """The request has its blocks; `match` is set when this part is to load its tokens into them."""

    def order(self, scheduler_output: Any) -> Any | None:
        """Once a step, after scheduling: what the worker half is to do."""
        return None

    def on_outcome(self, outcome: StepOutcome) -> None:
        """After a step, once its results are back."""

    def on_finished(self, request: Any, block_ids: list[int]) -> dict[str, Any] | None:
        """A request ended (also by abort), its blocks not yet freed. Returns parameters for its response."""
        return None

    def reset(self) -> None:
        """The prefix cache is about to be emptied: drop references and forget."""


class WorkerHalf(Half):
    """Runs in a worker process, one a rank."""

    def overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(WorkerHalf, hook)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Once: the KV tensors by layer name."""

    def before_step(self, order: Any | None) -> None:
        """Every step, before anything of it overwrites a block."""

    def before_layer(self, layer: str) -> None:
        """Before the attention of one layer. The safepoint raises here."""

    def after_layer(self, layer: str) -> None:
        """The layer's KV of this step is written (CPU) or queued on the current stream (GPU)."""

    def after_step(self) -> None:
        """After the forward pass, also of an empty step."""

    def loads_ended(self) -> LoadsEnded | None:
        """Background loads that ended since the last call."""
        return None

    def report(self) -> Report | None:
        """Last call of a step."""
        return None


class Part(ABC):
    """Builds the halves of one job. `name` is the key of its orders and reports."""

    name: str
    counters: Mapping[str, CounterSpec] = {}  # what its halves count beyond metrics.COUNTERS
    histograms: Mapping[str, HistogramSpec] = {}  # what its halves observe

    @abstractmethod
    def scheduler_half(self, context: EngineContext) -> SchedulerHalf: ...

    @abstractmethod
    def worker_half(self, context: EngineContext, rank: int) -> WorkerHalf: ...
