"""What the dashboards show: titles, units and expressions. `dashboards.py` makes Grafana's JSON of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name for it
    lines: tuple[tuple[str, str], ...]  # (legend, expression)


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
    lines = tuple((f"p{round(q * 100)}", quantile(q, metric)) for q in (0.5, 0.95, 0.99))
    return Panel(title, "s", lines)


FLEET = Dashboard(
    "fleet",
    "ConServe: fleet",
    (
        Panel("Engines that serve", "short", (("{{engine}}", "conserve_engine_up"),)),
        Panel("Gateways with a directory", "short", (("connected", "sum(conserve_directory_connected)"),)),
        Panel(
            "KV in use",
            "percentunit",
            (
                (
                    "{{engine}}",
                    'max by (engine) (conserve_engine_kv_tokens{kind="in_use"}) / clamp_min(max by (engine) '
                    '(conserve_engine_kv_tokens{kind="in_use"}) + max by (engine) '
                    '(conserve_engine_kv_tokens{kind="free"}), 1)',
                ),
            ),
        ),
        Panel(
            "KV by kind",
            "short",
            (("{{kind}}", "sum by (kind) (max by (engine, kind) (conserve_engine_kv_tokens))"),),
        ),
        Panel(
            "Conversations on an engine",
            "short",
            (("{{engine}}", "max by (engine) (conserve_engine_conversations)"),),
        ),
        Panel(
            "Prefill queue against curve",
            "short",
            (
                ("load (1 is saturation)", "conserve_prefill_load"),
                ("shortest queue in s", "conserve_prefill_wait_seconds"),
            ),
        ),
        Panel("Decoder pressure", "percentunit", (("share of KV", "conserve_decoder_pressure"),)),
        Panel("What `conserve advise` says", "short", (("{{action}}", "conserve_capacity_advice"),)),
        Panel(
            "Running and waiting in engines",
            "short",
            (
                ("running {{instance}}", "vllm:num_requests_running"),
                ("waiting {{instance}}", "vllm:num_requests_waiting"),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            (("prompt", rate("vllm:prompt_tokens_total")), ("output", rate("vllm:generation_tokens_total"))),
        ),
        Panel(
            "Engines lost", "short", (("{{engine}} {{cause}}", "increase(conserve_engine_lost_total[1h])"),)
        ),
        Panel(  # since the keepers began: starts are too rare for a rate
            "Time to start an engine",
            "s",
            (
                (
                    "{{engine}}",
                    "conserve_engine_start_seconds_sum / clamp_min(conserve_engine_start_seconds_count, 1)",
                ),
            ),
        ),
        Panel(
            "Streams and connections",
            "short",
            (
                ("streams", "sum(conserve_relay_streams)"),
                ("clients", "sum(conserve_client_connections)"),
                ("engines", "sum(conserve_engine_connections)"),
            ),
        ),
        Panel("Traces dropped", "short", (("{{cause}}", rate("conserve_traces_dropped_total", "cause")),)),
    ),
)

CONVERSATIONS = Dashboard(
    "conversations",
    "ConServe: conversations",
    (
        Panel(
            "Live and parked",
            "short",
            (
                ("live", "sum(conserve_conversations_live)"),
                ("parked", "sum(conserve_conversations_parked)"),
            ),
        ),
        Panel(
            "Ended, by cause", "short", (("{{cause}}", rate("conserve_conversations_ended_total", "cause")),)
        ),
        latency("TTFET", "conserve_ttfet_seconds"),
        latency("Last-turn TBT", "conserve_last_turn_tbt_seconds"),
        latency("E2E", "conserve_e2e_seconds"),
        Panel("TTFT, p95", "s", (("{{turn}}", quantile(0.95, "conserve_ttft_seconds", "turn")),)),
        latency("TBT of all turns", "conserve_tbt_seconds"),
        Panel(
            "Objectives met",
            "percentunit",
            (
                (
                    "{{objective}}",
                    'sum by (objective) (rate(conserve_slo_total{met="yes"}[$__rate_interval])) / '
                    "sum by (objective) (rate(conserve_slo_total[$__rate_interval]))",
                ),
            ),
        ),
        Panel("Turns by outcome", "short", (("{{outcome}}", rate("conserve_turns_total", "outcome")),)),
        Panel("Refusals by reason", "short", (("{{reason}}", rate("conserve_refusals_total", "reason")),)),
        Panel(
            "How turns were identified",
            "short",
            (("{{how}}", rate("conserve_turns_identified_total", "how")),),
        ),
        Panel("Placements", "short", (("{{cause}}", rate("conserve_placements_total", "cause")),)),
        Panel("Wait for a placement, p95", "s", (("p95", quantile(0.95, "conserve_place_seconds")),)),
        Panel("Waiting for room", "short", (("waiting", "sum(conserve_places_waiting)"),)),
        Panel(
            "Transfers of KV",
            "short",
            (
                ("done", rate("conserve_kv_transfers_total")),
                ("not done: {{reason}}", rate("conserve_kv_transfers_refused_total", "reason")),
            ),
        ),
        Panel("KV moved", "Bps", (("bytes", rate("conserve_kv_transfer_bytes_total")),)),
        Panel("Parked, by cause", "short", (("{{cause}}", rate("conserve_kv_parked_total", "cause")),)),
        Panel("Restored from the host", "short", (("restores", rate("conserve_kv_restores_total")),)),
        Panel(
            "Prompt tokens computed again", "short", (("tokens", rate("conserve_recomputed_tokens_total")),)
        ),
        Panel(
            "KV on the host",
            "short",
            (
                (
                    "{{engine}} {{kind}}",
                    'max by (engine, kind) (conserve_engine_kv_tokens{kind=~"host_used|host_free"})',
                ),
            ),
        ),
        Panel(
            "Large later turns",
            "short",
            (("{{outcome}}", rate("conserve_redisaggregations_total", "outcome")),),
        ),
        Panel("Fallbacks", "short", (("{{kind}}", rate("conserve_fallbacks_total", "kind")),)),
    ),
)

COSERVING = Dashboard(
    "coserving",
    "ConServe: co-serving",
    (
        Panel(
            "KV of offline work",
            "short",
            (("{{engine}}", 'max by (engine) (conserve_engine_kv_tokens{kind="offline"})'),),
        ),
        Panel(
            "Tokens computed",
            "short",
            (
                ("online", rate("conserve_coserving_online_tokens_total")),
                ("offline", rate("conserve_coserving_offline_tokens_total")),
                ("room for offline", rate("conserve_coserving_budget_tokens_total")),
            ),
        ),
        Panel(
            "Aborts",
            "short",
            (
                ("arrivals that asked for one", rate("conserve_coserving_signals_total")),
                ("iterations left", rate("conserve_coserving_aborts_total")),
            ),
        ),
        latency("From an arrival to the safepoint", "conserve_coserving_abort_wait_seconds"),
        Panel(
            "Offline tokens computed in vain",
            "short",
            (("{{cause}}", rate("conserve_coserving_offline_tokens_lost_total", "cause")),),
        ),
        Panel(
            "Online tokens later than promised",
            "short",
            (("late", rate("conserve_coserving_late_tokens_total")),),
        ),
        Panel(
            "Latency model against the clock",
            "percentunit",
            (
                (
                    "predicted / taken, {{rows}}",
                    f"{rate('conserve_coserving_predicted_seconds_total', 'rows')} / "
                    f"{rate('conserve_coserving_seconds_total', 'rows')}",
                ),
            ),
        ),
        Panel(
            "Tokens harvested",
            "short",
            (("{{kind}}", rate("conserve_batch_harvested_tokens_total", "kind")),),
        ),
        Panel("Tokens lost", "short", (("{{cause}}", rate("conserve_batch_lost_tokens_total", "cause")),)),
        Panel("Offline requests at engines", "short", (("{{engine}}", "conserve_batch_in_flight_requests"),)),
        latency("TTFT of online turns", "conserve_ttft_seconds"),
        latency("TBT of online turns", "conserve_tbt_seconds"),
        Panel(
            "Preemptions", "short", (("{{instance}}", "rate(vllm:num_preemptions_total[$__rate_interval])"),)
        ),
        Panel("Blocks to the host", "short", (("stored", rate("conserve_kv_stored_blocks_total")),)),
    ),
)

ENERGY = Dashboard(
    "energy",
    "ConServe: energy",
    (
        Panel("Power", "watt", (("{{engine}}", "conserve_power_watts"),)),
        Panel("Power limits", "watt", (("{{engine}}", "conserve_power_limit_watts"),)),
        Panel("Energy by phase", "watt", (("{{role}}", rate("conserve_energy_joules_total", "role")),)),
        Panel(
            "Output tokens per joule",
            "short",
            (
                (
                    "tokens/J",
                    f"{rate('conserve_output_tokens_total')} / {rate('conserve_energy_joules_total')}",
                ),
            ),
        ),
        Panel(
            "Joules per conversation",
            "joule",
            (
                (
                    "J",
                    f"{rate('conserve_energy_joules_total')} / {rate('conserve_conversations_ended_total')}",
                ),
            ),
        ),
        Panel("Caps not set", "short", (("{{engine}}", "increase(conserve_power_caps_not_done_total[1h])"),)),
    ),
)

BATCH = Dashboard(
    "batch",
    "ConServe: batch",
    (
        Panel("Backlog", "short", (("{{state}}", "sum by (state) (conserve_batch_backlog_requests)"),)),
        Panel(
            "Batches by status", "short", (("{{status}}", "sum by (status) (conserve_batch_live_batches)"),)
        ),
        Panel("Tries by outcome", "short", (("{{outcome}}", rate("conserve_batch_tries_total", "outcome")),)),
        Panel("Nearest deadline", "s", (("left", "min(conserve_batch_nearest_deadline_seconds)"),)),
        Panel("Oldest batch", "s", (("age", "max(conserve_batch_oldest_age_seconds)"),)),
        Panel("Given up", "short", (("requests", "increase(conserve_batch_set_aside_requests_total[1h])"),)),
        Panel(
            "Time to make results durable, p95",
            "s",
            (("p95", quantile(0.95, "conserve_batch_commit_seconds")),),
        ),
        Panel(
            "Service tier flex",
            "short",
            (("{{outcome}}", rate("conserve_batch_flex_requests_total", "outcome")),),
        ),
    ),
)

DASHBOARDS = (FLEET, CONVERSATIONS, COSERVING, ENERGY, BATCH)
