"""The plugins of the one connector an engine has: their interface, and which of them an engine gets.

vLLM gives an engine one connector, in the scheduler's process (EngineCore) and in each worker rank's, which
is the same process where there is one rank.
A *plugin* is a job of that connector (transfer, retention, checkpoint, safepoint). It has a scheduler side
and a worker side; each overrides only the hooks it needs. `connector.py` calls the sides in the order of
`plugin_paths` and merges what they return. Hooks say when they are called.

What a plugin's sides tell each other is theirs: the scheduler side returns an *order* for the step, its
worker side gets it before the step; the worker side returns a *report* after the step, its scheduler side
gets it with the step's outcome. Both may cross processes, so they are plain picklable data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, Self

from kvtransfer.config import ConnectorConfig, ConnectorConfigError
from kvtransfer.control.control_socket import Handler
from kvtransfer.metrics import CounterSpec, HistogramSpec
from kvtransfer.retention.retained_conversations import CacheGroup
from kvtransfer.shared_state import Residence


class Report(Protocol):
    """What a worker side tells its scheduler side after a step. Ranks' reports are merged pairwise."""

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What every side is built from. vLLM's objects are typed loosely, so that pure files need no vLLM."""

    config: ConnectorConfig
    vllm_config: Any
    kv_cache_config: Any
    residence: Residence  # conversations and host slots; used on the scheduler's side only
    groups: tuple[CacheGroup, ...]  # of the model's KV
    commands: dict[str, Handler] = field(default_factory=dict)  # of the keeper, that plugins carry out


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens of a prompt that a plugin can bring in, beyond those already on the accelerator."""

    tokens: int
    background: bool  # True: loaded between steps, while other requests run


LATER = Match(0, background=True)  # it is on its way for another request: vLLM asks again


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the workers did in one step, as one plugin sees it."""

    report: Any | None  # this plugin's, merged over the ranks
    loaded: frozenset[str]  # requests whose background load ended, well or not
    failed_blocks: frozenset[int]  # blocks a load did not fill


@dataclass(slots=True)
class LoadsEnded:
    """Background loads that ended since the last step, on one rank."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # of these, those that did not get all
    failed_blocks: set[int] = field(default_factory=set)


class PluginSide:
    """What the scheduler side and the worker side have in common."""

    def take_counts(self) -> Mapping[str, float]:
        """Counts since the last call, by the short names of metrics.py."""
        return {}

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        """Values for histograms since the last call, by short name."""
        return {}

    def shutdown(self) -> None:
        """The process ends."""


class SchedulerSide(PluginSide):
    """Runs in EngineCore, in its one scheduling thread. Never blocks.

    A side never delays the freeing of a request's blocks: an engine with delayed frees spins while idle and
    hangs a pause. Where blocks must outlive their request, it takes references on the block pool.
    """

    hit_source = "external_unspecified"  # vLLM's name for where this plugin's matches come from

    def __init__(self, context: EngineContext) -> None:
        """In the scheduler's process only."""

    def bind(self, manager: Any) -> None:
        """Once, after start: vLLM's `KVCacheManager`."""

    def on_new_request(self, request: Any) -> None:
        """A request arrived (also while the engine was idle)."""

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        """Asked when a request is about to be scheduled; the first plugin with a match loads it, or says
        `LATER`.

        Not asked again when that load failed from its first block on: the prompt is computed.
        """
        return None

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        """The request has its blocks; `match` is set when this plugin is to load its tokens into them."""

    def order(self, scheduler_output: Any) -> Any | None:
        """Once a step, after scheduling: what the worker side is to do."""
        return None

    def on_outcome(self, outcome: StepOutcome) -> None:
        """After a step, once its results are back."""

    def needs_step(self) -> bool:
        """Return whether the engine has to step for this plugin although it has no requests."""
        return False

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """A request ended (also by abort), its blocks by KV cache group not yet freed. Returns parameters for
        its response."""
        return None

    def reset(self) -> None:
        """The prefix cache is about to be emptied: drop references and forget."""


class WorkerSide(PluginSide):
    """Runs in a worker, one a rank."""

    def __init__(self, context: EngineContext, rank: int) -> None:
        """In a worker only."""

    def overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(WorkerSide, hook)

    @property
    def hooks_layers(self) -> bool:
        return self.overrides("before_layer") or self.overrides("after_layer")

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Once: the KV tensors by layer name."""

    def before_step(self, order: Any | None) -> None:
        """Every step, before anything of it overwrites a block."""

    def needs_layers(self, order: Any | None) -> bool:
        """Whether this side has something to do between the layers of the step with this order. Where none
        has, the step may be one CUDA graph, and the next two hooks are not called.

        Of the order alone: ranks must agree. Asked of sides that override one of the two hooks; one that does
        not say has something to do in every step.
        """
        return True

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


class Plugin:
    """Builds the two sides of one job. `name` is the key of its orders and reports."""

    name: str
    scheduler: type[SchedulerSide] = SchedulerSide
    worker: type[WorkerSide] = WorkerSide
    counters: Mapping[str, CounterSpec] = {}  # what its sides count beyond metrics.COUNTERS
    histograms: Mapping[str, HistogramSpec] = {}  # what its sides observe

    def scheduler_side(self, context: EngineContext) -> SchedulerSide:
        return self.scheduler(context)

    def worker_side(self, context: EngineContext, rank: int) -> WorkerSide:
        return self.worker(context, rank)


def plugin_paths(config: ConnectorConfig) -> list[str]:
    """Own plugins first, in the order in which they are called, then those of the configuration."""
    own = {
        "kvtransfer.transfer.worker:TransferPlugin": config.own_transfer,
        "kvtransfer.retention.eviction:RetentionPlugin": True,
        "kvtransfer.checkpoint.copier:CheckpointPlugin": bool(config.host_kv_gib),
        "kvtransfer.control.state_report:ReportPlugin": True,
    }
    return [*(path for path, used in own.items() if used), *config.plugins]


def load_plugin(path: str) -> Plugin:
    """`module:Class`, so that packages which may import this one (and tests) bring plugins of their own."""
    module, _, name = path.partition(":")
    try:
        plugin = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConnectorConfigError(f"plugin {path!r} cannot be loaded: {error}") from error
    if not isinstance(plugin, Plugin):
        raise ConnectorConfigError(f"plugin {path!r} is not a kvtransfer.plugins.Plugin")
    return plugin


def selected_plugins(config: ConnectorConfig) -> list[Plugin]:
    return [load_plugin(path) for path in plugin_paths(config)]
