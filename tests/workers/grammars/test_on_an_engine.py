"""A real engine refuses expensive grammars, keeps its memory, and answers other requests."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.fleet.talk import CITY_TOOL
from tests.kvtransfer.engine.engines import EngineProcess, running
from workers.engine.grammars.config import GrammarBudget
from workers.engine_memory import session_bytes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ARGUMENTS = (
    *("--middleware", "workers.engine.grammars.middleware.GrammarMiddleware"),
    *("--middleware", "workers.engine.resume.token_lines.TokenLinesMiddleware"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar"}'),
)
CHAT = "/v1/chat/completions"
ATTACK_S = 40.0
MANY_REPETITIONS = "((a{1,999}b){1,999}c){1,999}|" + "|".join(
    f"([a-z]{{1,{2000 + number}}}[0-9])" for number in range(900)
)
BUDGET = GrammarBudget()


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with running(EngineProcess(ConnectorConfig(), arguments=ARGUMENTS)) as (one,):
        yield one


def ask(
    engine: EngineProcess, body: dict[str, Any], owner: str = "bob", path: str = CHAT
) -> tuple[int, str, float]:
    """Send a request; return the status and body of the answer, and how many seconds it took."""
    question = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, **body}
    headers = {"Content-Type": "application/json", "X-Conserve-Owner": owner}
    request = urllib.request.Request(f"{engine.url}{path}", json.dumps(question).encode(), headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode(), time.monotonic() - began
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode(), time.monotonic() - began


def schema(name: str) -> dict[str, Any]:
    properties = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": properties}}}


def regex(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": f"{MANY_REPETITIONS}|{number}"}}


def test_answers_follow_each_kind_of_grammar(engine: EngineProcess) -> None:
    status, answer, _ = ask(engine, {"structured_outputs": {"regex": "[abc]{4}"}})
    content = json.loads(answer)["choices"][0]["message"]["content"]
    assert status == 200 and set(content) <= set("abc") and len(content) == 4
    status, answer, _ = ask(engine, {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 16})
    assert json.loads(answer)["choices"][0]["message"]["content"] in ("yes", "no")
    tools = {"tools": [CITY_TOOL], "tool_choice": "required", "max_tokens": 64}
    assert ask(engine, tools)[0] == 200
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}
    status, answer, _ = ask(engine, {"response_format": tag, "max_tokens": 16})
    assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_grammar_is_a_bad_request(engine: EngineProcess, stream: bool) -> None:
    status, answer, _ = ask(engine, {"structured_outputs": {"regex": "(((("}, "stream": stream})
    assert status == 400 and "message" in json.loads(answer)["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_over_its_budget_is_a_bad_request(engine: EngineProcess, stream: bool) -> None:
    status, answer, _ = ask(engine, {**regex(int(stream)), "stream": stream})
    assert status == 400, answer
    assert f"takes more than {BUDGET.sentence}" in json.loads(answer)["error"]["message"]
    assert "a grammar was over its budget" in engine.log.read_text()


def test_a_prefill_leg_compiles_no_grammar(engine: EngineProcess) -> None:
    leg = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}, "max_tokens": 1}
    status, answer, _ = ask(engine, {**regex(100), **leg})
    assert status == 200, answer


def test_expensive_grammars_delay_only_their_sender(engine: EngineProcess) -> None:
    assert engine.process is not None
    ask(engine, schema("warm"))
    idle = session_bytes(engine.process.pid)
    until = time.monotonic() + ATTACK_S
    statuses: set[int] = set()

    def attack(client: int) -> None:
        number = 1000 * (client + 1)
        while time.monotonic() < until:
            number += 1
            statuses.add(ask(engine, regex(number), "eve")[0])

    clients = [threading.Thread(target=attack, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    waits: list[float] = []
    peak = 0
    while time.monotonic() < until:
        status, answer, seconds = ask(engine, schema(f"of_bob_{len(waits)}"))
        assert status == 200, answer
        waits.append(seconds)
        peak = max(peak, session_bytes(engine.process.pid))
    for client in clients:
        client.join()
    after = session_bytes(engine.process.pid)
    sizes = [f"{name} {size >> 20} MiB" for name, size in (("idle", idle), ("peak", peak), ("end", after))]
    print(f"longest waits {sorted(waits)[-3:]} of {len(waits)}; {', '.join(sizes)}; attack {statuses}")
    assert statuses <= {400, 429}
    assert max(waits) < 10.0
    assert after < 1.5 * idle
    assert peak < 1.5 * idle + 2 * (BUDGET.memory_mib << 20)
