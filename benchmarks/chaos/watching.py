"""Watches the fleet and a batch during a run, and finds lines or blocks that are lost or left behind."""

import asyncio
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import httpx
import orjson
from openai import APIError, OpenAI

from benchmarks.harness.chats import BATCH_ENDED, batch_file
from benchmarks.harness.fleet import samples
from deploy.errors import LifecycleError
from deploy.home import FleetHome
from deploy.lifecycle.status import FleetStatus, fleet_status

HELD = ("running", "waiting", "conversations", "live_tokens", "parked_tokens")
WHOLE_S, BATCH_S = 400.0, 400.0
LINES, LINE_TOKENS, LINE_REPEATS = 60, 12, 12
LOOK_S = 4.0
CHANGES, ABORTS = "conserve_overload_changes_total{", "conserve_coserving_aborts_total{"


def status(home: FleetHome) -> FleetStatus | None:
    with suppress(LifecycleError, OSError):
        return fleet_status(home)
    return None


def whole(home: FleetHome) -> bool:
    """Return whether all engines serve."""
    state = status(home)
    return state is not None and state.reachable and all(one.phase == "serving" for one in state.engines)


def settled(home: FleetHome, limit_s: float) -> list[str]:
    """Wait until the fleet is whole and holds nothing; return a line for each thing left after `limit_s`."""
    deadline = time.monotonic() + WHOLE_S
    while not whole(home):
        if time.monotonic() > deadline:
            return [f"not whole after {WHOLE_S:.0f} s: {status(home)}"]
        time.sleep(1)
    deadline = time.monotonic() + limit_s
    while (left := held(home)) and time.monotonic() < deadline:
        time.sleep(1)
    return left


def held(home: FleetHome) -> list[str]:
    state = status(home)
    if state is None or not state.reachable:
        return ["the directory does not answer"]
    counts = [(one.engine, name, getattr(one, name)) for one in state.engines for name in HELD]
    return [f"{engine}: {name} {count}" for engine, name, count in counts if count]


def layer_changes(home: FleetHome) -> dict[str, float]:
    """Return how often engines dropped and restored layers, as the directory counts it, by labels."""
    state = status(home)
    if state is None or not state.metrics:
        return {}
    found = samples([f"http://{state.metrics}"], CHANGES)
    return {name.removeprefix(CHANGES).removesuffix("}"): value for name, value in found.items()}


class AbortedIterations:
    """Counts the iterations that engines abort, also across restarts of engines."""

    def __init__(self, home: FleetHome) -> None:
        self._home = home
        self._last: defaultdict[str, float] = defaultdict(float)  # last count by engine
        self.total = 0.0

    def look(self) -> None:
        state = status(self._home)
        for one in state.engines if state is not None else ():
            with suppress(httpx.HTTPError):
                now = sum(samples([f"http://{one.http}"], ABORTS).values())
                before = self._last[one.engine]
                self.total += now - before if now >= before else now
                self._last[one.engine] = now

    async def run(self) -> None:
        """Read the engines' counts again and again, because a killed engine's count is lost."""
        while True:
            await asyncio.gather(asyncio.to_thread(self.look), asyncio.sleep(LOOK_S))


class Batch:
    """Batch whose lines must each be answered once, with the answer of the undisturbed fleet."""

    def __init__(self, url: str, model: str) -> None:
        self._api = OpenAI(base_url=f"{url}/v1", api_key="chaos", timeout=60.0)
        sizes = {"max_tokens": LINE_TOKENS, "min_tokens": LINE_TOKENS, "ignore_eos": True}
        prompts = [f"Line {number}: the agent " * LINE_REPEATS for number in range(LINES)]
        self._bodies = [{"model": model, "prompt": one, "temperature": 0.0, **sizes} for one in prompts]
        self._expected: list[str] = []
        self._batch = ""

    def learn(self) -> None:
        """Ask the undisturbed fleet each line, and record the answers."""
        for body in self._bodies:
            answer = self._api.completions.create(model="", prompt="", extra_body=body)
            self._expected.append(answer.choices[0].text)

    def submit(self) -> None:
        lines = batch_file("/v1/completions", self._bodies)
        file = self._api.files.create(file=("lines.jsonl", lines), purpose="batch")
        wanted: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        self._batch = self._api.batches.create(input_file_id=file.id, **wanted).id

    def results(self) -> tuple[list[str], list[str]]:
        """Wait for the batch; return the lines without a result, and those with a wrong or second result."""
        deadline, state = time.monotonic() + BATCH_S, None
        while (state is None or state.status not in BATCH_ENDED) and time.monotonic() < deadline:
            with suppress(APIError):
                state = self._api.batches.retrieve(self._batch)
            time.sleep(1)
        if state is None or state.status != "completed":
            return [f"the batch is {state.status if state else 'gone'}: {state}"], []
        answers, wrong = Counter[str](), []
        lines = self._api.files.content(state.output_file_id or "").read().splitlines()
        for line in map(orjson.loads, lines):
            name, answer = line["custom_id"], line["response"]["body"]["choices"][0]["text"]
            answers[name] += 1
            if answer != self._expected[int(name)] or answers[name] > 1:
                wrong.append(f"line {name}: {answer!r}")
        return [f"line {number}" for number in range(LINES) if not answers[str(number)]], wrong
