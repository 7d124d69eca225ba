"""Computes the figures of `benchmarks.peers`.

These are a row for each contender, trace, load and round; medians; and ratios to the best peer of a round.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.contenders import FirstTurnCounts
from benchmarks.peers.loads import MIX, REAL, Play
from traces.replay import Replay, summarise
from traces.replay.results import PlayOutcome

OURS = "ours"
BEYOND = 1.0  # share of the capacity above which tokens per second are compared
MOST_FAILED = 0.05  # a peer's times do not count if a greater share of its conversations failed


@dataclass(frozen=True)
class PeerRow:
    """Figures of one contender with one trace at one load in one round.

    Times leave out the waits for tools and people.
    """

    contender: str
    trace: str
    load: float  # share of the capacity of plain vLLM behind the best router
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
    gap_p99_s: float  # P99 over answers of the longest time between two pieces of text
    recomputed_tokens: int
    tokens_per_s: float  # new prompt tokens and output, until the last answer
    cpu_s: float  # of engines, router and all helpers
    others_cpu_s: float  # of other processes: how quiet the machine was
    cpu_by_kind: Mapping[str, float]
    # Shares of the conversations that our fleet bound in this play; None if none were counted.
    prefiller_share: float | None = None  # first prompts that a prefiller computed
    least_kv_share: float | None = None  # on the decoder with the least KV in use

    @property
    def play(self) -> str:
        return f"{self.trace} at {self.load:g}"


RATIOS = {
    "ttfet_p95_vs_best_peer": "ttfet_p95_s",
    "ttfet_p50_vs_best_peer": "ttfet_p50_s",
    "e2e_p95_vs_best_peer": "e2e_p95_s",
    "gap_p99_vs_best_peer": "gap_p99_s",
    "later_ttft_p95_vs_best_peer": "later_ttft_p95_s",
    "cpu_vs_best_peer": "cpu_s",
}
TOKENS = "tokens_per_s_vs_best_peer"  # for loads above the capacity; the only figure where more is better
TIMES = tuple(name for name in PeerRow.__dataclass_fields__ if name.endswith("_s"))
SUMS = ("conversations", "failed", "refused", "recomputed_tokens")
Table = dict[str, dict[str, dict[str, float]]]  # by play, contender and figure


def row(
    contender: str,
    played: Play,
    number: int,
    peer: bool,
    run: Replay,
    cpu_s: Mapping[str, float],
    others_cpu_s: float,
    bound: FirstTurnCounts | None = None,
) -> PeerRow:
    summary = summarise(run)

    def at(name: str, percentile: int) -> float:
        found = summary.spreads.get(name)
        return found.at(percentile) if found else float("nan")

    ends = [turn.answered_s for one in run.conversations for turn in one.turns]
    return PeerRow(
        *(contender, played.trace, played.load, number, peer),
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
        tokens_per_s=(summary.new_tokens + summary.output_tokens) / max(ends, default=float("inf")),
        cpu_s=sum(seconds for kind, seconds in cpu_s.items() if kind != "player"),
        others_cpu_s=others_cpu_s,
        cpu_by_kind={kind: round(seconds, 1) for kind, seconds in cpu_s.items()},
        prefiller_share=bound.share(bound.on_prefillers) if bound else None,
        least_kv_share=bound.share(bound.least_kv) if bound else None,
    )


def medians(rows: Iterable[PeerRow]) -> Table:
    """Return a table of each contender's medians over rounds; counts such as failures are summed."""
    by: dict[str, dict[str, list[PeerRow]]] = {}
    for one in rows:
        by.setdefault(one.play, {}).setdefault(one.contender, []).append(one)
    return {
        play: {
            contender: {name: statistics.median(getattr(one, name) for one in played) for name in TIMES}
            | {name: sum(getattr(one, name) for one in played) for name in SUMS}
            for contender, played in contenders.items()
        }
        for play, contenders in by.items()
    }


def by_round(rows: Sequence[PeerRow], ours: str = OURS) -> dict[str, dict[str, list[float]]]:
    """Return the ratios of our fleet `ours` to each round's best peer, by figure and play."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in (*RATIOS, TOKENS)}
    for play in dict.fromkeys(one.play for one in rows):
        for number in dict.fromkeys(one.round for one in rows):
            played = [one for one in rows if (one.play, one.round) == (play, number)]
            mine = [one for one in played if one.contender == ours]
            peers = [one for one in played if one.peer and one.failed <= MOST_FAILED * one.conversations]
            if not mine or not peers:
                continue
            for name, field in RATIOS.items():
                best = max(min(getattr(one, field) for one in peers), 1e-6)
                found[name].setdefault(play, []).append(getattr(mine[0], field) / best)
            if mine[0].load > BEYOND:
                most = max(one.tokens_per_s for one in peers)
                found[TOKENS].setdefault(play, []).append(mine[0].tokens_per_s / most)
    return found


def named(rows: Sequence[PeerRow], lost: int = 0, ours: str = OURS) -> dict[str, float | None]:
    """Return the named figures: median ratios, each for its worst play, and shares of first turns.

    A figure is None if it is unknown. `lost` is the number of conversations in plays that our fleet did not
    finish; these plays have no row.
    """
    worst: dict[str, float | None] = {}
    for name, plays in by_round(rows, ours).items():
        found = [statistics.median(ratios) for ratios in plays.values()]
        worst[name] = round((min if name == TOKENS else max)(found), 3) if found else None
    mine = [one for one in rows if one.contender == ours]
    shares = {
        "prefiller_share_real": [one.prefiller_share for one in mine if one.trace == REAL],
        "prefiller_share_mix": [one.prefiller_share for one in mine if one.trace == MIX],
        "least_kv_share": [one.least_kv_share for one in mine],
    }
    for name, values in shares.items():
        known = [value for value in values if value is not None]
        worst[name] = round(statistics.mean(known), 3) if known else None
    failed = lost + sum(one.failed for one in mine)
    return worst | {"failed": failed, "refused": sum(one.refused for one in mine)}


def failures(table: Table, lost: int = 0) -> dict[str, int]:
    """Return the number of failed conversations of each contender, over all plays and rounds."""
    found = {OURS: lost} if lost else {}
    for contenders in table.values():
        for contender, figures in contenders.items():
            found[contender] = found.get(contender, 0) + int(figures["failed"])
    return found
