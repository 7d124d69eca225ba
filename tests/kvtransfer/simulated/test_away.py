"""A conversation whose client says that a tool takes long: parked at the end of the turn, and brought back
by the same prompt as offline work, on vLLM's own scheduler."""

import time
from threading import Event
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.checkpoint.host_slots import HostSlots
from kvtransfer.checkpoint.scheduler import BlockCopy
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import RetentionPhase
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine

AHEAD = {"brings_back": {"conversation": "s", "due_in_s": 60.0}}


def loads_of(engine: SteppedEngine) -> list[Any]:
    """Of the host's blocks, from here on."""
    loads: list[Any] = []
    index = engine.residence.host
    end_load = index.end_load

    def counted(number: int) -> None:
        loads.append(number)
        end_load(number)

    index.end_load = counted  # type: ignore[method-assign]
    return loads


class HeldCopies:
    """Copies from the host, from here on: each waits until they may go. `came`: one of them waits."""

    def __init__(self, engine: SteppedEngine, come: bool = True) -> None:
        self.came, self.may_go = Event(), Event()
        host: HostSlots = engine.worker.worker_side("checkpoint").copier.memory
        known = host.known  # every mover asks it before it writes

        def waits(copies: list[BlockCopy]) -> list[BlockCopy]:
            self.came.set()
            return known(copies) if self.may_go.wait(10) and come else []

        host.known = waits  # type: ignore[method-assign]


def parked(engine: SteppedEngine) -> list[int]:
    """The prompt of a conversation `s` that is on the host alone: others have used its blocks."""
    prompt = [n % 250 for n in range(10 * BLOCK_TOKENS + 5)]
    engine.add("t1", prompt, 2, session="s", params={"conversation": {"park_after_s": 0.0}})
    engine.run(2000)
    conversation = engine.residence.conversations.get("s")
    assert conversation is not None
    limit = time.monotonic() + 10
    while not engine.residence.on_host(conversation) and time.monotonic() < limit:
        engine.step()
        time.sleep(0.01)
    engine.side("report").snapshot()
    assert conversation.phase is RetentionPhase.PARKED
    # Others need the accelerator: what is parked goes first.
    engine.add("other", [7 + n % 200 for n in range(57 * BLOCK_TOKENS)], 2)
    engine.run(4000)
    return prompt


def engine_with_host() -> SteppedEngine:
    return SteppedEngine(
        ConnectorConfig(engine="d", epoch=1, port=free_port(), park_after_s=600.0, host_kv_gib=0.005),
        blocks=60,
    )


@pytest.mark.parametrize("due", [True, False])
def test_what_was_brought_back_stays_while_others_take_what_has_just_left(due: bool) -> None:
    """By when it was last used it would go first: its turn is longest ago."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        loads = loads_of(engine)
        engine.add("again", prompt, 1, priority=10, params=AHEAD if due else None)
        engine.run(2000)
        brought = len(loads)
        away = {"conversation": {"park_after_s": 0.0}}
        engine.add("u1", [3 + n % 240 for n in range(20 * BLOCK_TOKENS + 5)], 2, session="u", params=away)
        engine.run(2000)
        engine.add("others", [11 + n % 190 for n in range(38 * BLOCK_TOKENS)], 2)
        engine.run(4000)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert (len(loads) == brought) is due
        assert engine.wrong == []
    finally:
        engine.close()


def test_what_was_brought_back_is_parked_again_when_its_turn_is_late() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        engine.side("report").snapshot()
        said = {"brings_back": {"conversation": "s", "due_in_s": 0.2}}
        engine.add("again", prompt, 1, priority=10, params=said)
        engine.run(2000)
        conversation = engine.residence.conversations.get("s")
        assert conversation is not None and conversation.phase is RetentionPhase.RETAINED
        engine.residence.let_time_pass()
        assert conversation.phase is RetentionPhase.RETAINED
        time.sleep(0.5)
        engine.residence.take_counts()
        engine.residence.let_time_pass()
        assert conversation.phase is RetentionPhase.PARKED
        assert engine.residence.take_counts()["parked.late"] == 1
    finally:
        engine.close()


@pytest.mark.parametrize("said", ["s", {"conversation": "s"}, {"conversation": 3, "due_in_s": "soon"}, [1]])
def test_what_is_not_understood_of_a_restore_ends_nothing(said: object) -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        engine.add("again", prompt, 1, priority=10, params={"brings_back": said})
        engine.run(2000)
        conversation = engine.residence.conversations.get("s")
        assert conversation is not None and conversation.phase is RetentionPhase.PARKED
    finally:
        engine.close()


def test_parked_at_once_and_brought_back_before_the_next_turn() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        engine.add("again", prompt, 1, priority=10, params=AHEAD)
        engine.run(2000)
        assert engine.computed_prompt_tokens == computed
        assert engine.answers["again"] == []
        brought = len(loads)
        assert brought >= 9
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert len(loads) == brought
        assert engine.computed_prompt_tokens - computed < 2 * BLOCK_TOKENS
        assert engine.wrong == []
    finally:
        engine.close()


def test_a_restore_that_finds_nothing_or_everything_ends_without_computing() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        engine.add("unknown", [1 + n % 7 for n in range(200)], 1, priority=10, params=AHEAD)
        engine.run(200)
        assert (engine.answers["unknown"], loads) == ([], [])
        brought = 0
        for again in ("again", "and again"):
            engine.add(again, prompt, 1, priority=10, params=AHEAD)
            engine.run(2000)
            assert engine.answers[again] == []
            brought = brought or len(loads)
        assert len(loads) == brought >= 9
        assert engine.computed_prompt_tokens == computed
        assert not engine.faults()
    finally:
        engine.close()


def test_a_restore_waits_until_offline_work_may_start() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        engine.side("checkpoint").offline_may_start = False
        engine.add("again", prompt, 1, priority=10, params=AHEAD)
        for _ in range(20):
            engine.step()
        assert "again" not in engine.answers
        engine.side("checkpoint").offline_may_start = True
        engine.run(2000)
        assert engine.answers["again"] == []
    finally:
        engine.close()


@pytest.mark.parametrize("why", ["damaged", "shares its layers"])
def test_kv_that_does_not_come_back_is_not_said_to_be_there(why: str) -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        if why == "damaged":
            copies = HeldCopies(engine, come=False)
            copies.may_go.set()
        engine.residence.fenced = why != "damaged"
        computed = engine.computed_prompt_tokens
        engine.add("again", prompt, 1, priority=10, params=AHEAD)
        engine.run(2000)
        assert (engine.answers["again"], engine.computed_prompt_tokens) == ([], computed)
        conversation = engine.residence.conversations.get("s")
        assert conversation is not None and conversation.phase is RetentionPhase.PARKED
        engine.residence.fenced = False
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        engine.run(2000)
        assert len(engine.answers["t2"]) == 2 and engine.wrong == []
    finally:
        engine.close()


def test_a_turn_that_says_so_is_answered_all_the_same() -> None:
    """Only offline work can be a restore."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s", params=AHEAD)
        engine.run(2000)
        assert len(engine.answers["t2"]) == 2
    finally:
        engine.close()


def test_a_restore_whose_client_leaves_holds_nothing() -> None:
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine)
        engine.add("again", prompt, 1, priority=10, params=AHEAD)
        engine.step()
        assert copies.came.wait(10)
        engine.abort("again")
        copies.may_go.set()
        engine.run(2000)
        assert "again" not in engine.answers
        engine.step()
        assert not engine.faults()
    finally:
        engine.close()


@pytest.mark.parametrize("given_up", [False, True])
def test_a_turn_that_comes_while_its_kv_is_brought_back_waits_for_that(given_up: bool) -> None:
    """Nothing is loaded twice, unless the restore is given up."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine)
        computed, loads = engine.computed_prompt_tokens, loads_of(engine)
        engine.add("again", prompt, 1, priority=10, params=AHEAD)
        engine.step()
        assert copies.came.wait(10)
        engine.add("t2", [*prompt, *engine.answers["t1"], 9], 2, session="s")
        for _ in range(20):
            engine.step()
        assert "t2" not in engine.answers
        if given_up:
            engine.abort("again")
        copies.may_go.set()
        engine.run(2000)
        assert 9 * (1 + given_up) <= len(loads) <= 10 * (1 + given_up)
        assert engine.computed_prompt_tokens - computed < 2 * BLOCK_TOKENS
        assert engine.wrong == []
    finally:
        engine.close()


def test_kv_on_its_way_for_a_turn_that_was_hung_up_is_no_rest() -> None:
    """Who takes the blocks' memory away waits for it: the load goes on although its request is over."""
    engine = engine_with_host()
    try:
        prompt = parked(engine)
        copies = HeldCopies(engine)
        engine.add("again", [*prompt, 9], 1, session="s")
        limit = time.monotonic() + 10
        while "again" not in engine.residence.loading and time.monotonic() < limit:
            engine.step()
        assert copies.came.wait(10)
        assert not engine.residence.at_rest
        engine.abort("again")
        for _ in range(5):
            engine.step()
        assert "again" not in engine.residence.loading and not engine.residence.at_rest
        copies.may_go.set()
        while not engine.residence.at_rest and time.monotonic() < limit:
            engine.step()
            time.sleep(0.01)
        assert engine.residence.at_rest
    finally:
        engine.close()
