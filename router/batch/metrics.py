"""Declares the metrics of offline work."""

from prometheus_client import Counter, Gauge, Histogram

from router.metrics import from_zero

BACKLOG = Gauge(
    "conserve_batch_backlog_requests",
    "Requests of running batches without a result, by state: pending or in flight.",
    ["state"],
)
BATCHES_LIVE = Gauge("conserve_batch_live_batches", "Unfinished batches, by status.", ["status"])
BATCHES_ENDED = Counter("conserve_batch_ended_batches", "Finished batches, by final status.", ["status"])
OLDEST_AGE = Gauge(
    "conserve_batch_oldest_age_seconds",
    "Age of the oldest running batch with work left; 0 without one.",
)
NEAREST_DEADLINE = Gauge(
    "conserve_batch_nearest_deadline_seconds",
    "Time left to the running batch with the earliest deadline; 0 without one.",
)
IN_FLIGHT = Gauge("conserve_batch_in_flight_requests", "Offline requests at engines.", ["engine"])
TRIES = Counter(
    "conserve_batch_tries", "Offline requests sent to engines, by outcome of the attempt.", ["outcome"]
)
SET_ASIDE = Counter(
    "conserve_batch_set_aside_requests",
    "Requests given up after the allowed number of attempts; the batch's error file has the reason.",
)
HARVESTED = Counter(
    "conserve_batch_harvested_tokens",
    "Tokens of finished offline work by kind: prompt (not cached), cached, output.",
    ["kind"],
)
LOST = Counter(
    "conserve_batch_lost_tokens",
    "Estimated tokens of offline attempts without a result, by cause: engine_lost, error, cancelled. "
    "Close to zero in normal operation.",
    ["cause"],
)
REQUEUED = Counter(
    "conserve_batch_requeued_requests",
    "Requests that were in flight when the batch process ended, queued again at its next start.",
)
DUPLICATES = Counter(
    "conserve_batch_late_results",
    "Results that were discarded because the line already had a result or its batch was closed.",
)
COMMIT_SECONDS = Histogram(
    "conserve_batch_commit_seconds",
    "Time to make a group of results durable.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
FLEX = Counter("conserve_batch_flex_requests", "Requests of service tier flex, by outcome.", ["outcome"])
URGENT = Counter(
    "conserve_batch_urgent_dispatches",
    "Requests sent before those of owners that were served less, because their deadline is close.",
)
STEP_ERRORS = Counter(
    "conserve_batch_step_errors",
    "Failed steps of the dispatcher, which are repeated, by cause: store (the database or the files) or "
    "fault (an internal error).",
    ["cause"],
)

from_zero(BATCHES_ENDED, "completed", "failed", "expired", "cancelled")
from_zero(
    TRIES, "answered", "busy", "error", "unreachable", "engine_lost", "timeout", "shares_layers", "fault"
)
from_zero(HARVESTED, "prompt", "cached", "output")
from_zero(LOST, "engine_lost", "error", "cancelled")
from_zero(FLEX, "served", "client_left", "no_capacity")
from_zero(STEP_ERRORS, "store", "fault")
