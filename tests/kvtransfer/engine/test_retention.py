"""Conversations are retained, parked, moved to the disk and restored on a real engine with too little KV.

All answers equal plain vLLM's.

The storm at the end draws from a seed. `CONSERVE_STORM_SECONDS` (default 20) is its length, and
`CONSERVE_STORM_SEED` replays one. The long one, with kills, is `python -m tests.kvtransfer.engine.storm`.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import (
    EngineProcess,
    eventually,
    faults_of,
    over_control_socket,
    running,
    socket_path,
    state_of,
)
from tests.kvtransfer.engine.sabotage import VARIABLE
from tests.kvtransfer.engine.script import (
    BLOCKS,
    CONVERSATIONS,
    OUTPUT,
    PRIORITY,
    TURNS,
    TurnScript,
    recorded,
    said,
)
from tests.kvtransfer.engine.storm import EngineStorm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SABOTAGE = Path(tempfile.gettempdir(), f"sabotage-{os.getpid()}")
STORM_S = float(os.environ.get("CONSERVE_STORM_SECONDS", "20"))


@pytest.fixture(scope="module")
def plain_and_ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    os.environ[VARIABLE] = str(SABOTAGE)
    connector = ConnectorConfig(
        engine="d",
        transfer=False,
        host_kv_gib=0.02,  # half of the conversations' KV at the end
        disk_gib=0.2,
        disk_path=str(tmp_path_factory.mktemp("kv")),
        park_after_s=3,
        control_socket=socket_path(),
        plugins=("tests.kvtransfer.engine.sabotage:SabotagePlugin",),
    )
    plain, ours = (
        EngineProcess(made_with, blocks=BLOCKS, batched_tokens=512, arguments=PRIORITY)
        for made_with in (None, connector)
    )
    with running(plain, ours):
        yield plain, ours


@pytest.fixture(scope="module")
def script(plain_and_ours: tuple[EngineProcess, EngineProcess]) -> TurnScript:
    plain, _ = plain_and_ours
    made = recorded(plain)
    plain.kill()
    return made


@pytest.fixture(scope="module")
def engine(plain_and_ours: tuple[EngineProcess, EngineProcess], script: TurnScript) -> EngineProcess:
    _, ours = plain_and_ours
    return ours


def turn(engine: EngineProcess, script: TurnScript, conversation: int, number: int, suffix: str = "") -> None:
    session = f"c{conversation}{suffix}"
    answer = engine.ask(script.prompts[conversation][number], OUTPUT, session=session)
    assert answer.tokens == script.answers[conversation][number], f"{session}, turn {number}"


def settle(engine: EngineProcess) -> None:
    """Wait until running copies have ended and a step has reported them."""
    time.sleep(0.3)
    engine.ask([9, 9], 1)
    assert eventually(lambda: state_of(engine).running + state_of(engine).waiting == 0)


def release_all(engine: EngineProcess, suffixes: tuple[str, ...] = ("",)) -> None:
    for suffix in suffixes:
        for number in range(CONVERSATIONS):
            over_control_socket(engine, lambda client, n=number, s=suffix: client.release(f"c{n}{s}"))  # type: ignore[misc]
    settle(engine)


def test_conversations_that_exceed_the_accelerators_kv_compute_only_new_tokens(
    engine: EngineProcess, script: TurnScript
) -> None:
    before = engine.computed_prompt_tokens()
    for number in range(TURNS):
        for conversation in range(CONVERSATIONS):
            turn(engine, script, conversation, number)
    computed = engine.computed_prompt_tokens() - before
    new = sum(len(prompts[-1]) for prompts in script.prompts)
    assert computed <= new + CONVERSATIONS * TURNS * engine.block_tokens
    assert script.computed > 2 * computed  # plain vLLM loses conversations
    metrics = engine.metrics()
    assert metrics["conserve_kv_disk_restored_blocks_total"] > 0
    assert metrics["conserve_kv_left_host_total"] == metrics["conserve_kv_failed_disk_moves_total"] == 0
    assert faults_of(engine) == []


def test_a_parked_conversation_occupies_no_kv_and_returns_without_computing(
    engine: EngineProcess, script: TurnScript
) -> None:
    settle(engine)
    last = CONVERSATIONS - 1
    assert eventually(lambda: state_of(engine).live_tokens == 0)  # all are parked after park_after_s
    assert state_of(engine).parked_tokens > 0
    for seed in range(2):
        engine.ask(said(random.Random(seed), 3500), 1)  # these prompts take the parked blocks
    before = engine.computed_prompt_tokens()
    turn(engine, script, last, TURNS - 1)
    assert engine.computed_prompt_tokens() - before <= engine.block_tokens


def test_blocks_damaged_on_the_host_are_found_and_recomputed(
    engine: EngineProcess, script: TurnScript
) -> None:
    settle(engine)
    SABOTAGE.touch()
    engine.ask(said(random.Random(5), 3900), 1)  # runs steps, and evicts all retained blocks
    turn(engine, script, 0, TURNS - 1)
    assert engine.metrics().get("conserve_kv_corrupt_host_blocks_total", 0) > 0
    turn(engine, script, 0, TURNS - 1)
    assert faults_of(engine) == []


def test_a_prefetch_wakes_an_idle_engine_and_computes_nothing(engine: EngineProcess) -> None:
    prompt = said(random.Random(11), 900)
    engine.ask(prompt, 1, session="away")
    assert eventually(lambda: state_of(engine).live_tokens == 0)  # parked
    for seed in range(2):
        engine.ask(said(random.Random(seed), 3500), 1)  # these prompts take the parked blocks
    settle(engine)
    before = engine.metrics()
    assert not over_control_socket(engine, lambda client: client.prefetch("unknown", 60.0))
    assert over_control_socket(engine, lambda client: client.prefetch("away", 60.0))
    assert eventually(lambda: state_of(engine).live_tokens > 0)
    settle(engine)
    after = engine.metrics()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown("conserve_kv_restores_total") == 1
    settles = 2 * 2  # tokens of the prompts that `settle` sends
    assert grown('vllm:prompt_tokens_by_source_total{source="local_compute"}') <= settles
    assert grown("vllm:generation_tokens_total") <= settles
    over_control_socket(engine, lambda client: client.release("away"))
    assert faults_of(engine) == []


def test_an_ended_conversation_leaves_no_kv(engine: EngineProcess) -> None:
    release_all(engine)
    state = state_of(engine)
    assert (state.live_tokens, state.parked_tokens) == (0, 0)
    assert faults_of(engine) == []


def test_a_storm_of_disturbances_leaks_nothing_and_changes_no_answer(
    engine: EngineProcess, script: TurnScript
) -> None:
    seed = int(os.environ.get("CONSERVE_STORM_SEED", str(random.randrange(10**6))))
    print(f"CONSERVE_STORM_SEED={seed}")
    storm = EngineStorm(engine, script, seed)
    storm.blow(STORM_S)
    storm.settle()
    storm.give_back()
    assert storm.wrong == [], f"CONSERVE_STORM_SEED={seed}"
    assert storm.done["turns"]
