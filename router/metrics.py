"""Metrics of gateways and the directory (of offline work: batch/metrics.py).

Labels are bounded: engines, causes, policies; never a conversation.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from router.http import Certificate, Server, UpstreamPool

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)

_LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_GAP_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_CONVERSATION_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_TOKENS = (64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def from_zero(counter: Counter, *values: str) -> None:
    """Shown before the first of its kind: otherwise Prometheus does not see that one as an increase."""
    for value in values:
        counter.labels(*value.split("/"))


# The directory's process: on its own metrics page, always zero on a gateway's

CONVERSATIONS_LIVE = Gauge("conserve_conversations_live", "Conversations that have begun and not ended.")
CONVERSATIONS_PARKED = Gauge(
    "conserve_conversations_parked",
    "Live conversations that engines have parked on their hosts, as heard since the directory began.",
)
CONVERSATIONS_ENDED = Counter(
    "conserve_conversations_ended_total",
    "Conversations ended, by cause: deleted, final, idle, failed_first_turn, gateway_lost, undelivered.",
    ["cause"],
)
PLACES_WAITING = Gauge("conserve_places_waiting", "First turns that wait in the directory for capacity.")
ENGINES_AWAITED = Gauge(
    "conserve_engines_awaited",
    "Engines that were up before the directory restarted and have not reported since. New conversations wait "
    "for them, for a bounded time.",
)
JOURNAL_ROWS_MISSED = Counter(
    "conserve_journal_rows_missed_total",
    "Counts and ends of prompts that were not kept while the disk took nothing and much waited for it. "
    "After a restart such a conversation goes on, but its newest prompt may not be recognised without an id.",
)
PREFILL_LOAD = Gauge(
    "conserve_prefill_load",
    "Seconds of prompts, by the tiers' curves, that arrive a second and prefiller; 1 is saturation.",
)
PREFILL_WAIT = Gauge("conserve_prefill_wait_seconds", "Length of the shortest prefill queue, by the curves.")
PREFILL_SATURATES = Gauge(
    "conserve_prefill_saturates_in_seconds",
    "Until even the shortest prefill queue is longer than first turns may wait, at the present rate; +Inf "
    "while it does not grow.",
)
DECODER_PRESSURE = Gauge(
    "conserve_decoder_pressure", "Share of the decoders' KV for conversations that is in use or reserved."
)
KV_ASKED = Gauge(
    "conserve_kv_asked",
    "Share of the decoders' KV for conversations that running turns hold and waiting turns lack, averaged; "
    "above 1 they ask for more than there is.",
)
LAYERS_SHARED = Counter(
    "conserve_overload_changes_total",
    "Groups of decoders told to share their layers (drop), or to have them again (restore), by how it ended: "
    "done; failed (not all within 45 s: each is what it says it is, and the group is left alone for 60 s); "
    "refused (an engine did not answer, or said no).",
    ["change", "outcome"],
)
OVERLOAD_ROUNDS_FAILED = Counter(
    "conserve_overload_rounds_failed_total",
    "Rounds of the directory's dropping, and changes they began, that ended in an error, which its log has.",
)
OVERLOAD = Gauge(
    "conserve_overload",
    "1 at the present state of the decoders' KV: fits; evictable (it fits once idle conversations and "
    "offline work are evicted); brief; compute (turns wait beside free KV); no_decoder (none accepts "
    "conversations); and, under overload, kv_short or not_over.",
    ["reason"],
)
CAPACITY_ADVICE = Gauge(
    "conserve_capacity_advice",
    "What `conserve advise` says now: 0, or how many engines to add (1 where the action has no number). "
    "Actions: add_prefillers, add_decoders, no_prefillers, raise_host_kv, lower_prefill_caps, "
    "lower_decode_caps.",
    ["action"],
)
PROMPTS_PLACED = Counter(
    "conserve_prompts_placed_total",
    "Placed turns by where their prompt is computed and why. On a prefiller: finishes_first, has_prefix (it "
    "has some of the prompt cached). On the decoder: sooner_on_decoder, prefillers_saturated, "
    "no_prefiller_up, prefillers_busy, prefilled_locally, restored, shares_layers. On a prefiller that holds "
    "the conversation because it fits on no decoder: last_resort.",
    ["why"],
)
RELEASES_FAILED = Counter(
    "conserve_releases_failed_total",
    "Ended conversations whose engine could not be told; it frees their KV by its own idle time.",
)

# A gateway's process: identity and placement

IDENTIFIED = Counter(
    "conserve_turns_identified_total",
    "Turns by how their conversation was found: explicit, continued, retried, forked, new.",
    ["how"],
)
PLACEMENTS = Counter(
    "conserve_placements_total",
    "Placements by policy and cause: first_turn, rebound (the decoder was lost), moved (it was "
    "draining), redisaggregated, bound.",
    ["policy", "cause"],
)
REFUSALS = Counter(
    "conserve_refusals_total",
    "Turns refused, by reason: no_capacity, saturated, too_large, no_decoder, no_prefiller, no_directory.",
    ["reason"],
)
PLACE_SECONDS = Histogram(
    "conserve_place_seconds", "Time a turn waited for its placement, queueing included.", buckets=_LATENCY_S
)
HANDOVER_SECONDS = Histogram(
    "conserve_handover_seconds",
    "From the end of a prompt's prefill to its first token on the decoder, less the time of one more token: "
    "what of a transfer was not hidden, and of streamed turns only.",
    buckets=_GAP_S,
)
TRANSFERS = Counter(
    "conserve_transfers_asked_total",
    "Turns whose prompt a prefiller computes and hands to the decoder, by cause (see placements).",
    ["cause"],
)
PREFILL_TOKENS = Counter(
    "conserve_prefill_tokens_total",
    "Tokens of prompts that prefillers were given, by whether they were computed or cached there (of engines "
    "that say what was cached).",
    ["source"],
)
REDISAGGREGATIONS = Counter(
    "conserve_redisaggregations_total",
    "Later turns with a large uncached part, by outcome: transferred, or local when no prefiller was free.",
    ["outcome"],
)
TRACES_DROPPED = Counter(
    "conserve_traces_dropped_total",
    "Traced turns whose spans were dropped, by cause: queue_full, not_taken (the OTLP receiver did not "
    "answer, or refused; the log says why).",
    ["cause"],
)
FALLBACKS = Counter(
    "conserve_fallbacks_total",
    "Things done in a worse way than planned: prefill_failed (the decoder computes the prompt), decoder_lost "
    "(bound again), identify_failed (taken as new), report_dropped, stale_binding; in the directory "
    "engines_missing (it restarted, and placed without engines that did not report in time).",
    ["kind"],
)
RESTORES_AHEAD = Counter(
    "conserve_restores_ahead_total",
    "Conversations whose tool was likely to end, by what became of bringing their KV back from the host: "
    "restored (its engine began to load it), gone (its engine had less than half of it left), not_parked "
    "(it was still there), returned (the turn came first), busy (the engine had other "
    "work, or shared its layers, all the time), failed.",
    ["outcome"],
)
DIRECTORY_UP = Gauge(
    "conserve_directory_connected", "1 while the directory's stream to this gateway is open."
)
CACHED_BINDINGS = Gauge("conserve_cached_bindings", "Bindings this gateway serves without asking.")

SLO_TARGETS_RAISED = Counter(
    "conserve_slo_targets_raised_total",
    "Turns that asked engines for less time to the first token, or between tokens, than their class has: its "
    "target holds.",
    ["slo_class"],
)
LIMITED = Counter(
    "conserve_key_limits_total",
    "Requests refused for a limit of their key: requests_per_minute, tokens_per_minute, grammars_per_minute, "
    "turns; or for its share of a gateway process: requests_at_once, bytes_at_once (of bodies).",
    ["limit"],
)
IGNORED_FIELDS = Counter(
    "conserve_ignored_fields_total",
    "Fields of requests and batch lines that were dropped because neither the gateway nor vLLM knows them, "
    "by endpoint. The log names each once for each key, and the response header X-Conserve-Ignored-Fields.",
    ["path"],
)
KEYS_STALE = Gauge(
    "conserve_keys_stale",
    "1 while the file of API keys is missing or wrong: the keys read before are in use, and the log says "
    "what is wrong.",
)

# Turns

TURNS = Counter(
    "conserve_turns_total",
    "Turns by outcome: complete, client_gone, broken (after its start), failed, refused.",
    ["outcome"],
)
SET_ASIDE = Counter(
    "conserve_turns_set_aside_total",
    "Turns not tried (again): two engines ended while they computed the request. 0 is right.",
)
STREAMS_CUT = Counter(
    "conserve_streams_cut_total",
    "Streams whose engine ended under them: resumed (they went on, on another one); or why they ended in an "
    "error: opted_out, several_answers, logprobs, counted_output (penalties and budgets that count an "
    "answer's tokens), not_lined (the engine did not say its tokens), "
    "not_exact (it said that it cannot be continued), torn (the client has a part of an event), too_long "
    "(256 KiB of token lines), no_place, set_aside, cut_again (too often, for too long, or broken "
    "otherwise), refused (by the next engine).",
    ["outcome"],
)
ANSWERS = Counter(
    "conserve_stored_answers_total",
    "Answers of the Responses API: kept, pruned (by age, or beyond what may be stored), failed (not stored, "
    "or not to be read), late (their clients had them before that).",
    ["outcome"],
)
TTFT_SECONDS = Histogram(
    "conserve_ttft_seconds",
    "From a turn's arrival to its first token, of first and of later turns.",
    ["turn"],
    buckets=_LATENCY_S,
)
TBT_SECONDS = Histogram("conserve_tbt_seconds", "Mean time between the tokens of a turn.", buckets=_GAP_S)
TTFET_SECONDS = Histogram(
    "conserve_ttfet_seconds",
    "From a user's message to the first token of the turn that speaks to the user (finish reason stop); the "
    "tool turns between count as waiting.",
    buckets=_LATENCY_S,
)
CLASS_TTFET_SECONDS = Histogram(
    "conserve_class_ttfet_seconds",
    "As `conserve_ttfet_seconds`, by SLO class of the turn that answered.",
    ["slo_class"],
    buckets=_LATENCY_S,
)
LAST_TURN_TBT_SECONDS = Histogram(
    "conserve_last_turn_tbt_seconds",
    "Mean time between the tokens of turns that speak to the user (finish reason stop).",
    buckets=_GAP_S,
)
E2E_SECONDS = Histogram(
    "conserve_e2e_seconds",
    "From a user's message to the end of the turn that answers it (finish reason stop).",
    buckets=_LATENCY_S,
)
CONVERSATION_SECONDS = Histogram(
    "conserve_conversation_seconds",
    "From the beginning of a conversation's first turn to the end of its last.",
    buckets=_CONVERSATION_S,
)
SLO = Counter(
    "conserve_slo_total",
    "Answers to users by SLO class, objective (ttfet, last_turn_tbt, e2e) and whether it was met.",
    ["slo_class", "objective", "met"],
)
PROMPT_TOKENS = Histogram(
    "conserve_turn_prompt_tokens", "Prompt tokens of turns, as engines report them.", buckets=_TOKENS
)
RECOMPUTED_TOKENS = Counter(
    "conserve_recomputed_tokens_total",
    "Prompt tokens of later turns that their engine computed although the turn before had them (its KV was "
    "not kept, or the prefix changed); of turns whose engine says what was cached.",
)
PREFIX_BROKEN_TOKENS = Counter(
    "conserve_prefix_broken_tokens_total",
    "Tokens whose KV a later turn could not use, because its prompt does not go on with them, by cause: "
    "changed_tools, edited_history, stripped_reasoning, rerendered_tool_call, retokenised_output. "
    "docs/operate.md says what to do.",
    ["cause"],
)
OUTPUT_TOKENS = Counter("conserve_output_tokens_total", "Tokens generated for clients.")

# OpenTelemetry's conventions for generative AI, by the names that its exporters give them in Prometheus, with
# its buckets: for dashboards that were made for those

_OPERATION = ["gen_ai_operation_name", "gen_ai_request_model"]
GENAI_TTFT = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "`gen_ai.server.time_to_first_token` of streams, from a turn's arrival at the gateway.",
    _OPERATION,
    buckets=(*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1), *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)),
)
GENAI_TPOT = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "`gen_ai.server.time_per_output_token`: between a turn's tokens, after the first.",
    _OPERATION,
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
)
GENAI_DURATION = Histogram(
    "gen_ai_server_request_duration_seconds",
    "`gen_ai.server.request.duration` of turns that reached an engine; the error is the outcome of "
    "`conserve_turns_total`, empty for complete ones.",
    [*_OPERATION, "error_type"],
    buckets=(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)

# Relay

LOOP_HELD = Histogram(
    "conserve_loop_held_seconds",
    "How late the gateway's event loop came to a timer that was due, in processor time of its thread (what "
    "else the machine did does not count), looked at 50 times a second.",
    buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0),
)
STREAMS = Gauge("conserve_relay_streams", "Responses on their way from an engine to a client.")
CLIENT_CONNECTIONS = Gauge("conserve_client_connections", "Open connections of clients.")
ENGINE_CONNECTIONS = Gauge("conserve_engine_connections", "Open connections to engines, idle ones included.")
HTTP_REFUSALS = Counter(
    "conserve_http_refusals_total", "Requests refused before any handler ran, by error code.", ["code"]
)
CLIENT_TIMEOUTS = Counter(
    "conserve_client_timeouts_total",
    "Client connections closed by a time-out (head, body, idle, write), or evicted: idle ones closed for new "
    "ones when there were as many connections as allowed.",
    ["what"],
)
TLS_HANDSHAKES = Counter(
    "conserve_tls_handshakes_total",
    "TLS handshakes of clients by outcome: done, failed (protocol version, cipher, no TLS, client left), "
    "timeout (after 10 s), too_many (all connections had requests), evicted (closed for a new connection).",
    ["outcome"],
)
TLS_STALE = Gauge(
    "conserve_tls_stale",
    "1 while the files of the certificate are missing or wrong: the one read before is in use, and the log "
    "says what is wrong.",
)
TLS_EXPIRES = Gauge(
    "conserve_tls_expires_timestamp_seconds", "When the certificate in use expires; 0 without TLS."
)
ENGINE_CONNECTION_PROBLEMS = Counter(
    "conserve_engine_connection_problems_total",
    "connect_failed, none_free (all stayed in use), found_dead (a kept-alive one; the request went again).",
    ["problem"],
)
ENGINE_KV_TOKENS = Gauge(
    "conserve_engine_kv_tokens",
    "Tokens of KV on an engine as last pushed by the directory: in_use (live and reserved), live, parked, "
    "offline, free; and of its host memory for KV: host_used, host_free.",
    ["engine", "kind"],
)
ENGINE_CONVERSATIONS = Gauge("conserve_engine_conversations", "Conversations bound to an engine.", ["engine"])

from_zero(CONVERSATIONS_ENDED, "deleted", "final", "idle", "failed_first_turn", "gateway_lost", "undelivered")
from_zero(
    *(PROMPTS_PLACED, "finishes_first", "has_prefix", "sooner_on_decoder"),
    *("prefillers_saturated", "last_resort"),
)
from_zero(IDENTIFIED, "explicit", "continued", "retried", "forked", "new")
from_zero(REFUSALS, "no_capacity", "saturated", "too_large", "no_decoder", "no_prefiller", "no_directory")
from_zero(LIMITED, "requests_per_minute", "tokens_per_minute", "turns", "requests_at_once", "bytes_at_once")
from_zero(REDISAGGREGATIONS, "transferred", "local")
from_zero(
    PREFIX_BROKEN_TOKENS,
    *("changed_tools", "edited_history", "stripped_reasoning", "rerendered_tool_call", "retokenised_output"),
)
from_zero(RESTORES_AHEAD, "restored", "gone", "not_parked", "returned", "busy", "failed")
from_zero(TRACES_DROPPED, "queue_full", "not_taken")
from_zero(FALLBACKS, "prefill_failed", "decoder_lost", "identify_failed", "report_dropped", "stale_binding")
from_zero(STREAMS_CUT, "resumed", "no_place", "set_aside", "cut_again", "refused", "not_lined")
from_zero(ANSWERS, "kept", "pruned", "failed", "late")
from_zero(TLS_HANDSHAKES, "done", "failed", "timeout", "too_many", "evicted")
from_zero(TURNS, "complete", "client_gone", "broken", "failed", "refused")


@cache
def labelled(metric: _Metric, *labels: str) -> _Metric:
    """`metric.labels(...)` for what every turn counts: remembered, at a tenth of the cost."""
    return metric.labels(*labels)


class HttpCounts:
    """The HTTP layer's own counts as metrics, brought over when they are asked for."""

    def __init__(
        self, server: "Server", pool: "UpstreamPool", certificate: "Certificate | None" = None
    ) -> None:
        self._server = server
        self._pool = pool
        self._certificate = certificate
        self._brought: dict[tuple[Counter, str], int] = {}

    def bring(self) -> None:
        server, pool = self._server.stats, self._pool.stats
        CLIENT_CONNECTIONS.set(server.connections)
        ENGINE_CONNECTIONS.set(pool.connections)
        self._raise(HTTP_REFUSALS, server.refusals)
        self._raise(CLIENT_TIMEOUTS, server.timeouts)
        self._raise(TLS_HANDSHAKES, server.handshakes)
        if self._certificate is not None:
            TLS_STALE.set(self._certificate.stale)
            TLS_EXPIRES.set(self._certificate.expires.timestamp())
        engine = {
            "connect_failed": pool.connect_failures,
            "none_free": pool.acquire_timeouts,
            "found_dead": pool.stale_retries,
        }
        self._raise(ENGINE_CONNECTION_PROBLEMS, engine)

    def _raise(self, counter: Counter, counts: Mapping[str, int]) -> None:
        for label, count in counts.items():
            counter.labels(label).inc(count - self._brought.get((counter, label), 0))
            self._brought[counter, label] = count
