"""A run in a dozen figures."""

from dataclasses import dataclass

import numpy as np

from traces.simulator.metrics import Result, percentile


@dataclass(frozen=True, slots=True)
class Summary:
    system: str
    conversations: int
    refused: int
    abandoned: int
    horizon_s: float
    ttfet_p50_s: float
    ttfet_p95_s: float
    first_turn_ttft_p50_s: float
    first_turn_ttft_p95_s: float
    later_turn_ttft_p50_s: float
    later_turn_ttft_p95_s: float
    last_turn_tbt_p50_s: float
    last_turn_tbt_p95_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    transfers: int
    recomputed_tokens: int
    parked_tokens: int
    through_prefiller_again: int
    gate_wait_mean_s: float
    tokens_per_joule: float
    joules_per_conversation: float
    events: int


def summarise(system: str, result: Result) -> Summary:
    totals, recorder = result.totals, result.recorder
    ttft = np.asarray(recorder.turn_ttft)
    first = np.asarray(recorder.turn_is_first, dtype=bool)
    tbt = result.last_tbt[~np.isnan(result.last_tbt)]
    return Summary(
        system=system,
        conversations=totals.conversations,
        refused=totals.refused,
        abandoned=totals.abandoned,
        horizon_s=totals.horizon_s,
        ttfet_p50_s=percentile(result.ttfet, 50),
        ttfet_p95_s=percentile(result.ttfet, 95),
        first_turn_ttft_p50_s=percentile(ttft[first], 50),
        first_turn_ttft_p95_s=percentile(ttft[first], 95),
        later_turn_ttft_p50_s=percentile(ttft[~first], 50),
        later_turn_ttft_p95_s=percentile(ttft[~first], 95),
        last_turn_tbt_p50_s=percentile(tbt, 50),
        last_turn_tbt_p95_s=percentile(tbt, 95),
        e2e_p50_s=percentile(result.e2e, 50),
        e2e_p95_s=percentile(result.e2e, 95),
        transfers=totals.transfers,
        recomputed_tokens=totals.recomputed_tokens,
        parked_tokens=totals.parked_tokens,
        through_prefiller_again=totals.through_prefiller_again,
        gate_wait_mean_s=totals.gate_wait_s / max(1, totals.conversations),
        tokens_per_joule=totals.tokens_per_joule,
        joules_per_conversation=totals.joules / max(1, totals.conversations),
        events=totals.events,
    )
