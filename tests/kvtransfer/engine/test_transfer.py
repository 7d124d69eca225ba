"""The decoder of two real engines computes nothing of a transferred prompt and answers as plain vLLM does.

Their transfers pass through staging windows, as on a GPU; a fleet on CPUs transfers KV in place.
"""

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from kvtransfer.config import ConnectorConfig
from placement.scheduling.interface import TurnTargets
from tests.kvtransfer.engine.engines import (
    EngineProcess,
    GeneratedAnswer,
    eventually,
    faults_of,
    free_port,
    over_control_socket,
    running,
    socket_path,
    state_of,
)
from tests.kvtransfer.engine.staged import SAID, STAGED_PLUGIN
from tests.kvtransfer.transfer.test_delivery import FlippingProxy
from workers.engine.coserving.config import SAFEPOINT_PLUGIN
from workers.engine.coserving.iterations import read_iterations

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

LEASE_S = 6.0
OUTPUT = 12


def prompt_of(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(tokens)]


PROMPTS = {
    name: prompt_of(tokens, seed)
    for seed, (name, tokens) in enumerate(
        {
            "1k": 1000,
            "4k": 4096,
            "chunked": 9001,
            "stale": 3000,
            "flipped": 1500,
            "epoch": 700,
            "aborted": 8000,
            "killed": 9000,
            "structured": 600,
            "cached": 640,
            "beside": 6000,
        }.items()
    )
}
GRAMMAR = {"structured_outputs": {"regex": "[abc]{4}-[0-9]{5}"}, "ignore_eos": False}


def asked(name: str) -> dict[str, Any]:
    return GRAMMAR if name == "structured" else {}


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, GeneratedAnswer]]:
    """Return the answers of plain vLLM, which has no connector, to all prompts of these tests."""
    with running(EngineProcess()) as (engine,):
        answers = {name: engine.ask(prompt, OUTPUT, **asked(name)) for name, prompt in PROMPTS.items()}
    yield answers


@dataclass
class EnginePair:
    prefiller: EngineProcess
    decoder: EngineProcess
    port: int

    def source(self, transfer_id: str, **changed: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "remote_epoch": 2,
            **changed,
        }

    def both_legs(self, name: str, urgent: bool = False, **changed: Any) -> GeneratedAnswer:
        transfer_id = uuid.uuid4().hex
        prompt = PROMPTS[name]
        decode = self.decoder.ask_later(prompt, OUTPUT, self.source(transfer_id, **changed), **asked(name))
        more = {**asked(name), **({"vllm_xargs": {"slo_ttft_ms": 20}} if urgent else {})}
        self.prefiller.ask(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer_id}, **more)
        return decode.result()

    def refusals(self, reason: str) -> float:
        return self.decoder.metrics().get(f'conserve_kv_transfers_refused_total{{reason="{reason}"}}', 0)


@pytest.fixture(scope="module")
def pair(plain: dict[str, GeneratedAnswer]) -> Iterator[EnginePair]:
    port = free_port()
    coserving = ConnectorConfig(
        engine="p",
        epoch=2,
        port=port,
        lease_s=LEASE_S,
        control_socket=socket_path(),
        plugins=(SAFEPOINT_PLUGIN, STAGED_PLUGIN),
        safepoint=f"conserve-test-{uuid.uuid4().hex[:8]}",
    )
    prefiller = EngineProcess(coserving, blocks=420)
    decoder = EngineProcess(
        ConnectorConfig(engine="d", epoch=1, control_socket=socket_path(), plugins=(STAGED_PLUGIN,))
    )
    with running(prefiller, decoder):
        yield EnginePair(prefiller, decoder, port)


@pytest.mark.parametrize("name", ["1k", "4k", "chunked", "structured"])
def test_a_transferred_prompt_is_answered_as_plain_vllm_does(
    pair: EnginePair, plain: dict[str, GeneratedAnswer], name: str
) -> None:
    before = pair.decoder.computed_prompt_tokens()
    answer = pair.both_legs(name)
    assert answer.tokens == plain[name].tokens
    cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0, "a prefiller computed the prompt for this request"
    assert all(SAID in engine.log.read_text() for engine in (pair.prefiller, pair.decoder))
    assert pair.decoder.computed_prompt_tokens() - before <= 1


def test_the_decode_leg_may_start_after_the_prefill(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    """The prefill leg's answer contains the parameters of the decode leg, as with other connectors."""
    body = {"model": "m", "prompt": PROMPTS["cached"], "max_tokens": 1, "temperature": 0}
    answer = pair.prefiller.post(
        "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}}
    )
    params = answer["kv_transfer_params"]
    assert pair.decoder.ask(PROMPTS["cached"], OUTPUT, params).tokens == plain["cached"].tokens


def test_running_turns_get_a_token_in_every_chunk_of_a_long_prompt(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    decoder = pair.decoder
    turns = [decoder.ask_later(prompt_of(40, 70 + number), 400) for number in range(3)]

    def all_decode() -> bool:
        latest = read_iterations(decoder.iteration_log)[-1]
        return latest.online_requests == 3 and not latest.prompt_tokens

    assert eventually(all_decode)
    before = len(read_iterations(decoder.iteration_log))
    long = decoder.ask_later(PROMPTS["beside"], OUTPUT)
    assert eventually(lambda: state_of(decoder).waiting_prompt_tokens > 0)
    assert long.result().tokens == plain["beside"].tokens
    assert not any(turn.done() for turn in turns), "they were there all the while"
    beside = [one for one in read_iterations(decoder.iteration_log)[before:] if one.prompt_tokens]
    assert sum(one.prompt_tokens for one in beside) == len(PROMPTS["beside"])
    assert all(one.online_requests == 4 for one in beside), "every turn has a token beside every chunk"
    target = TurnTargets().tbt_s
    assert all(one.predicted_s <= target or one.prompt_tokens == 1 for one in beside)
    assert len(beside) > 2 * len(PROMPTS["beside"]) / decoder.batched_tokens
    state = state_of(decoder)
    assert state.prompt_tokens_per_s > 0
    assert 0.5 <= state.prompt_share < 1
    assert state.waiting_prompt_tokens == 0
    assert all(len(turn.result().tokens) == 400 for turn in turns)


def test_the_shortest_waiting_prompt_gets_its_first_token_first(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    """This holds on the prefiller and on the decoder, which order prompts in the same way."""
    for engine in (pair.prefiller, pair.decoder):
        order: list[str] = []
        longest = engine.ask_later(prompt_of(9000, 75), 1)
        longest.add_done_callback(lambda _, order=order: order.append("longest"))  # type: ignore[misc]
        assert eventually(lambda engine=engine: state_of(engine).waiting_prompt_tokens > 0)  # type: ignore[misc]
        short = engine.ask_later(PROMPTS["1k"], 1)
        short.add_done_callback(lambda _, order=order: order.append("short"))  # type: ignore[misc]
        assert short.result().tokens == plain["1k"].tokens[:1]
        longest.result()
        assert order == ["short", "longest"]


def test_a_prefiller_aborts_offline_iterations_for_a_turn_and_sends_correct_kv(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    """Turns arrive during an iteration with offline work, which is aborted even if it contains prompts."""
    prefiller = pair.prefiller
    offline = prompt_of(6000, 76)
    expected = prefiller.ask(offline, 8, priority=1).tokens
    before = prefiller.metrics()["conserve_coserving_aborts_total"]
    batch = [prefiller.ask_later(offline[: 6000 - n], 8, priority=1) for n in (0, 1000, 2000)]
    batch += [prefiller.ask_later(prompt_of(5000, 77 + n), 2, priority=1) for n in range(6)]
    for _ in range(8):
        assert pair.both_legs("1k", urgent=True).tokens == plain["1k"].tokens
        assert pair.both_legs("cached", urgent=True).tokens == plain["cached"].tokens
        if prefiller.metrics()["conserve_coserving_aborts_total"] > before:
            break
    assert prefiller.metrics()["conserve_coserving_aborts_total"] > before
    assert batch[0].result().tokens == expected
    assert all(len(one.result().tokens) in (2, 8) for one in batch)
    assert prefiller.metrics()["conserve_coserving_unplanned_iterations_total"] == 0


def test_a_read_after_the_lease_is_refused_and_the_prompt_is_recomputed(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    """The lease has expired, and the prefiller has reused its few blocks."""
    transfer_id = uuid.uuid4().hex
    pair.prefiller.ask(PROMPTS["stale"], 1, {"do_remote_decode": True, "transfer_id": transfer_id})
    time.sleep(LEASE_S + 1)
    for seed in (91, 92):
        pair.prefiller.ask(prompt_of(9000, seed), 1)
    answer = pair.decoder.ask(PROMPTS["stale"], OUTPUT, pair.source(transfer_id))
    assert answer.tokens == plain["stale"].tokens
    assert pair.refusals("expired") == 1
    again = pair.decoder.ask(PROMPTS["stale"], OUTPUT)  # the recomputed blocks are cached, and are right
    assert again.tokens == plain["stale"].tokens


def test_a_prompt_is_recomputed_if_a_byte_of_its_transfer_is_flipped(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    with FlippingProxy(pair.port, flip_at=100_000) as port:  # amid the blocks
        answer = pair.both_legs("flipped", remote_port=port)
    assert answer.tokens == plain["flipped"].tokens
    assert pair.refusals("corrupt") == 1


def test_a_prompt_is_recomputed_if_its_transfer_names_an_older_epoch(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    assert pair.both_legs("epoch", remote_epoch=1).tokens == plain["epoch"].tokens
    assert pair.refusals("old_epoch") == 1


def test_the_decoder_recomputes_the_prompt_of_an_aborted_prefill(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    transfer_id = uuid.uuid4().hex
    decode = pair.decoder.ask_later(PROMPTS["aborted"], OUTPUT, pair.source(transfer_id))
    disconnect(
        pair.prefiller, PROMPTS["aborted"], {"do_remote_decode": True, "transfer_id": transfer_id}, 0.5
    )
    assert decode.result().tokens == plain["aborted"].tokens
    assert pair.refusals("aborted") == 1


def test_a_decode_leg_that_is_aborted_before_its_prefill_begins_leaks_nothing(pair: EnginePair) -> None:
    """The prefill never begins: the request still waits for its transfer when the client leaves."""
    disconnect(pair.decoder, prompt_of(5000, 93), pair.source(uuid.uuid4().hex), 1.0)
    assert eventually(lambda: state_of(pair.decoder).waiting == 0)
    assert eventually(lambda: pair.refusals("cancelled") == 1)
    assert faults_of(pair.decoder) == []


def test_idle_engines_release_the_blocks_of_transfers_without_new_requests(pair: EnginePair) -> None:
    def is_empty(engine: EngineProcess, within_s: float) -> bool:
        return eventually(lambda: state_of(engine).live_tokens == 0, within_s)

    assert is_empty(pair.prefiller, LEASE_S + 3) and is_empty(pair.decoder, LEASE_S + 3)
    pair.both_legs("1k")
    assert is_empty(pair.prefiller, 3), "its decoder has taken it"
    for seed in (94, 95):
        params = {"do_remote_decode": True, "transfer_id": uuid.uuid4().hex}
        pair.prefiller.ask(PROMPTS["1k"] + prompt_of(100, seed), 1, params)
    assert state_of(pair.prefiller).live_tokens > 0
    assert is_empty(pair.prefiller, LEASE_S + 3), "two leases of one beginning have ended"
    assert faults_of(pair.prefiller) == faults_of(pair.decoder) == []


def test_the_session_header_reaches_the_connector_from_every_route(pair: EnginePair) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi " * 40}], "max_tokens": 2}
    pair.decoder.post("/v1/chat/completions", chat, X_Session_ID="key:chat")
    completion = {"model": "m", "prompt": "hi " * 40, "max_tokens": 2}
    pair.decoder.post("/v1/completions", completion, X_Session_ID="key:completion")
    response = {"model": "m", "input": "hi " * 40, "max_output_tokens": 2}
    pair.decoder.post("/v1/responses", response, X_Session_ID="key:response")
    known = [
        over_control_socket(pair.decoder, lambda client, k=k: client.release(f"key:{k}"))
        for k in ("chat", "completion", "response", "nobody")  # type: ignore[misc]
    ]
    assert known == [True, True, True, False]


def test_a_turn_is_answered_correctly_if_its_prefiller_is_killed_during_the_transfer(
    pair: EnginePair, plain: dict[str, GeneratedAnswer]
) -> None:
    transfer_id = uuid.uuid4().hex
    decode = pair.decoder.ask_later(PROMPTS["killed"], OUTPUT, pair.source(transfer_id))
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    prefill = pair.prefiller.ask_later(PROMPTS["killed"], 1, params)
    assert eventually(lambda: state_of(pair.prefiller).running == 1)
    assert not prefill.done()
    pair.prefiller.kill()
    assert decode.result().tokens == plain["killed"].tokens
    assert pair.refusals("unreachable") == 1


def test_no_engine_process_survives_its_front_end(pair: EnginePair) -> None:
    processes = pair.decoder.tree()
    assert len(processes) >= 2
    os.kill(processes[0].pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert [process for process in alive if "resource_tracker" not in " ".join(process.cmdline())] == []


def disconnect(engine: EngineProcess, prompt: list[int], params: dict[str, Any], after_s: float) -> None:
    """Send a prompt and disconnect before the answer."""
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", engine.http)
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    threading.Event().wait(after_s)
    connection.close()
