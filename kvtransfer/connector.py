"""The one vLLM connector of an engine: calls the parts in order and merges what they return."""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtransfer.config import ConfigError, ConnectorConfig
from kvtransfer.lifeline import die_with_parent
from kvtransfer.parts import (
    EngineContext,
    Half,
    LoadsEnded,
    Match,
    Report,
    SchedulerHalf,
    StepOutcome,
    WorkerHalf,
)
from kvtransfer.residence.residence import Residence
from kvtransfer.selection import selected_parts
from kvtransfer.sizes import host_slots
from kvtransfer.vllm_stats import ConnectorMetrics, ConnectorStats
from kvtransfer.waits import nap


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to workers, once a step: orders by part name."""

    orders: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step: reports by part name."""

    reports: dict[str, Report] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        assert isinstance(other, StepReports)
        for name, report in other.reports.items():
            mine = self.reports.get(name)
            self.reports[name] = report if mine is None else mine.merge(report)
        return self


class ConServeConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler side or worker side, as `role` says; only that side's halves exist."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                "this connector moves KV of models with one KV cache group; this model has "
                f"{len(kv_cache_config.kv_cache_groups)}. Serve it without the connector."
            )
        die_with_parent()
        if current_platform.is_cpu():
            nap()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = ConnectorConfig.from_extra_config(extra)
        slots = host_slots(config, vllm_config, kv_cache_config)
        residence = Residence(config, slots, time.monotonic)
        context = EngineContext(config, vllm_config, kv_cache_config, residence)
        parts = selected_parts(config)
        self._residence = residence
        self._schedulers: dict[str, SchedulerHalf] = {}
        self._workers: dict[str, WorkerHalf] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._schedulers = {part.name: part.scheduler_half(context) for part in parts}
        else:
            rank = vllm_config.parallel_config.rank
            self._workers = {part.name: part.worker_half(context, rank) for part in parts}
        # These run twice a layer and step: only halves that do something there are called.
        self._before_layer = [h.before_layer for h in self._workers.values() if h.overrides("before_layer")]
        self._after_layer = [h.after_layer for h in self._workers.values() if h.overrides("after_layer")]
        self._matches: dict[str, tuple[str, Match]] = {}  # request -> part that loads it
        self._hit_sources: dict[str, CacheHitSource] = {}
        self._failed_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted prefill voids its transfer and is streamed again; no request waits for delivery."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are Python: they must run between graph pieces."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Layer, block, head, token, channel: one block of one layer is one contiguous range of bytes."""
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
        stats = ConnectorStats()
        halves: tuple[Half, ...] = (*self._schedulers.values(), *self._workers.values())
        for half in halves:
            seen = {name: list(values) for name, values in half.take_observations().items()}
            stats.aggregate(ConnectorStats(data={**half.take_counts(), **seen}))
        return None if stats.is_empty() else stats

    # Scheduler side

    def scheduler_half(self, part: str) -> SchedulerHalf | None:
        """For the engine's own scheduler, which asks parts what they hold."""
        return self._schedulers.get(part)

    def held_by_others(self, request_id: str) -> None:
        """The request ended, but another connector saves its blocks before they are freed."""
        self._residence.held_by_others.add(request_id)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        for half in self._schedulers.values():
            half.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        for half in self._schedulers.values():
            half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._matches.pop(request.request_id, None)
        if request.request_id in self._residence.loading:
            # Its load failed from the first block on. vLLM 0.32 still keeps room for all of it: a second load
            # would have to fit beside itself, and block what waits behind it. It is computed instead.
            return 0, False
        for name, half in self._schedulers.items():
            match = half.match(request, num_computed_tokens)
            if match is not None and match.tokens > 0:
                self._matches[request.request_id] = name, match
                return match.tokens, match.background
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        loader, match = self._matches.pop(request.request_id, (None, None))
        if num_external_tokens == 0:  # vLLM did not take the match, or there was none
            loader = match = None
        if loader is not None:
            self._hit_sources[request.request_id] = CacheHitSource(self._schedulers[loader].hit_source)
        for name, half in self._schedulers.items():
            half.after_allocation(request, blocks, match if name == loader else None)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """vLLM asks right after the allocation: its counter says where external tokens came from."""
        source = self._hit_sources.pop(request.request_id, None)
        return {source: num_external_tokens} if source and num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        orders = {name: half.order(scheduler_output) for name, half in self._schedulers.items()}
        return StepOrders({name: order for name, order in orders.items() if order is not None})

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, StepReports) else {}
        loaded = frozenset(connector_output.finished_recving or ())
        failed = frozenset(connector_output.invalid_block_ids)
        self._residence.held_by_others -= set(connector_output.finished_sending or ())
        for name, half in self._schedulers.items():
            half.on_outcome(StepOutcome(reports.get(name), loaded, failed))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._matches.pop(request.request_id, None)
        self._hit_sources.pop(request.request_id, None)
        params: dict[str, Any] = {}
        for half in self._schedulers.values():
            params.update(half.on_finished(request, block_ids) or {})
        return False, params or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        for half in self._schedulers.values():
            half.reset()
        return True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for half in self._workers.values():
            half.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this once a step before anything else of it: here the step's orders are given out."""
        assert isinstance(kv_connector_metadata, StepOrders)
        for name, half in self._workers.items():
            half.before_step(kv_connector_metadata.orders.get(name))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: without a synchronous load vLLM calls this after the forward pass, too late to start."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        for before_layer in self._before_layer:
            before_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for after_layer in self._after_layer:
            after_layer(layer_name)

    def wait_for_save(self) -> None:
        for half in self._workers.values():
            half.after_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = LoadsEnded()
        for half in self._workers.values():
            loads = half.loads_ended()
            if loads is not None:
                ended.requests |= loads.requests
                ended.failed_blocks |= loads.failed_blocks
        self._failed_blocks |= ended.failed_blocks
        return None, ended.requests or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = {name: half.report() for name, half in self._workers.items()}
        given = {name: report for name, report in reports.items() if report is not None}
        return StepReports(given) if given else None

    def shutdown(self) -> None:
        halves: tuple[Half, ...] = (*self._schedulers.values(), *self._workers.values())
        for half in halves:
            half.shutdown()
