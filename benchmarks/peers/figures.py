"""Figures of a run: one row a play, medians of rounds, and ratios to the best peer of the same round."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traces.replay import Replay, summarise
from traces.replay.results import PlayOutcome

OURS = "ours"
BAD_SHARE = 0.05  # of its conversations that a peer may fail before its times say nothing


@dataclass(frozen=True)
class PeerRow:
    """What one contender took for one trace in one round, seconds, tools and people left out."""

    contender: str
    trace: str
    round: int
    peer: bool
    conversations: int
    failed: int
    refused: int  # answers of 429 or 503; the client came again
    ttfet_p50_s: float
    ttfet_p95_s: float
    first_ttft_p50_s: float
    first_ttft_p95_s: float
    later_ttft_p95_s: float
    e2e_p95_s: float
    gap_p99_s: float  # over answers, of the longest time between two pieces of text
    recomputed_tokens: int
    cpu_s: float  # of its engines, router and all that stands beside them
    others_cpu_s: float  # of everybody else on the machine: how quiet it was
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


def row(
    contender: str,
    trace: str,
    turn: int,
    peer: bool,
    run: Replay,
    cpu_s: Mapping[str, float],
    others_cpu_s: float,
) -> PeerRow:
    summary = summarise(run)

    def at(name: str, percentile: int) -> float:
        found = summary.spreads.get(name)
        return found.at(percentile) if found else float("nan")

    failed = sum(one.outcome is not PlayOutcome.DONE for one in run.conversations)
    return PeerRow(
        *(contender, trace, turn, peer, len(run.conversations), failed, summary.refusals),
        *(at("ttfet_served", 50), at("ttfet_served", 95)),
        *(at("ttft_first_turn", 50), at("ttft_first_turn", 95), at("ttft_later_turns", 95)),
        *(at("e2e_served", 95), at("longest_gap", 99)),
        recomputed_tokens=summary.recomputed_tokens or 0,
        cpu_s=sum(seconds for kind, seconds in cpu_s.items() if kind != "player"),
        others_cpu_s=others_cpu_s,
        cpu_by_kind={kind: round(seconds, 1) for kind, seconds in cpu_s.items()},
    )


def medians(rows: Iterable[PeerRow]) -> dict[str, dict[str, dict[str, float]]]:
    """By trace and contender, over rounds; failures and refusals are summed."""
    by: dict[str, dict[str, list[PeerRow]]] = {}
    for one in rows:
        by.setdefault(one.trace, {}).setdefault(one.contender, []).append(one)
    return {
        trace: {
            contender: {name: statistics.median(getattr(one, name) for one in played) for name in TIMES}
            | {
                name: sum(getattr(one, name) for one in played)
                for name in ("conversations", "failed", "refused", "recomputed_tokens")
            }
            for contender, played in contenders.items()
        }
        for trace, contenders in by.items()
    }


def by_round(rows: Sequence[PeerRow]) -> dict[str, dict[str, list[float]]]:
    """By figure and trace, ours to the best peer's in each round; nothing where no peer ran."""
    traces = dict.fromkeys(one.trace for one in rows)
    return {
        name: {
            trace: ratios
            for trace in traces
            if (ratios := [*_ratios([one for one in rows if one.trace == trace], field)])
        }
        for name, field in RATIOS.items()
    }


def named(rows: Sequence[PeerRow], lost: int = 0) -> dict[str, float | None]:
    """Ratios are medians of the rounds' own; of the traces, the worst. None: no peer ran.

    `lost`: conversations of plays that ours did not end; they have no row.
    """
    worst: dict[str, float | None] = {}
    for name, traces in by_round(rows).items():
        found = [statistics.median(ratios) for ratios in traces.values()]
        worst[name] = round(max(found), 3) if found else None
    ours = [one for one in rows if one.contender == OURS]
    failed = lost + sum(one.failed for one in ours)
    return worst | {"failed": failed, "refused": sum(one.refused for one in ours)}


def _ratios(rows: Sequence[PeerRow], field: str) -> Iterable[float]:
    for turn in dict.fromkeys(one.round for one in rows):
        ours = [one for one in rows if one.round == turn and one.contender == OURS]
        peers = [one for one in rows if one.round == turn and one.peer and _counts(one)]
        if ours and peers:
            yield getattr(ours[0], field) / max(min(getattr(one, field) for one in peers), 1e-6)


def _counts(peer: PeerRow) -> bool:
    return peer.failed <= BAD_SHARE * peer.conversations


def failures(table: Mapping[str, Mapping[str, Mapping[str, float]]], lost: int = 0) -> dict[str, int]:
    """Of each contender, over traces and rounds; `lost` of ours as above."""
    found = {OURS: lost} if lost else {}
    for contenders in table.values():
        for contender, figures in contenders.items():
            found[contender] = found.get(contender, 0) + int(figures["failed"])
    return found
