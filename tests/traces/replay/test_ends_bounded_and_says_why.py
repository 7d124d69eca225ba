"""A replay ends in time and within its bounds, and its result contains every failure."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from tests.traces.replay.engine import PlayedEngine
from tests.traces.replay.workload import CountingObserver, agent
from traces import TraceError
from traces.format import TraceConversation
from traces.replay import Replay, ReplayError, ReplayOptions, replay, results, summarise
from traces.replay.results import PlayOutcome


async def played(engine: PlayedEngine, *conversations: TraceConversation, **options: object) -> Replay:
    chosen = ReplayOptions(url=engine.url, **{"probes": 0, "time_limit_s": 20.0, **options})  # type: ignore[arg-type]
    return await replay(conversations, chosen, CountingObserver())


async def test_a_replay_limits_concurrent_conversations_and_counts_late_starts() -> None:
    async with PlayedEngine().running() as engine:
        run = await played(
            engine, *(agent(str(n), turns=3, wait=0.0) for n in range(12)), max_conversations=3
        )
    assert engine.most_in_flight <= 3
    assert summarise(run).late_starts > 0
    assert summarise(run).outcomes["done"] == 12


async def test_the_time_limit_ends_a_replay_and_counts_unfinished_conversations() -> None:
    slow = agent("slow", turns=10, wait=0.3)
    never = agent("never", arrival=60.0)
    async with PlayedEngine().running() as engine:
        began = time.monotonic()
        run = await played(engine, agent("quick", turns=1), slow, never, time_limit_s=0.7)
        assert time.monotonic() - began < 2.5
    quick, unfinished, absent = run.conversations
    assert quick.outcome is PlayOutcome.DONE
    assert unfinished.outcome is PlayOutcome.UNFINISHED
    assert 1 <= len(unfinished.turns) < 10
    assert absent.outcome is PlayOutcome.NOT_STARTED
    summary = summarise(run)
    assert summary.outcomes == {"done": 1, "failed": 0, "unfinished": 1, "not_started": 1}
    assert summary.spreads["e2e"].count == 1


async def test_a_conversation_is_unfinished_when_its_replay_is_stopped() -> None:
    stop = asyncio.Event()
    async with PlayedEngine().running() as engine:
        options = ReplayOptions(url=engine.url, probes=0, time_limit_s=60.0)
        asyncio.get_running_loop().call_later(0.4, stop.set)
        run = await asyncio.wait_for(
            replay([agent("a", turns=50)], options, CountingObserver(), stop=stop), 5.0
        )
    assert run.conversations[0].outcome is PlayOutcome.UNFINISHED


async def test_a_refused_turn_is_retried_and_counted_and_its_wait_adds_to_its_latency() -> None:
    async with PlayedEngine(refuse=[(429, "0.3"), (503, "0.1")]).running() as engine:
        run = await played(engine, agent("a", turns=1))
    (result,) = run.conversations
    assert result.outcome is PlayOutcome.DONE
    assert result.refusals == result.turns[0].refusals == 2
    assert result.turns[0].ttft_s > 0.4


async def test_a_conversation_that_is_refused_again_and_again_fails() -> None:
    async with PlayedEngine(refuse=[(429, "0")] * 50).running() as engine:
        run = await played(engine, agent("a"), retries=3)
    (result,) = run.conversations
    assert result.outcome is PlayOutcome.FAILED
    assert "refused 4 times" in result.error
    assert summarise(run).refusals == 4


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (PlayedEngine(cut_after=3), "ClientPayloadError"),
        (PlayedEngine(end_after=3), "without a finish reason"),
        (PlayedEngine(error_event=True), "engine died"),
        (PlayedEngine(refuse=[(500, "")]), "HTTP 500: full"),
        (PlayedEngine(fixed_s=0.8), "no complete answer within 0.4 s"),
    ],
)
async def test_a_broken_stream_fails_its_conversation_and_the_result_says_why(
    engine: PlayedEngine, complaint: str
) -> None:
    async with engine.running():
        run = await played(engine, agent("a", turns=1), request_timeout_s=0.4)
    (result,) = run.conversations
    assert result.outcome is PlayOutcome.FAILED
    assert re.search(complaint, result.error), result.error
    assert sum(summarise(run).errors.values()) == 1


async def test_a_replay_without_a_server_fails_at_once() -> None:
    options = ReplayOptions(url="http://127.0.0.1:9")
    with pytest.raises(ReplayError, match="is the endpoint up"):
        await replay([agent("a")], options, CountingObserver())


async def test_a_replay_ends_when_its_first_probe_fails() -> None:
    async with PlayedEngine(error_event=True).running() as engine:
        with pytest.raises(ReplayError, match=r"first probe failed.*engine died"):
            await played(engine, agent("a"), probes=1)


async def test_a_result_has_the_increase_of_each_counter_and_names_unreadable_pages() -> None:
    async with PlayedEngine().running() as engine:
        rising = "# TYPE conserve_energy_joules_total counter\nconserve_energy_joules_total {}\n"
        engine.metrics = rising.format(10)

        class Working(CountingObserver):
            def answered(self, turn: object) -> None:
                engine.metrics = rising.format(60) + "# TYPE up gauge\nup 1\n"

        options = ReplayOptions(
            url=engine.url, probes=0, time_limit_s=20.0, metrics_urls=("http://127.0.0.1:9/metrics",)
        )
        run = await replay([agent("a", turns=1, out=25)], options, Working())
    assert run.meters.counters == {"conserve_energy_joules_total": 50.0}
    assert summarise(run).output_tokens_per_joule == 0.5
    assert [page.split(": ")[0] for page in run.meters.unread] == ["http://127.0.0.1:9/metrics"]


async def test_a_result_is_read_back_unchanged_and_contains_no_key(tmp_path: Path) -> None:
    async with PlayedEngine(refuse=[(500, "")]).running() as engine:
        run = await played(engine, agent("a"), agent("b", arrival=0.1), api_key="a-secret-key")
    path = tmp_path / "run.json"
    results.write(path, run)
    assert results.read(path) == run
    assert b"a-secret-key" not in path.read_bytes()


def test_a_file_that_is_no_replay_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(TraceError, match="not a result"):
        results.read(path)
