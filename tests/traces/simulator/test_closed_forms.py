"""The simulated engine agrees with queueing theory and with plain sums."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.engines import Role
from placement.scheduling.latency_model import BatchWork, LatencyModel
from traces.format import TraceConversation, TraceTurn
from traces.simulator.batch import Iteration
from traces.simulator.engine import EventQueue, SimulatedEngine
from traces.simulator.kv import LiveConversation, Pressure
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

from .conftest import MODEL, one_turn, profile, work

models = st.builds(
    LatencyModel,
    per_token=st.floats(1e-6, 1e-4),
    per_attended=st.floats(0, 1e-8),
    per_context=st.floats(0, 1e-6),
    constant=st.floats(1e-3, 0.1),
)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_waiting_at_a_prefiller_follows_the_md1_queue(load: float) -> None:
    """For equal prompts of one chunk and Poisson arrivals, wait = load x service / (2 (1 - load))."""
    events, random, waits = EventQueue(), Random(7), []
    prompt = 2048
    service = MODEL.seconds(BatchWork.of([(prompt, 0)]))

    def prefilled(engine: SimulatedEngine, live: LiveConversation) -> None:
        waits.append(events.now - live.arrived - service)

    engine = SimulatedEngine("p", profile(), events, Pressure.PIN, prefilled, lambda *_: None)

    def arrive(number: int) -> None:
        live = work(str(number), prompt, left=0)
        live.arrived = events.now
        engine.submit(live)
        if number < 40_000:
            events.at(events.now + random.expovariate(load / service), arrive, number + 1)

    events.at(0.0, arrive, 0)
    events.run()
    assert min(waits) > -1e-9
    assert sum(waits) / len(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)


@given(models, st.lists(st.tuples(st.integers(1, 50_000), st.integers(2, 300)), min_size=1, max_size=8))
def test_the_time_of_many_iterations_equals_the_sum_of_single_iterations(
    model: LatencyModel, rows: list[tuple[int, int]]
) -> None:
    """Many iterations that are advanced together take as long as the same iterations one by one."""
    batch = Iteration(model)
    for number, (context, left) in enumerate(rows):
        batch.join(work(str(number), 0, left, context))
    iterations = batch.until_an_end()
    assert iterations == min(left for _, left in rows)
    one_by_one = sum(
        model.seconds(BatchWork.of((1, context + i) for context, _ in rows)) for i in range(iterations)
    )
    assert batch.seconds(iterations) == pytest.approx(one_by_one, rel=1e-9)


@given(models, st.integers(1, 200), st.integers(0, 10**7), st.floats(0.0001, 100))
def test_the_iterations_until_a_time_are_the_fewest_that_reach_it(
    model: LatencyModel, rows: int, context: int, seconds: float
) -> None:
    batch = Iteration(model)
    batch.turns, batch.context = rows, context
    found = batch.iterations_in(seconds)
    assert batch.seconds(found) >= seconds
    assert found == 1 or batch.seconds(found - 1) < seconds


arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 5_000), st.integers(1, 60)),
    min_size=1,
    max_size=12,
    unique_by=lambda turn: turn[
        0
    ],  # of two at one instant, the first is already running when the second comes
)


@settings(max_examples=40)
@given(arrivals)
def test_simulating_from_change_to_change_equals_simulating_every_iteration(
    turns: list[tuple[float, int, int]],
) -> None:
    jumped = _finish_times(turns)
    stepped = _step_by_step(sorted((at, i, todo, left) for i, (at, todo, left) in enumerate(turns)))
    assert jumped.keys() == stepped.keys()
    for key, time in stepped.items():
        assert jumped[key] == pytest.approx(time, rel=1e-9)


def _finish_times(turns: list[tuple[float, int, int]]) -> dict[int, float]:
    events, finished = EventQueue(), {}

    def done(engine: SimulatedEngine, live: LiveConversation) -> None:
        finished[int(live.key)] = events.now
        engine.kv.retain(live)
        engine.kv.forget(live)

    engine = SimulatedEngine("d", profile(), events, Pressure.PIN, done, done)
    ordered = sorted((at, i, todo, left) for i, (at, todo, left) in enumerate(turns))
    for at, i, todo, left in ordered:
        events.at(at, engine.submit, work(str(i), todo, left))
    events.run()
    return finished


def _step_by_step(turns: list[tuple[float, int, int, int]]) -> dict[int, float]:
    """Simulate the same engine as a loop over iterations."""
    now, finished = 0.0, {}
    pending, waiting, running = list(turns), [], []
    while pending or waiting or running:
        while pending and pending[0][0] <= now:
            _, i, todo, left = pending.pop(0)
            waiting.append([i, todo, 0, left])
        if not waiting and not running:
            now = pending[0][0]
            continue
        rows = [(1, context) for _, _, context, _ in running]
        budget, chunks = 2048 - len(rows), []
        for job in waiting:
            tokens = min(job[1], budget)
            if tokens <= 0:
                break
            budget -= tokens
            chunks.append((job, tokens))
            rows.append((tokens, job[2]))
        now += MODEL.seconds(BatchWork.of(rows))
        for job in running:
            job[2] += 1
            job[3] -= 1
        for job, tokens in chunks:
            job[1] -= tokens
            job[2] += tokens
            if job[1] == 0:
                waiting.remove(job)
                job[3] -= 1
                running.append(job)
        for job in [job for job in running if job[3] == 0]:
            running.remove(job)
            finished[job[0]] = now
    return finished


def test_a_single_prompt_takes_the_sum_of_its_chunks() -> None:
    events, times = EventQueue(), []
    engine = SimulatedEngine(
        "p", profile(), events, Pressure.PIN, lambda *_: times.append(events.now), lambda *_: None
    )
    live = LiveConversation(one_turn("c", 5000), 0, 0.0)
    live.todo = 5000
    engine.submit(live)
    events.run()
    parts = [(2048, 0), (2048, 2048), (904, 4096)]
    assert times == [pytest.approx(sum(MODEL.seconds(BatchWork.of([part])) for part in parts))]


def test_token_gaps_show_a_stall_that_the_mean_of_a_turn_hides() -> None:
    """A prompt of 1,000 tokens joins the batch of a turn that decodes 200."""
    found = [
        TraceConversation("decodes", 0.0, (TraceTurn(10, 0, 200),)),
        TraceConversation("p", 0.5, (TraceTurn(1_000, 0, 1),)),
    ]
    settings = SimulationSettings(SystemSettings(System.COLLOCATED))
    result = Simulation(SimulatedFleet((SimulatedTier("mixed", Role.MIXED, 1, profile()),)), settings).run(
        found
    )
    gaps = result.recorder.gaps
    step, stall = 0.01, 0.01 + 1_000 * 1e-5
    assert gaps.percentile(50) == pytest.approx(step, rel=0.05)
    assert gaps.percentile(100) == pytest.approx(stall, rel=0.15)
    assert gaps.share_above(1.5 * step) == pytest.approx(1 / 199, rel=0.02)
    assert result.last_tbt[0] < 1.1 * step
