"""Interface of the connector's plugins, and the choice of plugins for an engine.

vLLM gives an engine one connector, in the scheduler's process (EngineCore) and in each worker rank's, which
is the same process if there is one rank. A *plugin* is a job of that connector (transfer, retention,
checkpoint, safepoint). It has a scheduler side and a worker side; each overrides only the hooks it needs.
`connector.py` calls the sides in the order of `plugin_paths` and merges what they return.

Once a step, the scheduler side returns an *order*, which its worker side gets before the step. The worker
side returns a *report* after the step, which its scheduler side gets with the step's outcome. Orders and
reports may cross processes, so they are plain picklable data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, Self

from kvtransfer.config import ConnectorConfig, ConnectorConfigError
from kvtransfer.control.control_socket import Handler
from kvtransfer.metrics import CounterSpec, HistogramSpec
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import CacheGroup


class Report(Protocol):
    """Report of a worker side after a step. Reports of several ranks are merged pairwise."""

    def merge(self, other: Self) -> Self: ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Arguments to build plugin sides with. vLLM's objects have the type `Any`, to avoid its import."""

    config: ConnectorConfig
    vllm_config: Any
    kv_cache_config: Any
    kv_state: SharedKvState  # workers use only its host memory
    groups: tuple[CacheGroup, ...]  # KV cache groups of the model
    commands: dict[str, Handler] = field(default_factory=dict)  # the keeper's commands that plugins carry out


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens of a prompt that a plugin can load, beyond those already on the accelerator."""

    tokens: int
    background: bool  # True: loaded between steps, while other requests run


LATER = Match(0, background=True)  # the KV is on its way already: vLLM asks again in the next step


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of one step for one plugin."""

    report: Any | None  # the plugin's report, merged over the ranks
    loaded: frozenset[str]  # requests whose background load ended, successful or not
    failed_blocks: frozenset[int]  # blocks a load did not fill


@dataclass(slots=True)
class LoadsEnded:
    """Background loads that ended since the last step, on one rank."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # requests that did not get all their blocks
    failed_blocks: set[int] = field(default_factory=set)


class PluginSide:
    """Common base of scheduler sides and worker sides."""

    def take_counts(self) -> Mapping[str, float]:
        """Return the counts since the last call, by the short names of `metrics.py`."""
        return {}

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        """Return the values for histograms since the last call, by short name."""
        return {}

    def shutdown(self) -> None:
        """Release resources before the process ends."""


class SchedulerSide(PluginSide):
    """Side of a plugin that runs in EngineCore's scheduling thread. No hook may block.

    A side never delays the freeing of a request's blocks, because vLLM would spin while it is idle, and a
    pause would hang. To keep blocks longer than their request, the side takes references on the block pool.
    """

    hit_source = "external_unspecified"  # vLLM's name for the source of this plugin's matches

    def __init__(self, context: EngineContext) -> None:
        """Build the plugin's scheduler side, in the scheduler's process."""

    def bind(self, manager: Any) -> None:
        """Receive vLLM's `KVCacheManager`, once after the start."""

    def on_new_request(self, request: Any) -> None:
        """Called for each new request, even while the engine is idle."""

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        """Return what this plugin can load for a request that is about to be scheduled, or `LATER`.

        The first plugin that returns a `Match` loads these tokens. If the load fails at its first block, the
        prompt is computed, and this is not called again for the request.
        """
        return None

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        """Called when a request got blocks. If `match` is given, this plugin has to load those tokens."""

    def order(self, scheduler_output: Any) -> Any | None:
        """Return the order to the worker side for the step that was just scheduled, or None."""
        return None

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Receive the outcome of a step for this plugin."""

    def needs_step(self) -> bool:
        """Return whether the engine has to step for this plugin although it has no requests."""
        return False

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Called when a request ends, or is aborted, before its blocks are freed.

        Returns transfer parameters to add to the request's response.
        """
        return None

    def reset(self) -> None:
        """Drop references and forget KV, because the prefix cache will be emptied."""


class WorkerSide(PluginSide):
    """Side of a plugin that runs in a worker, one per rank."""

    def __init__(self, context: EngineContext, rank: int) -> None:
        """Build the plugin's worker side, in the worker's process."""

    def overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(WorkerSide, hook)

    @property
    def hooks_layers(self) -> bool:
        return self.overrides("before_layer") or self.overrides("after_layer")

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Receive the KV tensors by layer name, once."""

    def before_step(self, order: Any | None) -> None:
        """Receive the order of a step before the step overwrites a block."""

    def needs_layers(self, order: Any | None) -> bool:
        """Return whether this side has work between the layers of the step that `order` is for.

        If no side has, the step may be one CUDA graph, and `before_layer` and `after_layer` are not called.
        The answer may depend only on the order, because ranks must agree. Only sides that override one of
        these two hooks are asked.
        """
        return True

    def before_layer(self, layer: str) -> None:
        """Called before the attention of a layer. The safepoint aborts the step here, by an exception."""

    def after_layer(self, layer: str) -> None:
        """Called when the layer's KV of this step is written (CPU) or queued on the current stream (GPU)."""

    def after_step(self) -> None:
        """Called after the forward pass, and after an empty step."""

    def loads_ended(self) -> LoadsEnded | None:
        """Return the background loads that ended since the last call."""
        return None

    def report(self) -> Report | None:
        """Return the report of a step. This is the last hook called in each step."""
        return None


class Plugin:
    """Factory of a plugin's scheduler side and worker side. What they send each other is keyed by `name`."""

    name: str
    scheduler: type[SchedulerSide] = SchedulerSide
    worker: type[WorkerSide] = WorkerSide
    counters: Mapping[str, CounterSpec] = {}  # counters beyond metrics.COUNTERS
    histograms: Mapping[str, HistogramSpec] = {}

    def scheduler_side(self, context: EngineContext) -> SchedulerSide:
        return self.scheduler(context)

    def worker_side(self, context: EngineContext, rank: int) -> WorkerSide:
        return self.worker(context, rank)


def plugin_paths(config: ConnectorConfig) -> list[str]:
    """Return an engine's plugins in calling order: the built-in ones, then those from the configuration."""
    own = {
        "kvtransfer.transfer.worker:TransferPlugin": config.own_transfer,
        "kvtransfer.retention.eviction:RetentionPlugin": True,
        "kvtransfer.checkpoint.copier:CheckpointPlugin": bool(config.host_kv_gib),
        "kvtransfer.control.state_report:ReportPlugin": True,
    }
    return [*(path for path, used in own.items() if used), *config.plugins]


def load_plugin(path: str) -> Plugin:
    """Load a plugin named `module:Class`. Other packages can provide plugins without being imported here."""
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
