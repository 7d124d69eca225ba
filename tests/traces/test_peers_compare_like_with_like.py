"""`benchmarks.peers` compares with the best peer of the same round, and names contenders that did not run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.engines import Bench, DoesNotRun, PlainEngines
from benchmarks.peers.capacity import capacity
from benchmarks.peers.contenders import FirstTurnCounts, PeerSetup, Serving, contenders
from benchmarks.peers.figures import RATIOS, TOKENS, PeerRow, failures, medians, named
from benchmarks.peers.loads import BURST, NAMES, REAL, Play, traces
from benchmarks.peers.peer_run import PeerRun
from deploy.fleet import load_fleet
from traces import ReplayError
from traces.format import TurnEnding
from traces.replay.results import ConversationResult, MeterReading, PlayOutcome, Replay, TurnResult

REPOSITORY = Path(__file__).parents[2]


def a_row(
    contender: str, seconds: float, turn: int = 0, trace: str = "real", failed: int = 0, load: float = 0.8
) -> PeerRow:
    peer = not contender.startswith("ours")
    times = [seconds] * 7
    return PeerRow(
        contender, trace, load, turn, peer, 20, failed, 0, *times, 5, 100 / seconds, seconds, 0.0, {}
    )


def test_each_round_is_compared_with_its_best_peer_and_the_worst_ratio_is_reported() -> None:
    rows = [
        *(a_row("ours", 2.0, turn) for turn in range(3)),
        *(a_row("slow", 9.0, turn) for turn in range(3)),
        *(a_row("quick", seconds, turn) for turn, seconds in enumerate((1.0, 2.0, 4.0))),
        a_row("ours", 3.0, load=1.5),
        a_row("quick", 2.0, load=1.5),
        a_row("ours", 3.0, trace="burst", load=2.0),
        a_row("quick", 2.5, trace="burst", load=2.0),
    ]
    found = named(rows)
    assert [found[name] for name in RATIOS] == [1.5] * len(RATIOS), "at 1.5, not the median of 2, 1, 0.5"
    assert found[TOKENS] == 0.667, "the lowest one, and only beyond the capacity"
    assert named(rows[:9])[TOKENS] is None
    assert found["failed"] == 0
    assert medians(rows)["real at 0.8"]["quick"]["ttfet_p95_s"] == 2.0
    assert medians(rows)["real at 0.8"]["quick"]["recomputed_tokens"] == 15


def test_a_variant_of_ours_is_compared_with_the_same_peers() -> None:
    rows = [a_row("ours", 2.0), a_row("ours, roles: elastic", 1.0), a_row("quick", 2.0)]
    assert named(rows)["ttfet_p95_vs_best_peer"] == 1.0
    assert named(rows, ours="ours, roles: elastic")["ttfet_p95_vs_best_peer"] == 0.5


def test_averages_of_first_turn_shares_count_only_plays_with_new_conversations() -> None:
    rows = [replace(a_row("ours", 2.0), prefiller_share=share, least_kv_share=1.0) for share in (0.2, 0.4)]
    rows.append(replace(a_row("ours", 2.0, trace="mix"), prefiller_share=None, least_kv_share=0.4))
    found = named(rows)
    assert found["prefiller_share_real"] == 0.3
    assert found["prefiller_share_mix"] is None
    assert found["least_kv_share"] == 0.8
    counts = FirstTurnCounts(10.0, 4.0, 9.0).since(FirstTurnCounts(2.0, 2.0, 1.0))
    assert (counts.share(counts.on_prefillers), counts.share(counts.least_kv)) == (0.25, 1.0)
    assert FirstTurnCounts(0.0, 0.0, 0.0).share(0.0) is None


def test_a_peer_that_fails_conversations_is_left_out_of_the_comparison() -> None:
    rows = [a_row("ours", 2.0), a_row("fails", 0.1, failed=2), a_row("serves", 4.0, failed=1)]
    assert named(rows)["ttfet_p95_vs_best_peer"] == 0.5
    assert named(rows[:2])["ttfet_p95_vs_best_peer"] is None
    assert named([replace(rows[0], failed=3)])["failed"] == 3


def test_our_own_variants_are_not_peers_and_a_missing_peer_is_reported(tmp_path: Path) -> None:
    bench = Bench(load_fleet(REPOSITORY / "configs" / "random.yaml"), tmp_path, tmp_path, 1.0)
    everyone = contenders(bench, PlainEngines(bench))
    assert [one.name for one in everyone if not one.peer] == [
        "ours",
        "ours, roles: elastic",
        "ours, first_turns: prefiller",
    ]
    for contender in everyone:
        if contender.peer:
            with pytest.raises(DoesNotRun, match="not installed"), contender.start():
                pass


def a_run(everyone: list[PeerSetup], loads: tuple[float, ...] = (0.8, 1.5)) -> PeerRun:
    run = PeerRun(traces([REAL], quick=True), loads, "model", 1.0)
    run.plays = [[run.traces[0].at(load, 1.0) for load in loads]]
    return run


def test_unfinished_plays_of_ours_count_as_failed_and_the_next_trace_runs() -> None:
    started: list[str] = []

    def fails(name: str) -> PeerSetup:
        def start() -> AbstractContextManager[Serving]:
            started.append(name)
            raise DoesNotRun("it fell over")

        return PeerSetup(name, start, peer=name != "ours")

    everyone = [fails("ours"), fails("quick")]
    run = a_run(everyone)
    for number in range(2):
        run.round(number, everyone)
    assert started.count("ours") == 2 and started.count("quick") == 1, "a peer that does not run is left out"
    assert run.lost == 2 * 2 * 10, "two rounds of two loads"
    assert run.skipped == {
        "ours": "round 1, real at 0.8: it fell over",
        "quick": "round 0, real at 0.8: it fell over",
    }
    assert named([a_row("ours", 2.0, failed=1)], run.lost)["failed"] == 41
    table = medians([a_row("ours", 2.0, failed=1), a_row("slow", 2.0)])
    assert failures(table, run.lost) == {"ours": 41, "slow": 0}
    assert failures(table) == {"ours": 1, "slow": 0}


def test_a_contender_that_fails_at_one_load_skips_later_loads_and_keeps_earlier_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.peers.peer_run.SETTLE_S", 0.0)
    ours = PeerSetup("ours", lambda: nullcontext(Serving("http://nowhere", {})), peer=False)
    run = a_run([ours], loads=(0.5, 0.8, 1.5))
    monkeypatch.setattr(run, "warm_up", lambda serving: None)

    def play(number: int, contender: PeerSetup, serving: Serving, one: Play) -> None:
        if one.load > 0.5:
            raise ReplayError("the engine ended")

    monkeypatch.setattr(run, "play", play)
    run.round(0, [ours])
    assert run.lost == 2 * 10
    assert run.skipped == {"ours": "round 0, real at 0.8: the engine ended"}


def test_measured_capacity_leaves_out_the_end_where_few_conversations_run() -> None:
    def turn(answered_s: float) -> TurnResult:
        return TurnResult(TurnEnding.END_OF_TURN, 0.0, 0.0, 0.1, answered_s, 90, 90, 10, None, 0.0, 0)

    ends = (*range(1, 10), 100.0)
    played = tuple(
        ConversationResult(f"c{at}", 0.0, 0.0, PlayOutcome.DONE, 0, (turn(float(at)),)) for at in ends
    )
    run = Replay("", "", "", "", {}, 100.0, 4.0, "", 5.0, None, MeterReading(), played)
    found = capacity("real", "quick", run)
    assert (found.tokens_per_s, found.conversations_per_s) == (100.0, 1.0)
    with pytest.raises(ReplayError, match="served nothing"):
        capacity("real", "quick", replace(run, conversations=()))


def test_a_trace_has_the_same_conversations_at_every_load_and_arrivals_in_proportion() -> None:
    assert [trace.name for trace in traces(NAMES, quick=False)] == list(NAMES)
    for trace in traces(NAMES, quick=True):
        slow, fast = trace.at(0.5, 0.4), trace.at(2.0, 0.4)
        assert [one.id for one in slow.conversations] == [one.id for one in fast.conversations]
        assert len(slow.conversations) == 10
        arrivals = [one.arrival_s for one in slow.conversations]
        assert arrivals == sorted(arrivals)
        if trace.name != BURST:
            assert arrivals == pytest.approx([4 * one.arrival_s for one in fast.conversations], abs=1e-4)
        assert {one.arrival_s for one in trace.at_once()} == {0.0}
        assert not any(turn.wait_s for one in trace.at_once() for turn in one.turns)
    (given,) = traces([str(REPOSITORY / "traces" / "samples" / "laptop.jsonl.gz")], quick=False)
    assert given.name == "laptop" and len(given.conversations) == 24
