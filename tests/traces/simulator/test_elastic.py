"""On a simulated fleet with elastic placing, running turns keep their TBT target, and no KV leaks."""

from dataclasses import replace

from benchmarks.paper import elastic, workload
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import prompt_seconds
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Pressure
from traces.simulator.metrics import SimulationResult
from traces.simulator.policies import StickyRouting, StickySettings, System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet, profile

TBT_S = 0.05


def play(
    system: System, found: list[TraceConversation], kv_tokens: int = 300_000, **more: float
) -> SimulationResult:
    placer = PlacerSettings(max_prefill_wait_s=1e9, headroom_tokens=64)
    settings = SimulationSettings(SystemSettings(system), placer, Pressure.PARK, tbt_s=TBT_S, **more)  # type: ignore[arg-type]
    return Simulation(fleet(kv_tokens=kv_tokens), settings).run(found)


def arriving(count: int, every_s: float, prompt: int = 12_000, output: int = 200) -> list[TraceConversation]:
    turns = (TraceTurn(prompt, 0, output), TraceTurn(200, prompt + output, output, 0.5))
    return [TraceConversation(f"c{i}", i * every_s, turns) for i in range(count)]


def test_decoders_compute_the_prompts_that_exceed_the_prefillers_rate() -> None:
    found = arriving(120, 0.15)
    ours, paper = play(System.ELASTIC, found), play(System.PREFILLER, found)
    assert ours.totals.transfers < paper.totals.transfers == 120
    assert ours.recorder.turn_ttft and max(ours.ttfet) < max(paper.ttfet) / 2


def test_ten_seconds_after_a_load_spike_answers_are_as_fast_as_before() -> None:
    """The load rises for 20 s from half of a prefiller's rate to three times as much: no turn waits to be
    placed, and ten seconds later first tokens come about as soon as before."""
    alone_s = prompt_seconds(profile().latency, 2048, 12_000)
    times, now = [], 0.0
    for until_s, rate in ((60.0, 0.5), (80.0, 3.0), (140.0, 0.5)):
        while now < until_s:
            times.append(now)
            now += alone_s / rate
    (first,) = arriving(1, 0.0)
    found = [replace(first, id=f"c{number}", arrival_s=at) for number, at in enumerate(times)]
    ours, paper = (play(system, found) for system in (System.ELASTIC, System.PREFILLER))
    assert ours.totals.refused == 0 and ours.totals.gate_wait_s == 0.0
    before = max(ttfet for at, ttfet in zip(times, ours.ttfet, strict=True) if at < 60)
    after = max(ttfet for at, ttfet in zip(times, ours.ttfet, strict=True) if at > 90)
    assert after < 1.5 * before, "within the margin by which a prompt stays on its prefiller"
    assert max(paper.ttfet) > 3 * max(ours.ttfet)


def test_running_turns_keep_their_tbt_target_while_decoders_compute_prompts() -> None:
    result = play(System.ELASTIC, arriving(120, 0.15))
    assert result.recorder.gaps.share_above(TBT_S * 1.001) == 0.0


def test_elastic_placing_follows_the_papers_rule_for_conversations_that_run_alone() -> None:
    found = arriving(20, 100.0)
    ours, paper = play(System.ELASTIC, found), play(System.PREFILLER, found)
    assert (ours.totals.transfers, paper.totals.transfers) == (20, 20)
    assert max(ours.ttfet) <= max(paper.ttfet) * 1.001


def test_a_prefiller_holds_conversations_that_fit_on_no_decoder() -> None:
    """The simulation itself checks that every token, all KV and every second is accounted for."""
    found = arriving(60, 0.02, output=400)
    result = play(System.ELASTIC, found, kv_tokens=60_000)
    assert result.totals.last_resorts > 0
    assert len(result.e2e) == 60


def test_sticky_routing_follows_the_prefix_unless_that_engine_has_too_many_turns() -> None:
    turns = {"a": 0, "b": 0}
    routing = StickyRouting(StickySettings(balance_abs=4), turns)
    assert routing.choose("one", 1_000, 0) == "a"
    assert routing.choose("two", 400, 0) == "b", "it was sent least"
    assert routing.choose("one", 1_200, 1_000) == "a"
    turns["a"] = 4
    assert routing.choose("one", 1_400, 1_200) == "a", "four more are not above the threshold"
    turns["a"] = 5
    assert routing.choose("one", 1_600, 1_400) == "b"
    turns["a"] = 0
    assert routing.choose("one", 1_800, 1_600) == "b", "most of it is there now"
    assert routing.choose("one", 9_000, 1_800) == "a", "too little of it is anywhere: to whom was sent least"


def test_elastic_placing_is_about_as_good_as_the_better_baseline_on_the_papers_mix() -> None:
    """A short run of `python -m benchmarks.paper.elastic`, with wider bounds."""
    found = workload.conversations(workload.PaperMix(conversations=500))
    trace = workload.poisson(found, 1.5)
    rows = [
        elastic.row("load", system.value, elastic.play(system, trace))
        for system in (System.ELASTIC, *elastic.OTHERS)
    ]
    ours, *others = rows
    for field, most in zip(elastic.RATIOS.values(), (1.05, 1.2, 1.4, 1.05), strict=True):
        assert getattr(ours, field) <= most * min(getattr(other, field) for other in others), field
    assert ours.late_share <= 0.001
    assert ours.tokens_per_joule >= 0.99 * max(other.tokens_per_joule for other in others)
