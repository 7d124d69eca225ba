"""Histories of the Responses API outlive the decoder that computed them, unchanged."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.talk import client, conversation
from tests.fleet.test_faults import serving, vllm_process
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]


@pytest.fixture
def fleet(laptop_fleet: RunningFleet) -> Iterator[RunningFleet]:
    serving(laptop_fleet)
    yield laptop_fleet
    serving(laptop_fleet)


def test_a_killed_decoder_loses_kv_but_no_stored_history(fleet: RunningFleet) -> None:
    told: dict[str, Any] = {"model": fleet.model, "temperature": 0, "max_output_tokens": 24}
    sdk = client(fleet.url, "stored")
    asked = [{"role": "user", "content": text} for text in ("Which city?", "And the other one?", "Why?")]
    first = sdk.responses.create(input=asked[:1], **told)
    second = sdk.responses.create(input=asked[1:2], previous_response_id=first.id, **told)
    before = conversation(fleet, "stored", 2)  # the only one: both are its turns

    fleet.kill(vllm_process(fleet, before["decoder"], "EngineCore"))
    third = sdk.responses.create(input=asked[2:], previous_response_id=second.id, **told)
    after = conversation(fleet, "stored", 3)
    assert after["decoder"] != before["decoder"]

    said = [[one.model_dump(exclude_none=True) for one in answer.output] for answer in (first, second)]
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)

    whole = [asked[0], *said[0], asked[1], *said[1], asked[2]]
    spelled_out = client(fleet.url, "spelled-out").responses.create(input=whole, **told)
    assert third.output_text == spelled_out.output_text
    assert third.usage.input_tokens == spelled_out.usage.input_tokens > first.usage.input_tokens + 48
    shown = sdk.responses.retrieve(third.id)
    assert (shown.output_text, shown.previous_response_id) == (third.output_text, second.id)
    sdk.responses.delete(third.id)


def test_a_client_may_name_a_stored_conversation_instead_of_sending_its_history(fleet: RunningFleet) -> None:
    told: dict[str, Any] = {"model": fleet.model, "temperature": 0, "max_output_tokens": 16}
    sdk = client(fleet.url, "named")
    first = sdk.responses.create(input="Which city?", conversation="conv_named", **told)
    stream = sdk.responses.create(input="Why?", conversation={"id": "conv_named"}, stream=True, **told)
    events = [event for event in stream if hasattr(event, "response")]
    assert {event.response.conversation.id for event in events} == {"conv_named"}
    second = events[-1].response
    assert second.usage.input_tokens > first.usage.total_tokens
    found = conversation(fleet, "named", 2)
    assert (found["id"], found["turns"]) == ("conv_named", 2)
    sdk.responses.delete(second.id)
