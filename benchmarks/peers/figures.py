"""Figures of `benchmarks.peers`: rows of plays, their medians, and ratios to a round's best peer."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traces.replay import Replay, summarise
from traces.replay.results import PlayOutcome

OURS = "ours"
MOST_FAILED = 0.05  # share of conversations; the times of a peer that fails more do not count


@dataclass(frozen=True)
class PeerRow:
    """Figures of one contender for one trace in one round, in seconds, without tools and people."""

    contender: str
    trace: str
    round: int
    peer: bool
    conversations: int
    failed: int
    refused: int  # answers of 429 or 503, which the client repeats
    ttfet_p50_s: float
    ttfet_p95_s: float
    first_ttft_p50_s: float
    first_ttft_p95_s: float
    later_ttft_p95_s: float
    e2e_p95_s: float
    gap_p99_s: float  # over answers, of the longest time between two pieces of text
    recomputed_tokens: int
    cpu_s: float  # of engines, router and all helpers
    others_cpu_s: float  # of other processes: how quiet the machine was
    cpu_by_kind: Mapping[str, float]


RATIOS = {
    "ttfet_p95_vs_best_peer": "ttfet_p95_s",
    "ttfet_p50_vs_best_peer": "ttfet_p50_s",
    "e2e_p95_vs_best_peer": "e2e_p95_s",
    "gap_p99_vs_best_peer": "gap_p99_s",
    "later_ttft_p95_vs_best_peer": "later_ttft_p95_s",
    "cpu_vs_best_peer": "cpu_s",
}
TIMES = tuple(name for name in PeerRow.__dataclass_fields__ if name.endswith("_s"))
SUMS = ("conversations", "failed", "refused", "recomputed_tokens")
Table = dict[str, dict[str, dict[str, float]]]  # by trace, contender and figure


def row(
    contender: str,
    trace: str,
    number: int,
    peer: bool,
    run: Replay,
    cpu_s: Mapping[str, float],
    others_cpu_s: float,
) -> PeerRow:
    summary = summarise(run)

    def at(name: str, percentile: int) -> float:
        found = summary.spreads.get(name)
        return found.at(percentile) if found else float("nan")

    return PeerRow(
        *(contender, trace, number, peer),
        conversations=len(run.conversations),
        failed=sum(one.outcome is not PlayOutcome.DONE for one in run.conversations),
        refused=summary.refusals,
        ttfet_p50_s=at("ttfet_served", 50),
        ttfet_p95_s=at("ttfet_served", 95),
        first_ttft_p50_s=at("ttft_first_turn", 50),
        first_ttft_p95_s=at("ttft_first_turn", 95),
        later_ttft_p95_s=at("ttft_later_turns", 95),
        e2e_p95_s=at("e2e_served", 95),
        gap_p99_s=at("longest_gap", 99),
        recomputed_tokens=summary.recomputed_tokens or 0,
        cpu_s=sum(seconds for kind, seconds in cpu_s.items() if kind != "player"),
        others_cpu_s=others_cpu_s,
        cpu_by_kind={kind: round(seconds, 1) for kind, seconds in cpu_s.items()},
    )


def medians(rows: Iterable[PeerRow]) -> Table:
    """Return medians over rounds; failures, refusals and recomputed tokens are summed."""
    by: dict[str, dict[str, list[PeerRow]]] = {}
    for one in rows:
        by.setdefault(one.trace, {}).setdefault(one.contender, []).append(one)
    return {
        trace: {
            contender: {name: statistics.median(getattr(one, name) for one in played) for name in TIMES}
            | {name: sum(getattr(one, name) for one in played) for name in SUMS}
            for contender, played in contenders.items()
        }
        for trace, contenders in by.items()
    }


def by_round(rows: Sequence[PeerRow]) -> dict[str, dict[str, list[float]]]:
    """Return ratios of our fleet to the best peer, by figure and trace, for each round with a peer."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in RATIOS}
    for trace in dict.fromkeys(one.trace for one in rows):
        for number in dict.fromkeys(one.round for one in rows):
            played = [one for one in rows if (one.trace, one.round) == (trace, number)]
            ours = [one for one in played if one.contender == OURS]
            peers = [one for one in played if one.peer and one.failed <= MOST_FAILED * one.conversations]
            for name, field in RATIOS.items() if ours and peers else ():
                best = max(min(getattr(one, field) for one in peers), 1e-6)
                found[name].setdefault(trace, []).append(getattr(ours[0], field) / best)
    return found


def named(rows: Sequence[PeerRow], lost: int = 0) -> dict[str, float | None]:
    """Return each figure's median ratio for the worst trace; None if no peer ran.

    `lost` counts conversations of plays that ours did not end; they have no row.
    """
    worst: dict[str, float | None] = {}
    for name, traces in by_round(rows).items():
        found = [statistics.median(ratios) for ratios in traces.values()]
        worst[name] = round(max(found), 3) if found else None
    ours = [one for one in rows if one.contender == OURS]
    failed = lost + sum(one.failed for one in ours)
    return worst | {"failed": failed, "refused": sum(one.refused for one in ours)}


def failures(table: Table, lost: int = 0) -> dict[str, int]:
    """Return the number of failed conversations of each contender, over all traces and rounds."""
    found = {OURS: lost} if lost else {}
    for contenders in table.values():
        for contender, figures in contenders.items():
            found[contender] = found.get(contender, 0) + int(figures["failed"])
    return found
