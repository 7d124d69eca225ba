"""The replay's TTFT, TBT, TTFET and E2E equal the server's, within the noise of a shared machine."""

import statistics

import pytest

from tests.traces.replay.engine import PlayedEngine
from tests.traces.replay.workload import CountingObserver, agent
from traces.replay import Replay, ReplayOptions, replay, summarise
from traces.replay.results import PlayOutcome

pytestmark = pytest.mark.slow

NEAR_S = 0.012  # client and server share a process; half of all turns must be this near
FAR_S = 0.08  # what a busy machine may do to one of them


async def played(engine: PlayedEngine, *conversations: object, **options: object) -> Replay:
    chosen = ReplayOptions(url=engine.url, **{"probes": 0, "time_limit_s": 20.0, **options})  # type: ignore[arg-type]
    return await replay(conversations, chosen, CountingObserver())  # type: ignore[arg-type]


async def test_ttft_and_tbt_of_every_turn_equal_those_of_the_server() -> None:
    async with PlayedEngine().running() as engine:
        run = await played(engine, agent("a", out=16, wait=0.01))
    (result,) = run.conversations
    assert result.outcome is PlayOutcome.DONE
    assert len(result.turns) == len(engine.seen) == 4
    errors = []
    for turn, seen in zip(result.turns, engine.seen, strict=True):
        errors.append(abs(turn.ttft_s - (seen.first_at - seen.at)))
        served = (seen.last_at - seen.first_at) / 15
        assert turn.tbt_s == pytest.approx(served, abs=FAR_S / 15)
        assert turn.output_tokens == 16
        assert turn.prompt_tokens == seen.prompt_tokens
    assert statistics.median(errors) < NEAR_S
    assert max(errors) < FAR_S
    between = statistics.median(turn.tbt_s or 0.0 for turn in result.turns)
    assert between == pytest.approx(engine.step_s, rel=0.25)


async def test_ttfet_and_e2e_count_from_arrival_and_serving_time_excludes_tools() -> None:
    async with PlayedEngine().running() as engine:
        run = await played(engine, agent("a", turns=3, wait=0.1))
    (result,) = run.conversations
    first, *_, last = engine.seen
    assert result.ttfet_s == pytest.approx(last.first_at - first.at, abs=FAR_S)
    assert result.e2e_s == pytest.approx(last.last_at - first.at, abs=FAR_S)
    assert result.served_e2e_s == pytest.approx(result.e2e_s - 0.2)
    assert result.served_ttfet_s == pytest.approx(result.ttfet_s - 0.2)
    assert result.last_turn_tbt_s == result.turns[-1].tbt_s


async def test_the_fit_of_unloaded_latency_finds_the_servers_own_constants() -> None:
    sizes = [
        agent(str(n), arrival=0.02 * n, first=100 + 400 * n, turns=2, append=50, out=5, wait=0.0)
        for n in range(4)
    ]
    async with PlayedEngine(fixed_s=0.06, per_token_s=0.0005).running() as engine:
        run = await played(engine, *sizes, probes=3)
    alone = run.unloaded
    assert alone is not None
    steps = [(seen.last_at - seen.first_at) / 4 for seen in engine.seen]
    turn = run.conversations[-1].turns[0]
    assert 0.8 * min(steps) <= alone.tbt_s(turn) <= 1.25 * max(steps)
    constants = engine.fixed_s + engine.per_token_s * turn.new_tokens
    assert alone.ttft_s(turn) == pytest.approx(constants, rel=0.35)  # without its slope it would be a third


async def test_warm_up_probes_and_replay_share_no_prefix() -> None:
    async with PlayedEngine().running() as engine:
        await played(engine, agent("a", turns=1), probes=1)
    warm_up, probe, replayed = engine.seen
    assert [seen.new_tokens for seen in (warm_up, probe, replayed)] == pytest.approx([400] * 3, abs=12)


async def test_only_a_server_that_slows_under_load_violates_its_targets() -> None:
    class Slowing(CountingObserver):
        def __init__(self, engine: PlayedEngine, factor: float) -> None:
            super().__init__()
            self._engine, self._factor = engine, factor

        def phase(self, name: str, conversations: int) -> None:
            if name == "replay":
                self._engine.fixed_s *= self._factor
                self._engine.per_token_s *= self._factor
                self._engine.step_s *= self._factor

    conversations = [agent(f"{n}", arrival=0.02 * n, out=4, turns=2, first=200) for n in range(3)]
    for factor, share in ((9.0, 1.0), (1.0, 0.0)):
        async with PlayedEngine(fixed_s=0.03, step_s=0.015).running() as engine:
            options = ReplayOptions(url=engine.url, probes=2, time_limit_s=20.0)
            summary = summarise(await replay(conversations, options, Slowing(engine, factor)))
        assert set(summary.objectives) == {"ttfet", "last_turn_tbt", "e2e"}
        for objective in summary.objectives.values():
            assert objective.judged == 3
            assert objective.violation_share == share
            assert factor / 2.0 < objective.geometric_mean < factor * 3.0


async def test_a_replay_counts_the_tokens_that_the_server_computed_again() -> None:
    async with PlayedEngine().running() as engine:

        class Forgetting(CountingObserver):
            def answered(self, turn: object) -> None:
                engine.cache.clear()

        options = ReplayOptions(url=engine.url, probes=0, time_limit_s=20.0)
        forgot = summarise(await replay([agent("a")], options, Forgetting()))
        kept = summarise(await replay([agent("b")], options, CountingObserver()))
    assert forgot.recomputed_tokens == pytest.approx(406 + 472 + 538, rel=0.05)
    assert kept.recomputed_tokens is not None
    assert kept.recomputed_tokens < 60  # the template's frames around answers
