"""Catalogue of a fleet's metrics, and the Grafana dashboards that show them.

Written by hand are which modules declare metrics, and each panel's title, unit and expressions; the metrics
are as the modules declare them. `generated.py` makes a page and Grafana's JSON of it.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

ENGINE_LABELS = ("model_name", "engine")  # vLLM puts them on what connectors count


@dataclass(frozen=True, slots=True)
class Source:
    """A file of metrics, and whose /metrics page shows them."""

    module: str
    title: str
    page: str


ENGINE_PAGE = "an engine's `/metrics`, beside vLLM's own"
SOURCES = (
    Source("router.metrics", "Gateway and directory", "a gateway's `/metrics`; the directory's page"),
    Source("router.batch.metrics", "Batch", "the batch process's `/metrics`"),
    Source("workers.keeper.metrics", "Keepers", "a keeper's page"),
    Source("kvtransfer.metrics", "KV in engines", ENGINE_PAGE),
    Source("workers.engine.exact_tokens", "Exact tokens in engines", ENGINE_PAGE),
    Source("workers.engine.grammars.metrics", "Grammars in engines", ENGINE_PAGE),
    Source(
        "workers.engine.coserving.iterations", "Co-serving in engines", "a co-serving engine's `/metrics`"
    ),
    Source(
        "workers.engine.overload.metrics", "Dropping in engines", "an engine's `/metrics`, with policy drop"
    ),
)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # as it is scraped: counters with _total
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics_of(source: Source) -> list[Metric]:
    found = [*_declared(source.module)]
    of_engines = importlib.import_module(source.module)
    for spec in getattr(of_engines, "COUNTERS", {}).values():
        labels = (*ENGINE_LABELS, spec.label) if spec.label else ENGINE_LABELS
        found.append(Metric(f"{spec.name}_total", "counter", labels, spec.help))
    seen = getattr(of_engines, "HISTOGRAMS", {}).values()
    found += [Metric(spec.name, "histogram", ENGINE_LABELS, spec.help) for spec in seen]
    return sorted(found, key=lambda metric: metric.name)


def _declared(module: str) -> Iterator[Metric]:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, MetricWrapperBase):
            for family in value.describe():
                name = f"{family.name}_total" if family.type == "counter" else family.name
                yield Metric(name, family.type, tuple(value._labelnames), family.documentation)


def catalogue() -> dict[str, Metric]:
    return {metric.name: metric for source in SOURCES for metric in metrics_of(source)}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name for it
    lines: dict[str, str]  # legend: expression


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str = "") -> str:
    inner = f"rate({metric}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels)})"


def latency(title: str, metric: str) -> Panel:
    return Panel(title, "s", {f"p{round(q * 100)}": quantile(q, metric) for q in (0.5, 0.95, 0.99)})


def by_label(title: str, counter: str, label: str) -> Panel:
    return Panel(title, "short", {f"{{{{{label}}}}}": rate(counter, label)})


FLEET = Dashboard(
    "fleet",
    "ConServe: fleet",
    (
        Panel("Engines that serve", "short", {"{{engine}}": "conserve_engine_up"}),
        Panel("Gateways with a directory", "short", {"connected": "sum(conserve_directory_connected)"}),
        Panel("KV in use", "percentunit", {
            "{{engine}}": 'max by (engine) (conserve_engine_kv_tokens{kind="in_use"}) / clamp_min(max by '
                '(engine) (conserve_engine_kv_tokens{kind="in_use"}) + max by (engine) '
                '(conserve_engine_kv_tokens{kind="free"}), 1)',
        }),
        Panel("KV by kind", "short", {
            "{{kind}}": "sum by (kind) (max by (engine, kind) (conserve_engine_kv_tokens))",
        }),
        Panel("Conversations on an engine", "short", {
            "{{engine}}": "max by (engine) (conserve_engine_conversations)",
        }),
        Panel("Prefill queue against curve", "short", {
            "load (1 is saturation)": "conserve_prefill_load",
            "shortest queue in s": "conserve_prefill_wait_seconds",
        }),
        Panel("Decoder pressure", "percentunit", {
            "share of KV": "conserve_decoder_pressure",
            "asked for, waiting turns included": "conserve_kv_asked",
        }),
        Panel("Overload, by reason", "short", {"{{reason}}": "max by (reason) (conserve_overload)"}),
        Panel("What `conserve advise` says", "short", {"{{action}}": "conserve_capacity_advice"}),
        Panel("Running and waiting in engines", "short", {
            "running {{instance}}": "vllm:num_requests_running",
            "waiting {{instance}}": "vllm:num_requests_waiting",
        }),
        Panel("Tokens", "short", {
            "prompt": rate("vllm:prompt_tokens_total"),
            "output": rate("vllm:generation_tokens_total"),
        }),
        Panel("Engines lost", "short", {"{{engine}} {{cause}}": "increase(conserve_engine_lost_total[1h])"}),
        Panel("Time to start an engine", "s", {  # since the keepers began: starts are too rare for a rate
            "{{engine}}": "conserve_engine_start_seconds_sum / "
                "clamp_min(conserve_engine_start_seconds_count, 1)",
        }),
        Panel("Streams and connections", "short", {
            "streams": "sum(conserve_relay_streams)",
            "clients": "sum(conserve_client_connections)",
            "engines": "sum(conserve_engine_connections)",
        }),
        by_label("Traces dropped", "conserve_traces_dropped_total", "cause"),
    ),
)  # fmt: skip

CONVERSATIONS = Dashboard(
    "conversations",
    "ConServe: conversations",
    (
        Panel("Live and parked", "short", {
            "live": "sum(conserve_conversations_live)",
            "parked": "sum(conserve_conversations_parked)",
        }),
        by_label("Ended, by cause", "conserve_conversations_ended_total", "cause"),
        latency("TTFET", "conserve_ttfet_seconds"),
        Panel("TTFET by SLO class, p95", "s", {
            "{{slo_class}}": quantile(0.95, "conserve_class_ttfet_seconds", "slo_class"),
        }),
        latency("Last-turn TBT", "conserve_last_turn_tbt_seconds"),
        latency("E2E", "conserve_e2e_seconds"),
        Panel("TTFT, p95", "s", {"{{turn}}": quantile(0.95, "conserve_ttft_seconds", "turn")}),
        latency("TBT of all turns", "conserve_tbt_seconds"),
        Panel("Objectives met", "percentunit", {
            "{{objective}}": 'sum by (objective) (rate(conserve_slo_total{met="yes"}[$__rate_interval])) / '
                "sum by (objective) (rate(conserve_slo_total[$__rate_interval]))",
        }),
        by_label("Turns by outcome", "conserve_turns_total", "outcome"),
        by_label("Streams whose engine ended", "conserve_streams_cut_total", "outcome"),
        by_label("Refusals by reason", "conserve_refusals_total", "reason"),
        by_label("How turns were identified", "conserve_turns_identified_total", "how"),
        by_label("Placements", "conserve_placements_total", "cause"),
        by_label("Why prompts are computed where they are", "conserve_prompts_placed_total", "why"),
        Panel("Wait for a placement, p95", "s", {"p95": quantile(0.95, "conserve_place_seconds")}),
        Panel("Waiting for capacity", "short", {"waiting": "sum(conserve_places_waiting)"}),
        Panel("Transfers of KV", "short", {
            "done": rate("conserve_kv_transfers_total"),
            "not done: {{reason}}": rate("conserve_kv_transfers_refused_total", "reason"),
        }),
        Panel("KV moved", "Bps", {"bytes": rate("conserve_kv_transfer_bytes_total")}),
        by_label("Parked, by cause", "conserve_kv_parked_total", "cause"),
        Panel("Conversations and the host", "short", {
            "restores": rate("conserve_kv_restores_total"),
            "left the host": rate("conserve_kv_left_host_total"),
        }),
        Panel("Prompt tokens computed again", "short", {"tokens": rate("conserve_recomputed_tokens_total")}),
        by_label("Tokens of broken prefixes", "conserve_prefix_broken_tokens_total", "cause"),
        Panel("Tokens of answers taken as generated", "short", {
            "tokens": rate("conserve_prefix_exact_tokens_total"),
        }),
        by_label("Prompts computed from their text", "conserve_prefix_exact_fallbacks_total", "cause"),
        Panel("KV on the host", "short", {
            "{{engine}} {{kind}}":
                'max by (engine, kind) (conserve_engine_kv_tokens{kind=~"host_used|host_free"})',
        }),
        by_label("Large later turns", "conserve_redisaggregations_total", "outcome"),
        by_label("Stored answers", "conserve_stored_answers_total", "outcome"),
        by_label("Fallbacks", "conserve_fallbacks_total", "kind"),
    ),
)  # fmt: skip

COSERVING = Dashboard(
    "coserving",
    "ConServe: co-serving",
    (
        Panel("KV of offline work", "short", {
            "{{engine}}": 'max by (engine) (conserve_engine_kv_tokens{kind="offline"})',
        }),
        Panel("Tokens computed", "short", {
            "online": rate("conserve_coserving_online_tokens_total"),
            "offline": rate("conserve_coserving_offline_tokens_total"),
            "budget for offline": rate("conserve_coserving_budget_tokens_total"),
        }),
        Panel("Aborts", "short", {
            "arrivals that asked for one": rate("conserve_coserving_signals_total"),
            "iterations left": rate("conserve_coserving_aborts_total"),
        }),
        latency("From an arrival to the safepoint", "conserve_coserving_abort_wait_seconds"),
        Panel("Tokens computed in vain", "short", {
            "offline, {{cause}}": rate("conserve_coserving_offline_tokens_lost_total", "cause"),
            "of turns' prompts": rate("conserve_coserving_prompt_tokens_lost_total"),
        }),
        Panel("Online tokens later than their target", "short", {
            "late": rate("conserve_coserving_late_tokens_total"),
        }),
        Panel("Latency model against the clock", "percentunit", {
            "predicted / taken, {{requests}}":
                f"{rate('conserve_coserving_predicted_seconds_total', 'requests')} / "
                f"{rate('conserve_coserving_seconds_total', 'requests')}",
        }),
        by_label("Tokens harvested", "conserve_batch_harvested_tokens_total", "kind"),
        by_label("Tokens lost", "conserve_batch_lost_tokens_total", "cause"),
        Panel("Offline requests at engines", "short", {"{{engine}}": "conserve_batch_in_flight_requests"}),
        latency("TTFT of online turns", "conserve_ttft_seconds"),
        latency("TBT of online turns", "conserve_tbt_seconds"),
        Panel("Preemptions", "short", {"{{instance}}": "rate(vllm:num_preemptions_total[$__rate_interval])"}),
        Panel("Blocks to the host", "short", {"stored": rate("conserve_kv_stored_blocks_total")}),
    ),
)  # fmt: skip

ENERGY = Dashboard(
    "energy",
    "ConServe: energy",
    (
        Panel("Power", "watt", {"{{engine}}": "conserve_power_watts"}),
        Panel("Power limits", "watt", {"{{engine}}": "conserve_power_limit_watts"}),
        Panel("Energy by phase", "watt", {"{{role}}": rate("conserve_energy_joules_total", "role")}),
        Panel("Output tokens per joule", "short", {
            "tokens/J": "sum(rate(conserve_output_tokens_total[$__rate_interval])) / "
                "sum(rate(conserve_energy_joules_total[$__rate_interval]))",
        }),
        Panel("Joules per conversation", "joule", {
            "J": "sum(rate(conserve_energy_joules_total[$__rate_interval])) / "
                "sum(rate(conserve_conversations_ended_total[$__rate_interval]))",
        }),
        Panel("Caps not set", "short", {"{{engine}}": "increase(conserve_power_caps_not_done_total[1h])"}),
    ),
)  # fmt: skip

BATCH = Dashboard(
    "batch",
    "ConServe: batch",
    (
        Panel("Backlog", "short", {"{{state}}": "sum by (state) (conserve_batch_backlog_requests)"}),
        Panel("Batches by status", "short", {"{{status}}": "sum by (status) (conserve_batch_live_batches)"}),
        by_label("Tries by outcome", "conserve_batch_tries_total", "outcome"),
        Panel("Nearest deadline", "s", {"left": "min(conserve_batch_nearest_deadline_seconds)"}),
        Panel("Oldest batch", "s", {"age": "max(conserve_batch_oldest_age_seconds)"}),
        Panel("Given up", "short", {"requests": "increase(conserve_batch_set_aside_requests_total[1h])"}),
        Panel("Time to make results durable, p95", "s", {
            "p95": quantile(0.95, "conserve_batch_commit_seconds"),
        }),
        by_label("Service tier flex", "conserve_batch_flex_requests_total", "outcome"),
    ),
)  # fmt: skip

DASHBOARDS = (FLEET, CONVERSATIONS, COSERVING, ENERGY, BATCH)
