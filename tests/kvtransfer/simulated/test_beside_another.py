"""Our connector works next to one that saves blocks of ended requests, without faults or lost blocks."""

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtransfer.config import ConnectorConfig
from kvtransfer.connector import SeveralConnectors
from tests.kvtransfer.simulated import holding
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine


@pytest.fixture
def engine() -> Iterator[SteppedEngine]:
    config = ConnectorConfig(engine="d", transfer=False, host_kv_gib=0.005)
    made = SteppedEngine(config, beside=holding.CONFIG)
    yield made
    made.close()


def prompt_of(blocks: int, first: int = 0) -> list[int]:
    return [(first + n) % 250 for n in range(blocks * BLOCK_TOKENS + 5)]


def test_blocks_that_another_connector_holds_for_a_while_are_not_reported_as_faults(
    engine: SteppedEngine,
) -> None:
    report = engine.side("report")
    engine.add("turn", prompt_of(10), 2, session="a")
    while "turn" not in engine.answers:
        engine.step()
    assert not report.is_idle() and engine.faults() == []
    engine.run(2000)
    assert report.is_idle() and report.faults() == []
    assert report.snapshot().live_tokens == 10 * BLOCK_TOKENS
    before = engine.computed_prompt_tokens
    engine.add("again", prompt_of(10), 2, session="a")
    engine.run(2000)
    assert engine.computed_prompt_tokens - before == 5 and engine.wrong == []


def test_a_reset_of_the_prefix_cache_reaches_only_our_connector(engine: SteppedEngine) -> None:
    engine.add("turn", prompt_of(4), 2, session="a")
    engine.run(2000)
    for number in range(500):  # a step reports the end of copies to the host
        engine.add(f"step {number}", [1, 2, 3], 2)
        engine.run(2000)
        if engine.side("report").is_idle():
            break
        time.sleep(0.01)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.scheduler.connector.sub_connectors[1].resets == 0  # other engines use a shared tier, too
    assert engine.kv_state.conversations.get("a").chain == []


def test_the_counts_of_our_connector_reach_the_front_end_beside_another_connector(
    engine: SteppedEngine,
) -> None:
    engine.add("turn", prompt_of(4), 2, session="a")
    engine.run(2000)
    engine.kv_state.release("a")
    stats = engine.scheduler.connector.get_kv_connector_stats()
    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
    received = MsgpackDecoder(SchedulerStats).decode(sent).kv_connector_stats
    rebuilt = SeveralConnectors.build_kv_connector_stats(received)
    assert rebuilt.data["ConServeConnector"].data["ended.released"] == 1
