"""The one vLLM connector of an engine: calls the plugins in order and merges what they return."""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtransfer.compat.cache_groups import groups_of
from kvtransfer.compat.kv_connector import CONNECTOR as RELIED_ON
from kvtransfer.compat.kv_connector import WORKER
from kvtransfer.compat.relied_on import verify
from kvtransfer.compat.whole_graphs import leave_out_whole_graphs, pieces_for_all_steps, take_back_whole_graph
from kvtransfer.config import (
    CONNECTOR,
    CONNECTOR_MODULE,
    LMCACHE,
    LMCACHE_MODULE,
    ConnectorConfig,
    disk_slots,
    host_slots,
)
from kvtransfer.connector_stats import ConnectorMetrics, ConnectorStats
from kvtransfer.parent_death import die_with_parent
from kvtransfer.plugins import (
    LATER,
    EngineContext,
    LoadsEnded,
    Match,
    PluginSide,
    Report,
    SchedulerSide,
    StepOutcome,
    WorkerSide,
    selected_plugins,
)
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import block_bytes


@dataclass
class StepOrders(KVConnectorMetadata):
    """Messages of plugins' scheduler sides to their worker sides before a step (orders), by plugin name."""

    orders: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Messages of plugins' worker sides to their scheduler sides after a step (reports), by plugin name."""

    reports: dict[str, Report] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        assert isinstance(other, StepReports)
        for name, report in other.reports.items():
            mine = self.reports.get(name)
            self.reports[name] = report if mine is None else mine.merge(report)
        return self


class ConServeConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector of one process, with the scheduler sides or the worker sides of all plugins."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        verify(RELIED_ON)
        if role == KVConnectorRole.WORKER:
            verify(WORKER)
        super().__init__(vllm_config, role, kv_cache_config)
        groups = groups_of(kv_cache_config)
        self._by_request = len(groups) > 1  # how vLLM wants failed loads to be named
        die_with_parent()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = ConnectorConfig.from_extra_config(extra)
        ranks, size = int(vllm_config.parallel_config.world_size), block_bytes(groups)
        kv_state = SharedKvState(
            config,
            host_slots(config, ranks, size),
            time.monotonic,
            [group.first_kept for group in groups],
            disk_slots(config, ranks, size),
        )
        context = EngineContext(config, vllm_config, kv_cache_config, kv_state, groups)
        plugins = selected_plugins(config)
        self.kv_state, self.groups = kv_state, groups
        self._schedulers: dict[str, SchedulerSide] = {}
        self._workers: dict[str, WorkerSide] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._schedulers = {plugin.name: plugin.scheduler_side(context) for plugin in plugins}
        else:
            rank = vllm_config.parallel_config.rank
            self._workers = {plugin.name: plugin.worker_side(context, rank) for plugin in plugins}
        # Hooks around layers run twice for each layer and step: only sides that override one are called.
        hooked = self._workers.items() if config.layer_hooks else ()
        self._before_layer = [h.before_layer for _, h in hooked if h.overrides("before_layer")]
        self._after_layer = [h.after_layer for _, h in hooked if h.overrides("after_layer")]
        self._layered = {name: side for name, side in hooked if side.hooks_layers}
        self._needs_layers = False  # in the current step
        self._pieces_only = bool(self._layered) and not leave_out_whole_graphs(
            vllm_config, lambda: self._needs_layers
        )
        self._graphs_taken_back = 0
        self._counts: dict[str, float] = {"piecewise_only": 1} if self._pieces_only else {}
        self._matches: dict[str, tuple[str, Match]] = {}  # request -> plugin that loads it
        self._hit_sources: dict[str, CacheHitSource] = {}
        self._failed_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Tell vLLM that no request waits until its KV is delivered: a preempted prefill is sent again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Ask for piecewise graphs in all steps if vLLM cannot choose for each step."""
        return ConnectorConfig.from_extra_config(extra_config).layer_hooks and pieces_for_all_steps()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Ask for a layout in which one layer's block is one contiguous range of bytes."""
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        stats = ConnectorStats(data=self._counts)
        self._counts = {}
        sides: tuple[PluginSide, ...] = (*self._schedulers.values(), *self._workers.values())
        for side in sides:
            seen = {name: list(values) for name, values in side.take_observations().items()}
            stats.aggregate(ConnectorStats(data={**side.take_counts(), **seen}))
        return None if stats.is_empty() else stats

    # Scheduler side

    def scheduler_side(self, plugin: str) -> SchedulerSide | None:
        """Return the scheduler side of a plugin, or None if the plugin is not loaded."""
        return self._schedulers.get(plugin)

    def worker_side(self, plugin: str) -> WorkerSide | None:
        return self._workers.get(plugin)

    def held_by_others(self, request_id: str) -> None:
        """Record a finished request whose blocks another connector still saves."""
        self.kv_state.loads.held_by_others.add(request_id)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        for side in self._schedulers.values():
            side.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        for side in self._schedulers.values():
            side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._matches.pop(request.request_id, None)
        if request.request_id in self.kv_state.loads.loading:
            # A load for this request failed from its first block on, and vLLM 0.32 keeps the request's
            # blocks. A second load would need as many again and delay other requests: compute the prompt.
            return 0, False
        sides = {} if self.kv_state.kv_io_suspended else self._schedulers
        for name, side in sides.items():
            match = side.match(request, num_computed_tokens)
            if match is LATER:
                return None, False
            if match and match.tokens > 0:
                self._matches[request.request_id] = name, match
                return match.tokens, match.background
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        loader, match = self._matches.pop(request.request_id, (None, None))
        if num_external_tokens == 0:  # vLLM did not take the match, or there was none
            loader = match = None
        if loader is not None:
            self._hit_sources[request.request_id] = CacheHitSource(self._schedulers[loader].hit_source)
        for name, side in self._schedulers.items():
            side.after_allocation(request, blocks, match if name == loader else None)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return how many of the request's tokens are loaded, by their source, for a counter of vLLM."""
        source = self._hit_sources.pop(request.request_id, None)
        return {source: num_external_tokens} if source and num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        orders = {name: side.order(scheduler_output) for name, side in self._schedulers.items()}
        return StepOrders({name: order for name, order in orders.items() if order is not None})

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, StepReports) else {}
        loaded = frozenset(connector_output.finished_recving or ())
        failed = frozenset(connector_output.invalid_block_ids)
        self.kv_state.loads.held_by_others -= set(connector_output.finished_sending or ())
        for name, side in self._schedulers.items():
            side.on_outcome(StepOutcome(reports.get(name), loaded, failed))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._matches.pop(request.request_id, None)
        self._hit_sources.pop(request.request_id, None)
        params: dict[str, Any] = {}
        for side in self._schedulers.values():
            params.update(side.on_finished(request, block_ids) or {})
        return False, params or None

    def has_pending_push_work(self) -> bool:
        """Return whether a plugin needs a step, so that vLLM steps even without requests."""
        return any(side.needs_step() for side in self._schedulers.values())

    def reset_cache(self) -> bool:
        for side in self._schedulers.values():
            side.reset()
        return True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for side in self._workers.values():
            side.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Pass each plugin's order to its worker side. vLLM calls this first in each step."""
        assert isinstance(kv_connector_metadata, StepOrders)
        orders = kv_connector_metadata.orders
        for name, side in self._workers.items():
            side.before_step(orders.get(name))
        self._needs_layers = any(side.needs_layers(orders.get(n)) for n, side in self._layered.items())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Run the step without CUDA graphs if vLLM chose a whole graph that would skip hooks.

        vLLM calls this right before the forward pass.
        """
        if self._needs_layers and not self._pieces_only and take_back_whole_graph(self._graphs_taken_back):
            self._graphs_taken_back += 1
            self._counts["graphs_taken_back"] = self._counts.get("graphs_taken_back", 0) + 1
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: `handle_preemptions` began the loads. vLLM may call this after the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        for before_layer in self._before_layer:
            before_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for after_layer in self._after_layer:
            after_layer(layer_name)

    def wait_for_save(self) -> None:
        self._needs_layers = False
        for side in self._workers.values():
            side.after_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = LoadsEnded()
        for side in self._workers.values():
            loads = side.loads_ended()
            if loads is not None:
                ended.requests |= loads.requests
                ended.failed |= loads.failed
                ended.failed_blocks |= loads.failed_blocks
        if self._by_request:
            return KVConnectorTransferResults(finished_recving=ended.requests, failed_recving=ended.failed)
        self._failed_blocks |= ended.failed_blocks
        return KVConnectorTransferResults(finished_recving=ended.requests)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = {name: side.report() for name, side in self._workers.items()}
        given = {name: report for name, report in reports.items() if report is not None}
        return StepReports(given) if given else None

    def shutdown(self) -> None:
        sides: tuple[PluginSide, ...] = (*self._schedulers.values(), *self._workers.values())
        for side in sides:
            side.shutdown()


# vLLM's front end finds a connector's counters by its name, among those registered in its own process.
for name, module in ((CONNECTOR, CONNECTOR_MODULE), (LMCACHE, LMCACHE_MODULE)):
    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(name, module, name)


class SeveralConnectors(MultiConnector):
    """Our connector combined with NIXL's connector, LMCache's, or both.

    vLLM's `MultiConnector` asks them in order. The first that has a prompt's KV loads it; all of them save.
    """

    @property
    def ours(self) -> ConServeConnector:
        return next(one for one in self.sub_connectors if isinstance(one, ConServeConnector))

    def scheduler_side(self, plugin: str) -> SchedulerSide | None:
        return self.ours.scheduler_side(plugin)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._note_held(request, super().request_finished(request, blocks))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._note_held(request, super().request_finished_all_groups(request, block_ids))

    def _note_held(
        self, request: Any, ended: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        if ended[0]:
            self.ours.held_by_others(request.request_id)
        return ended

    def reset_cache(self) -> bool:
        """Reset our connector only, because a shared tier keeps its KV."""
        return self.ours.reset_cache()
