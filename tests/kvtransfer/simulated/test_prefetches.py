"""A conversation with a long tool call is parked after its turn and prefetched before the next one."""

import time
from threading import Event
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.host_slots import HostSlots
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import RetentionPhase
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine


def loads_of(engine: SteppedEngine) -> list[Any]:
    """Return a list to which the host slot of each load is added when it ends."""
    loads: list[Any] = []
    index = engine.kv_state.host
    end_load = index.end_load

    def counted(number: int) -> None:
        loads.append(number)
        end_load(number)

    index.end_load = counted  # type: ignore[method-assign]
    return loads


class HeldCopies:
    """Holds back all copies from the host until `may_go` is set; `came` is set once a copy waits."""

    def __init__(self, engine: SteppedEngine, come: bool = True) -> None:
        self.came, self.may_go = Event(), Event()
        host: HostSlots = engine.worker.worker_side("checkpoint").copier.memory
        known = host.known  # every mover calls it before a write

        def waits(copies: list[BlockCopy]) -> list[BlockCopy]:
            self.came.set()
            return known(copies) if self.may_go.wait(10) and come else []

        host.known = waits  # type: ignore[method-assign]


def step_until_on_host(engine: SteppedEngine, key: str) -> None:
    conversation = engine.kv_state.conversations.get(key)
    assert conversation is not None
    limit = time.monotonic() + 10
    while conversation.unstored:
        assert time.monotonic() < limit, f"{key} is not on the host"
        engine.step()
        time.sleep(0.01)


def parked(engine: SteppedEngine) -> list[int]:
    """Park conversation `s`, evict its blocks, and return its prompt."""
    prompt = [n % 250 for n in range(10 * BLOCK_TOKENS + 5)]
    engine.add("t1", prompt, 2, session="s", params={"conversation": {"park_after_s": 0.0}})
    engine.run(2000)
    step_until_on_host(engine, "s")
    engine.side("report").snapshot()
    assert phase(engine) is RetentionPhase.PARKED
    # Another request needs blocks. Those of parked conversations are evicted first.
    engine.add("other", [7 + n % 200 for n in range(57 * BLOCK_TOKENS)], 2)
    engine.run(4000)
    return prompt


def engine_with_host(blocks: int = 60, **groups: Any) -> SteppedEngine:
    return SteppedEngine(
        ConnectorConfig(engine="d", epoch=1, port=free_port(), park_after_s=600.0, host_kv_gib=0.005),
        blocks=blocks,
        **groups,
    )


def phase(engine: SteppedEngine) -> RetentionPhase:
    conversation = engine.kv_state.conversations.get("s")
    assert conversation is not None
    return conversation.phase


@pytest.mark.parametrize("prefetched", [True, False])
def test_prefetched_kv_outlasts_kv_of_conversations_used_more_recently(prefetched: bool) -> None:
    """Eviction by last use alone would evict the prefetched conversation first."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        loads = loads_of(engine)
        if prefetched:
            assert engine.prefetch("s")
        else:
            engine.add("again", prompt, 1, priority=10)
        engine.run(2000)
        loaded = len(loads)
        assert loaded
        away = {"conversation": {"park_after_s": 0.0}}
        engine.add("u1", [3 + n % 240 for n in range(20 * BLOCK_TOKENS + 5)], 2, session="u", params=away)
        engine.run(2000)
        step_until_on_host(engine, "u")  # otherwise its blocks could not be evicted before those of `s`
        engine.add("others", [11 + n % 190 for n in range(38 * BLOCK_TOKENS)], 2)
        engine.run(4000)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert (len(loads) == loaded) is prefetched
        assert engine.wrong == []
    finally:
        engine.close()


def test_prefetched_kv_is_parked_again_when_its_turn_is_late() -> None:
    engine = engine_with_host()
    try:
        parked(engine)
        engine.side("report").snapshot()
        assert engine.prefetch("s", due_in_s=0.5)
        engine.run(2000)
        assert phase(engine) is RetentionPhase.RETAINED
        engine.kv_state.park_and_expire()
        assert phase(engine) is RetentionPhase.RETAINED
        time.sleep(1.1)
        engine.kv_state.take_counts()
        engine.kv_state.park_and_expire()
        assert phase(engine) is RetentionPhase.PARKED
        assert engine.kv_state.take_counts()["parked.late"] == 1
    finally:
        engine.close()


def test_a_prefetch_loads_all_blocks_once_and_computes_nothing() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        assert engine.prefetch("s")
        assert engine.busy()  # an engine without requests steps for it
        engine.run(2000)
        loaded = len(loads)
        assert loaded >= 9
        assert engine.prefetch("s"), "all of it is there"
        engine.run(2000)
        assert not engine.faults()
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert len(loads) == loaded
        assert engine.computed_prompt_tokens - computed < 2 * BLOCK_TOKENS
        assert engine.wrong == []
    finally:
        engine.close()


def test_a_prefetch_of_an_unknown_conversation_is_refused() -> None:
    engine = engine_with_host()
    try:
        parked(engine)
        assert not engine.prefetch("unknown")
        for block in engine.kv_state.host.blocks():
            engine.kv_state.host.drop(block)
        assert not engine.prefetch("s")
        assert not engine.busy()
    finally:
        engine.close()


def test_a_prefetch_of_a_conversation_whose_turn_runs_is_refused() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        assert not engine.prefetch("s")
        engine.run(2000)
        assert len(engine.answers["t2"]) == 2 and engine.wrong == []
    finally:
        engine.close()


@pytest.mark.parametrize("why", ["offline work may not start", "layers are shared", "no room"])
def test_the_engine_does_not_step_for_a_prefetch_that_cannot_begin_yet(why: str) -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        loads = loads_of(engine)
        pool = engine.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2) if why == "no room" else []
        engine.side("checkpoint").offline_may_start = why != "offline work may not start"
        engine.kv_state.kv_io_suspended = why == "layers are shared"
        assert engine.prefetch("s")
        for _ in range(20):
            engine.step()
        assert not loads and not engine.busy() and phase(engine) is RetentionPhase.PARKED
        engine.side("checkpoint").offline_may_start, engine.kv_state.kv_io_suspended = True, False
        pool.free_blocks(taken)
        for _ in range(200):
            engine.step()
            time.sleep(0.001)
        assert len(loads) >= 9 and phase(engine) is RetentionPhase.RETAINED
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert engine.wrong == []
    finally:
        engine.close()


def test_a_prefetch_is_given_up_when_it_waits_past_its_due_time() -> None:
    engine = engine_with_host()
    try:
        parked(engine)
        loads = loads_of(engine)
        engine.kv_state.kv_io_suspended = True
        assert engine.prefetch("s", due_in_s=0.05)
        time.sleep(0.1)
        engine.kv_state.kv_io_suspended = False
        for _ in range(20):
            engine.step()
        assert not loads and phase(engine) is RetentionPhase.PARKED
    finally:
        engine.close()


def test_kv_damaged_on_the_host_does_not_count_as_prefetched() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine, come=False)
        copies.may_go.set()
        assert engine.prefetch("s")
        engine.run(2000)
        assert phase(engine) is RetentionPhase.PARKED
        engine.step()
        assert not engine.faults()
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert len(engine.answers["t2"]) == 2 and engine.wrong == []
    finally:
        engine.close()


def test_a_reset_of_the_prefix_cache_cancels_a_running_prefetch() -> None:
    engine = engine_with_host()
    try:
        parked(engine)
        copies = HeldCopies(engine)
        assert engine.prefetch("s")
        engine.step()
        assert copies.came.wait(10)
        engine.scheduler.connector.reset_cache()
        copies.may_go.set()
        engine.run(2000)
        engine.step()
        assert not engine.faults()
        pool = engine.scheduler.kv_cache_manager.block_pool
        conversation = engine.kv_state.conversations.get("s")
        assert conversation is not None and conversation.chain == []
        assert pool.get_num_free_blocks() == engine.blocks - 1
    finally:
        engine.close()


def test_a_turn_that_arrives_during_its_prefetch_waits_for_it() -> None:
    """The turn uses the blocks of the prefetch, so that no block is loaded twice."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        assert engine.prefetch("s")
        engine.step()
        assert copies.came.wait(10)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        for _ in range(20):
            engine.step()
        assert "t2" not in engine.answers
        copies.may_go.set()
        engine.run(2000)
        assert 9 <= len(loads) <= 10
        assert engine.computed_prompt_tokens - computed < 2 * BLOCK_TOKENS
        assert engine.wrong == []
    finally:
        engine.close()


@pytest.mark.parametrize(
    "groups", [{"window": 3 * BLOCK_TOKENS, "blocks": 72}, {"states": True, "blocks": 62}]
)
def test_windows_and_states_are_prefetched_with_the_prompt(groups: dict[str, Any]) -> None:
    engine = engine_with_host(**groups)
    try:
        prompt = parked(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        assert engine.prefetch("s")
        engine.run(2000)
        loaded = len(loads)
        assert loaded >= 9
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert len(loads) == loaded
        assert engine.computed_prompt_tokens - computed < 2 * BLOCK_TOKENS
        assert engine.wrong == []
    finally:
        engine.close()


def test_a_load_for_a_disconnected_turn_still_counts_as_running() -> None:
    """Code that unmaps the blocks has to wait: the load continues although its request has ended."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine)
        engine.add("again", [*prompt, 9], 1, session="s")
        limit = time.monotonic() + 10
        while "again" not in engine.kv_state.loads.loading and time.monotonic() < limit:
            engine.step()
        assert copies.came.wait(10)
        assert not engine.kv_state.no_kv_in_flight
        engine.abort("again")
        for _ in range(5):
            engine.step()
        assert "again" not in engine.kv_state.loads.loading and not engine.kv_state.no_kv_in_flight
        copies.may_go.set()
        while not engine.kv_state.no_kv_in_flight and time.monotonic() < limit:
            engine.step()
            time.sleep(0.01)
        assert engine.kv_state.no_kv_in_flight
    finally:
        engine.close()
