"""A draining engine lets its turns finish and releases all KV, even while it sleeps."""

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from kvtransfer.control.control_socket import NAMED_AT_MOST
from kvtransfer.control.state_report import IDLE_STEP_S
from kvtransfer.retention.parking import LEAVES_WITHIN_S
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

LEASE_S = 0.3


@pytest.fixture
def engine():
    made = SteppedEngine(
        ConnectorConfig(engine="d", epoch=1, port=free_port(), lease_s=LEASE_S, host_kv_gib=0.005), blocks=60
    )
    yield made
    made.close()


@pytest.fixture
def made_without():
    made = SteppedEngine(ConnectorConfig(engine="d", epoch=1, transfer=False, host_kv_gib=0.005), blocks=60)
    yield made
    made.close()


def talk(engine: SteppedEngine, key: str, blocks: int, output: int = 2) -> None:
    engine.add(
        f"{key}-turn", [(n + len(key)) % 250 for n in range(blocks * BLOCK_TOKENS + 5)], output, session=key
    )


def test_a_draining_engine_keeps_idle_kv_for_a_while_so_that_it_can_move(engine: SteppedEngine) -> None:
    kv_state, now = engine.kv_state, [time.monotonic()]
    talk(engine, "idle", 10)
    engine.run(2000)
    kv_state.clock = lambda: now[0]
    now[0] += 100
    kv_state.drain(True)
    now[0] += LEAVES_WITHIN_S - 1
    kv_state.drain(True)  # the keeper repeats it
    kv_state.park_and_expire()
    assert kv_state.conversations.get("idle") is not None
    now[0] += 1
    kv_state.park_and_expire()
    assert kv_state.conversations.get("idle") is None


def test_a_draining_engine_without_transfers_releases_idle_kv_immediately(
    made_without: SteppedEngine,
) -> None:
    engine = made_without
    report, kv_state = engine.side("report"), engine.kv_state
    talk(engine, "idle", 10)
    engine.run(2000)
    talk(engine, "running", 10, output=20)
    for _ in range(4):
        engine.step()
    assert report.snapshot().live_tokens >= 20 * BLOCK_TOKENS

    kv_state.drain(True)
    state = report.snapshot()
    assert state.draining and not state.drained and state.running == 1
    assert kv_state.conversations.get("idle") is None
    engine.run(2000)
    assert len(engine.answers["running-turn"]) == 20
    began = time.monotonic()
    while not report.snapshot().drained and time.monotonic() < began + 30:  # a copy to the host may run
        while engine.busy():
            engine.step()
        time.sleep(0.01)
    assert report.snapshot().drained, report.snapshot()

    kv_state.drain(False)
    talk(engine, "again", 10)
    engine.run(2000)
    assert report.snapshot().live_tokens >= 10 * BLOCK_TOKENS
    assert engine.wrong == [] and engine.faults() == []


def test_an_engine_without_requests_steps_once_a_second_until_its_leases_end(engine: SteppedEngine) -> None:
    """Two exports hold the same blocks, because their conversations share a prefix."""
    report = engine.side("report")
    for name in ("a", "b"):
        prompt = [n % 250 for n in range(10 * BLOCK_TOKENS)] + [ord(name)] * BLOCK_TOKENS
        engine.add(name, prompt, 1, params={"do_remote_decode": True, "transfer_id": name})
        engine.run(2000)
    engine.kv_state.drain(True)
    began, steps = time.monotonic(), 0
    assert not report.snapshot().drained  # decoders may still fetch the exports
    while not report.snapshot().drained and time.monotonic() < began + 30:
        while engine.busy():
            engine.step()
            steps += 1
        time.sleep(0.01)
    assert report.snapshot().drained
    assert 2 <= steps <= 1 + (time.monotonic() - began) / IDLE_STEP_S
    engine.kv_state.clock = lambda: time.monotonic() + 100
    report.snapshot()
    assert not engine.busy(), "nothing is held any more"
    assert engine.faults() == []


def test_a_report_names_confirmed_conversations_however_many_are_parked(
    engine: SteppedEngine,
) -> None:
    report = engine.side("report")
    talk(engine, "known", 3)
    engine.run(2000)
    assert "known" in report.snapshot().confirmed
    engine.kv_state.changes.parked += [f"conversation {number}" for number in range(2 * NAMED_AT_MOST)]
    state = report.snapshot()
    assert "known" in state.confirmed and state.named_after < state.seq - 1
