"""In float32 and with greedy sampling, the fleet's answers equal those of one plain vLLM."""

import threading

import pytest

from tests.fleet.talk import TalkedTurn, client, opening, text_turn, tool_turn
from tests.support.fleet import RunningFleet
from tests.support.plain_engine import PlainEngine

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

SEEDS = (0, 2, 4, 7)  # of a short prompt to one of several blocks


def talk(url: str, model: str, seed: int, headers: dict[str, str]) -> list[TalkedTurn]:
    sdk = client(url, f"equality-{seed}").with_options(default_headers=headers)
    messages = opening(seed, words=60 + 70 * seed)
    turns = [tool_turn(sdk, model, messages) for _ in range(3)]
    messages.append({"role": "user", "content": f"Now sum it up, {seed}."})
    return [*turns, text_turn(sdk, model, messages), tool_turn(sdk, model, messages)]


def talk_concurrently(url: str, model: str) -> dict[int, list[TalkedTurn]]:
    said: dict[int, list[TalkedTurn]] = {}

    def one(seed: int) -> None:
        said[seed] = talk(url, model, seed, {})

    threads = [threading.Thread(target=one, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    return said


def test_answers_of_concurrent_conversations_equal_those_of_plain_vllm(laptop_fleet: RunningFleet) -> None:
    on_fleet = talk_concurrently(laptop_fleet.url, laptop_fleet.model)
    with PlainEngine(laptop_fleet) as plain:
        # The session id lets both sides send a tool call back with the tokens that were generated.
        expected = {
            seed: talk(plain.url, laptop_fleet.model, seed, {"X-Session-ID": f"plain-{seed}"})
            for seed in SEEDS
        }
    for seed in SEEDS:
        said = [(turn.text, turn.arguments) for turn in on_fleet[seed]]
        assert said == [(turn.text, turn.arguments) for turn in expected[seed]], f"conversation {seed}"
