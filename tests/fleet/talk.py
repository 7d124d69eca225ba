"""Sends requests to a real fleet: an agent's through the OpenAI SDK, and an operator's."""

import json
import re
import urllib.request
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from tests.support.fleet import RunningFleet

CITY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "weather"}}


def client(url: str, key: str = "test") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def opening(seed: int, words: int) -> list[dict[str, Any]]:
    """Return the first messages of a conversation; different seeds share no long prefix."""
    text = " ".join(f"{seed}-{n * 7919 % 1000}" for n in range(words))
    return [
        {"role": "system", "content": f"You are agent {seed}."},
        {"role": "user", "content": f"Compare the weather of the two cities. Notes: {text}"},
    ]


@dataclass
class TalkedTurn:
    text: str
    arguments: list[str]
    cached_tokens: int
    prompt_tokens: int


def tool_turn(sdk: OpenAI, model: str, messages: list[dict[str, Any]], **options: Any) -> TalkedTurn:
    """Run a turn that has to call a tool, and append the call and its result to `messages`."""
    answer = sdk.chat.completions.create(
        model=model,
        messages=messages,
        tools=[CITY_TOOL],
        tool_choice=FORCED,
        max_tokens=128,
        temperature=0,
        **options,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    arguments = []
    for call in message.tool_calls:
        arguments.append(call.function.arguments)
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: 21 degrees."})
    return _turn(answer, arguments)


def text_turn(sdk: OpenAI, model: str, messages: list[dict[str, Any]], **options: Any) -> TalkedTurn:
    """Run a turn that answers the user, with the same tools in its prompt, and append it to `messages`."""
    answer = sdk.chat.completions.create(
        model=model,
        messages=messages,
        tools=[CITY_TOOL],
        tool_choice="none",
        max_tokens=24,
        temperature=0,
        **options,
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return _turn(answer, [])


def _turn(answer: Any, arguments: list[str]) -> TalkedTurn:
    usage = answer.usage
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return TalkedTurn(answer.choices[0].message.content or "", arguments, cached, usage.prompt_tokens)


def get(url: str, path: str, key: str = "test") -> Any:
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def conversation(fleet: RunningFleet, key: str, turns: int = 0) -> dict[str, Any]:
    """Return the only conversation of an API key, once `turns` of its turns have ended."""

    def found() -> dict[str, Any]:
        (one,) = get(fleet.url, "/v1/conversations", key)["data"]
        return dict(one)

    if turns:
        fleet.until(lambda: found()["turns"] >= turns, 60, f"{turns} finished turns of {key}")
    return found()


SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples at `url`/metrics that carry all of `labels`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        page = answer.read().decode()
    return sum(
        float(sample["value"])
        for sample in SAMPLE.finditer(page)
        if sample["name"] == name
        and all(f'{key}="{value}"' in (sample["labels"] or "") for key, value in labels.items())
    )
