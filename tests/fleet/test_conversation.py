"""An agent's conversation on a real fleet is prefilled once, transferred once, and decoded on one engine."""

import json
import urllib.request

import pytest

from tests.fleet.talk import client, conversation, get, metric, opening, text_turn, tool_turn
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

BY_SOURCE = "vllm:prompt_tokens_by_source_total"


def engine_urls(fleet: RunningFleet, role: str) -> dict[str, str]:
    return {
        name: f"http://{engine['http']}" for name, engine in fleet.engines().items() if engine["role"] == role
    }


def kv_in_use(fleet: RunningFleet, engine: str) -> int:
    (shown,) = [one for one in get(fleet.url, "/dashboard/state")["engines"] if one["engine"] == engine]
    return shown["kv"]["live"] + shown["kv"]["reserved"]


def test_six_turns_with_tools_stay_one_conversation_on_one_decoder(laptop_fleet: RunningFleet) -> None:
    fleet = laptop_fleet
    decoders = engine_urls(fleet, "decode")
    before = {name: metric(url, BY_SOURCE, source="local_compute") for name, url in decoders.items()}
    moved = {name: metric(url, BY_SOURCE, source="external_kv_transfer") for name, url in decoders.items()}
    sdk, messages = client(fleet.url, "six-turns"), opening(seed=1, words=150)
    turns = [tool_turn(sdk, fleet.model, messages) for _ in range(5)]
    turns.append(text_turn(sdk, fleet.model, messages))

    cities = [json.loads(arguments)["city"] for turn in turns for arguments in turn.arguments]
    assert len(cities) == 5 and set(cities) <= {"Paris", "Rome"}
    found = conversation(fleet, "six-turns", 6)
    assert (found["turns"], found["transfers"]) == (6, 1)
    (placement,) = found["placements"]
    assert placement["cause"] == "first_turn" and placement["prefiller"] in engine_urls(fleet, "prefill")
    assert placement["decoder"] == found["decoder"]

    here = found["decoder"]
    computed = {name: metric(url, BY_SOURCE, source="local_compute") for name, url in decoders.items()}
    received = {name: metric(url, BY_SOURCE, source="external_kv_transfer") for name, url in decoders.items()}
    for name in decoders:
        if name != here:
            assert computed[name] == before[name] and received[name] == moved[name]
    # The decoder computed none of the first prompt beyond the token it samples from, and of each later one
    # its new tokens plus at most a block.
    first = turns[0].prompt_tokens
    assert received[here] - moved[here] >= first - 1
    new = turns[-1].prompt_tokens - first
    block = fleet.fleet.engine.args["block-size"]
    assert computed[here] - before[here] <= 1 + new + 5 * block


def test_a_stream_has_server_sent_events_and_the_conversation_id_in_a_header(
    laptop_fleet: RunningFleet,
) -> None:
    fleet = laptop_fleet
    body = {"model": fleet.model, "messages": opening(2, 40), "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"{fleet.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Conversation-ID": "stream-2", "Authorization": "Bearer s"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-conversation-id"] == "stream-2"
        text = answer.read().decode()
    assert text.rstrip().endswith("data: [DONE]")


def test_a_response_id_continues_a_conversation_of_the_responses_api(laptop_fleet: RunningFleet) -> None:
    fleet = laptop_fleet
    sdk = client(fleet.url, "responses")
    first = sdk.responses.create(model=fleet.model, input="Describe the river. " * 20, max_output_tokens=16)
    second = sdk.responses.create(
        model=fleet.model, input="And its bridges?", previous_response_id=first.id, max_output_tokens=16
    )
    assert sdk.responses.retrieve(second.id).previous_response_id == first.id
    found = conversation(fleet, "responses", 2)
    assert (found["turns"], found["transfers"]) == (2, 1)


def test_a_completion_whose_prompt_extends_an_earlier_one_continues_its_conversation(
    laptop_fleet: RunningFleet,
) -> None:
    fleet = laptop_fleet
    sdk = client(fleet.url, "completions")
    prompt = "Once upon a time there was a fleet. " * 20
    for _ in range(3):
        answer = sdk.completions.create(model=fleet.model, prompt=prompt, max_tokens=12, temperature=0)
        prompt += answer.choices[0].text + " And then it went on. "
    found = conversation(fleet, "completions", 3)
    assert (found["turns"], found["transfers"]) == (3, 1)


def test_ending_a_conversation_frees_its_kv(laptop_fleet: RunningFleet) -> None:
    fleet = laptop_fleet
    sdk, messages = client(fleet.url, "ending"), opening(seed=3, words=300)
    text_turn(sdk, fleet.model, messages)
    found = conversation(fleet, "ending", 1)
    fleet.until(lambda: kv_in_use(fleet, found["decoder"]) > 0, 60, "occupancy")
    held = kv_in_use(fleet, found["decoder"])
    request = urllib.request.Request(
        f"{fleet.url}/v1/conversations/{found['id']}",
        method="DELETE",
        headers={"Authorization": "Bearer ending"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.load(answer)["deleted"] is True
    fleet.until(lambda: kv_in_use(fleet, found["decoder"]) < held, 60, "occupancy to fall")
    assert get(fleet.url, f"/v1/conversations/{found['id']}", "ending")["state"] == "ended"


def test_a_seeded_request_with_a_prompt_of_several_chunks_is_answered(laptop_fleet: RunningFleet) -> None:
    fleet = laptop_fleet
    chunk = fleet.fleet.engine.args["max-num-batched-tokens"]
    sdk, messages = client(fleet.url, "seed"), opening(seed=4, words=chunk // 4)
    first = text_turn(sdk, fleet.model, messages, seed=7)
    assert first.prompt_tokens > chunk
    messages.append({"role": "user", "content": "Go on. " * (chunk // 6)})
    again = text_turn(sdk, fleet.model, messages, seed=7)
    assert again.prompt_tokens > first.prompt_tokens + chunk // 2
