"""Large appends go through the prefiller to the conversation's decoder, and parked conversations resume."""

from typing import Any

import pytest

from tests.fleet.talk import TalkedTurn, client, conversation, get, metric, opening, text_turn
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

BY_SOURCE = "vllm:prompt_tokens_by_source_total"


class Decoder:
    """Counts the tokens that a conversation's decoder has computed and received since the last call."""

    def __init__(self, fleet: RunningFleet, engine: str) -> None:
        self._url = f"http://{fleet.engines()[engine]['http']}"
        self._seen = self._now()

    def _now(self) -> tuple[float, float]:
        sources = ("local_compute", "external_kv_transfer")
        computed, received = (metric(self._url, BY_SOURCE, source=source) for source in sources)
        return computed, received

    def since(self) -> tuple[float, float]:
        before, self._seen = self._seen, self._now()
        return self._seen[0] - before[0], self._seen[1] - before[1]


def asked(fleet: RunningFleet, messages: list[dict[str, Any]]) -> TalkedTurn:
    sdk = client(fleet.url, "appends")
    return text_turn(sdk, fleet.model, messages, extra_headers={"X-Conversation-ID": "appends"})


def test_large_appends_and_compacted_prompts_are_transferred_to_the_same_decoder(
    laptop_fleet: RunningFleet,
) -> None:
    fleet = laptop_fleet
    block = fleet.fleet.engine.args["block-size"]
    words = fleet.fleet.conversation.redisaggregate_tokens // 5
    again = metric(fleet.url, "conserve_redisaggregations_total", outcome="transferred")
    messages = opening(71, 40)
    first = asked(fleet, messages)
    here = conversation(fleet, "appends", 1)["decoder"]
    decoder = Decoder(fleet, here)

    messages.append(opening(72, words)[1])
    large = asked(fleet, messages)
    computed, received = decoder.since()
    assert large.prompt_tokens - first.prompt_tokens > fleet.fleet.conversation.redisaggregate_tokens
    assert received >= large.prompt_tokens - first.prompt_tokens - block and computed <= 1 + block

    messages = opening(73, words)  # the agent's own summary in place of all that was said
    compacted = asked(fleet, messages)
    computed, received = decoder.since()
    assert received >= compacted.prompt_tokens - 2 * block and computed <= 1 + block

    messages.append({"role": "user", "content": "And then?"})
    asked(fleet, messages)
    computed, received = decoder.since()
    assert received == 0 and computed < 100

    found = conversation(fleet, "appends", 4)
    assert found["decoder"] == here and found["transfers"] == 3
    causes = [placement["cause"] for placement in found["placements"]]
    assert causes == ["first_turn", "redisaggregated", "redisaggregated"]
    for placement in found["placements"][1:]:
        assert placement["decoder"] == here and placement["prefiller"]
        assert placement["receipt"]["decoder"]["why"] == "bound"
    assert metric(fleet.url, "conserve_redisaggregations_total", outcome="transferred") == again + 2


def test_the_dashboard_shows_a_parked_conversation_and_its_next_turn_finds_the_kv(
    laptop_fleet: RunningFleet,
) -> None:
    fleet = laptop_fleet
    messages = opening(74, 300)
    sdk = client(fleet.url, "parks")
    first = text_turn(sdk, fleet.model, messages)
    found = conversation(fleet, "parks", 1)
    here = found["decoder"]

    def kv() -> dict[str, int]:
        shown = get(fleet.url, "/dashboard/state")["engines"]
        (one,) = [engine["kv"] for engine in shown if engine["engine"] == here]
        return dict(one)

    def parked() -> bool:
        shown = get(fleet.url, "/dashboard/state")["timelines"]
        (spans,) = [timeline["spans"] for timeline in shown if timeline["key"].endswith(found["id"])]
        return bool(spans[-1][0] == "parked" and kv()["parked"] > 0)

    fleet.until(parked, fleet.fleet.conversation.park_after + 60, "the page to show it parked")
    decoder = Decoder(fleet, here)
    messages.append({"role": "user", "content": "Are you still there?"})
    second = text_turn(sdk, fleet.model, messages)
    computed, _ = decoder.since()
    assert computed <= second.prompt_tokens - first.prompt_tokens + fleet.fleet.engine.args["block-size"]
    assert conversation(fleet, "parks", 2)["transfers"] == 1
