"""Six answers in English equal plain vLLM's in float32, through transfer, parking, restore and aborts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI, OpenAIError

from tests.fleet.talk import client, conversation, metric
from tests.support.fleet import RunningFleet, fleet_up
from tests.support.plain_engine import PlainEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

QUESTIONS = (
    "What is the capital of France?",
    "Which river flows through it?",
    "Name a famous museum there.",
    "Write one sentence about its history.",
    "What do people eat for breakfast there?",
    "Thank you. Say goodbye in French.",
)
PARKED_FROM, OFFLINE_FROM = 2, 3  # turns
LONG_PROMPT = "The committee met on Monday and talked about the budget of the library. " * 120


def edited(content: Any) -> None:
    decode = content["tiers"][1]
    decode["replicas"] = 1
    content["model"]["max_context"] = 2_048
    content["engine"]["args"]["num-gpu-blocks-override"] = 112  # three other prompts take all of it
    content["conversation"]["park_after"] = "2s"
    content["coserving"] = {"enabled": True, "ttft": "300ms", "tbt": "2s", "ageing": "5s"}


def ask(sdk: OpenAI, model: str, messages: list[dict[str, Any]], question: str) -> str:
    messages.append({"role": "user", "content": question})
    answer = sdk.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=24,
        temperature=0,
        extra_headers={"X-Session-ID": "english"},
    )
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


@contextmanager
def offline_work(fleet: RunningFleet) -> Iterator[None]:
    """Run prompts of hundreds of tokens, one after another, until the block ends."""
    over = threading.Event()

    def work(number: int) -> None:
        sdk = client(fleet.url, "offline")
        while not over.is_set():
            prompt = f"{number}: {LONG_PROMPT}"
            try:
                sdk.chat.completions.create(
                    model=fleet.model,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=32,
                    service_tier="flex",
                )
            except OpenAIError:
                return  # the fleet ends
            number += 10

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()


def test_six_turns_of_english_with_parking_and_aborts_get_plain_vllms_answers() -> None:
    with fleet_up("laptop", edited) as fleet:
        others: Any = client(fleet.url, "others")
        sdk, messages = client(fleet.url, "english"), []  # type: ignore[var-annotated]
        said = [ask(sdk, fleet.model, messages, question) for question in QUESTIONS[:PARKED_FROM]]
        decoder = f"http://{fleet.engines()['decode-0']['http']}"
        fleet.until(
            lambda: fleet.engines()["decode-0"]["parked_tokens"] > 0, 60, "the conversation to be parked"
        )
        for number in range(3):  # until the parked conversation's KV is on the host only
            prompt = [{"role": "user", "content": f"{number}: {LONG_PROMPT}"}]
            others.chat.completions.create(model=fleet.model, messages=prompt, max_tokens=1)
        before = metric(decoder, "conserve_kv_restores_total")
        said.append(ask(sdk, fleet.model, messages, QUESTIONS[PARKED_FROM]))
        restores = metric(decoder, "conserve_kv_restores_total") - before
        with offline_work(fleet):
            fleet.until(
                lambda: metric(decoder, "conserve_coserving_offline_tokens_total") > 0, 60, "offline work"
            )
            said += [ask(sdk, fleet.model, messages, question) for question in QUESTIONS[OFFLINE_FROM:]]
            aborts = metric(decoder, "conserve_coserving_aborts_total")
        assert conversation(fleet, "english", len(QUESTIONS))["transfers"] == 1
        with PlainEngine(fleet) as plain:
            alone, history = client(plain.url, "english"), []  # type: ignore[var-annotated]
            expected = [ask(alone, fleet.model, history, question) for question in QUESTIONS]
    assert said == expected
    assert "Paris" in said[0]
    assert aborts > 0 and restores == 1
