"""`benchmarks.peers` compares with the best peer of the same round, and names contenders that did not run."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.engines import Bench, DoesNotRun, PlainEngines
from benchmarks.peers.__main__ import PeerRun
from benchmarks.peers.contenders import PeerSetup, contenders
from benchmarks.peers.figures import RATIOS, PeerRow, failures, medians, named
from benchmarks.peers.loads import plays
from deploy.fleet import load_fleet

REPOSITORY = Path(__file__).parents[2]


def a_row(contender: str, seconds: float, turn: int = 0, trace: str = "real", failed: int = 0) -> PeerRow:
    peer = not contender.startswith("ours")
    return PeerRow(contender, trace, turn, peer, 20, failed, 0, *[seconds] * 7, 5, seconds, 0.0, {})


def test_ratios_are_to_the_best_peer_of_the_same_round_and_the_worst_trace_counts() -> None:
    rows = [
        *(a_row("ours", 2.0, turn) for turn in range(3)),
        *(a_row("slow", 9.0, turn) for turn in range(3)),
        *(a_row("quick", seconds, turn) for turn, seconds in enumerate((1.0, 2.0, 4.0))),
        a_row("ours", 3.0, trace="burst"),
        a_row("quick", 2.0, trace="burst"),
    ]
    found = named(rows)
    assert [found[name] for name in RATIOS] == [1.5] * len(RATIOS), "the burst's, not the median of 2, 1, 0.5"
    assert found["failed"] == 0
    assert medians(rows)["real"]["quick"]["ttfet_p95_s"] == 2.0
    assert medians(rows)["real"]["quick"]["recomputed_tokens"] == 15


def test_a_peer_that_fails_conversations_is_not_compared() -> None:
    rows = [a_row("ours", 2.0), a_row("fails", 0.1, failed=2), a_row("serves", 4.0, failed=1)]
    assert named(rows)["ttfet_p95_vs_best_peer"] == 0.5
    assert named(rows[:2])["ttfet_p95_vs_best_peer"] is None
    assert named([replace(rows[0], failed=3)])["failed"] == 3


def test_our_own_variants_are_not_peers_and_a_missing_peer_is_reported(tmp_path: Path) -> None:
    bench = Bench(load_fleet(REPOSITORY / "configs" / "random.yaml"), tmp_path, tmp_path, 1.0)
    everyone = contenders(bench, PlainEngines(bench))
    assert [one.name for one in everyone if not one.peer] == ["ours", "ours, first_turns: prefiller"]
    for contender in everyone:
        if contender.peer:
            with pytest.raises(DoesNotRun, match="not installed"), contender.start():
                pass


def test_an_unfinished_play_of_ours_counts_as_failed_and_the_next_one_runs() -> None:
    started: list[str] = []

    def fails(name: str) -> PeerSetup:
        def start() -> AbstractContextManager[str]:
            started.append(name)
            raise DoesNotRun("it fell over")

        return PeerSetup(name, start, peer=name != "ours")

    run = PeerRun(plays(None, quick=True), "model", 1.0, float("inf"))
    everyone = [fails("ours"), fails("quick")]
    for number in range(2):
        run.round(number, everyone)
    assert started.count("ours") == 2 and started.count("quick") == 1, "a peer that does not run is left out"
    assert run.lost == 2 * 10
    assert run.skipped == {"ours": "round 1, real: it fell over", "quick": "it fell over"}
    assert named([a_row("ours", 2.0, failed=1)], run.lost)["failed"] == 21
    table = medians([a_row("ours", 2.0, failed=1), a_row("slow", 2.0)])
    assert failures(table, run.lost) == {"ours": 21, "slow": 0}
    assert failures(table) == {"ours": 1, "slow": 0}


def test_the_default_traces_are_sample_mix_and_burst() -> None:
    assert [play.name for play in plays(None, quick=False)] == ["real", "paper's mix", "burst"]
    (quick,) = plays(None, quick=True)
    arrivals = [one.arrival_s for one in quick.conversations]
    assert len(arrivals) == 10 and arrivals == sorted(arrivals)
    (given,) = plays(REPOSITORY / "traces" / "samples" / "laptop.jsonl.gz", quick=False)
    assert given.name == "laptop" and len(given.conversations) == 24
