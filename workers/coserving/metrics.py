"""What a co-serving engine counts. vLLM's front end serves these at `/metrics` (kvtransfer/vllm_stats.py)."""

from collections.abc import Mapping
from types import MappingProxyType

from kvtransfer.metrics import CounterSpec, HistogramSpec

ROWS = ("online", "offline", "mixed")

COUNTERS: Mapping[str, CounterSpec] = MappingProxyType(
    {
        "coserving_iterations": CounterSpec(
            "conserve_coserving_iterations",
            "Iterations that ended, by the rows in them: online, offline, mixed.",
            "rows",
            ROWS,
        ),
        "coserving_seconds": CounterSpec(
            "conserve_coserving_seconds",
            "Time of iterations that were not aborted, by the rows in them.",
            "rows",
            ROWS,
        ),
        "coserving_predicted_seconds": CounterSpec(
            "conserve_coserving_predicted_seconds",
            "What the latency model had predicted for the iterations in conserve_coserving_seconds.",
            "rows",
            ROWS,
        ),
        "coserving_aborted_seconds": CounterSpec(
            "conserve_coserving_aborted_seconds", "Time of iterations that were aborted."
        ),
        "coserving_signals": CounterSpec(
            "conserve_coserving_signals", "Arrivals for which the running iteration was to be aborted."
        ),
        "coserving_unjudged": CounterSpec(
            "conserve_coserving_unjudged_arrivals",
            "Arrivals that waited for the running iteration because judging them failed; the log has it. "
            "0 is right.",
        ),
        "coserving_aborts": CounterSpec(
            "conserve_coserving_aborts", "Iterations left at a safepoint and rolled back."
        ),
        "coserving_disowned_blocks": CounterSpec(
            "conserve_coserving_disowned_blocks", "Blocks that roll-backs took out of the prefix cache again."
        ),
        "coserving_preemptions": CounterSpec(
            "conserve_coserving_preemptions", "Offline requests that gave their memory to online ones."
        ),
        "coserving_online_tokens": CounterSpec(
            "conserve_coserving_online_tokens", "Online tokens computed, in iterations that were not aborted."
        ),
        "coserving_offline_tokens": CounterSpec(
            "conserve_coserving_offline_tokens",
            "Offline tokens computed, in iterations that were not aborted.",
        ),
        "coserving_budget_tokens": CounterSpec(
            "conserve_coserving_budget_tokens",
            "Offline tokens that iterations had room for, by the latency model and the tightest promise.",
        ),
        "coserving_offline_tokens_lost": CounterSpec(
            "conserve_coserving_offline_tokens_lost",
            "Offline tokens whose work was thrown away, by cause: abort (an iteration left at a safepoint), "
            "preemption (computed again, because neither the host nor the prefix cache held them).",
            "cause",
            ("abort", "preemption"),
        ),
        "coserving_late_tokens": CounterSpec(
            "conserve_coserving_late_tokens", "Online tokens made after the time promised for them."
        ),
    }
)

HISTOGRAMS: Mapping[str, HistogramSpec] = MappingProxyType(
    {
        "coserving_abort_wait": HistogramSpec(
            "conserve_coserving_abort_wait_seconds",
            "From the signal of an arrival to the safepoint at which the iteration was left.",
            (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
        ),
        "coserving_model_error": HistogramSpec(
            "conserve_coserving_model_error_ratio",
            "How far the latency model was off, of the time an iteration took; aborted ones are left out.",
            (0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0),
        ),
    }
)
