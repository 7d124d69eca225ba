"""Clients that send small requests to a fleet throughout a run, and measure how long they wait for tokens."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from traces.replay.client import text

NEW, BOUND, STREAM = KINDS = ("new", "bound", "stream")
CLIENTS = 2  # number of each kind
PAUSE_S = 0.15  # after an answer
AGAIN_S = 0.05  # after a failure; `Retry-After` is ignored
LIMIT_S = 5.0  # longest request, and longest time between two tokens of a stream
PROMPT = 200  # characters
TOKENS = {NEW: 1, BOUND: 1, STREAM: 400}
ANSWERED_WITHIN_S = 60.0


class Cut(Exception):
    """Raised when a request is refused or its answer does not end properly."""


@dataclass
class SteadyClient:
    """Sends one request after another; records when tokens came and why requests failed."""

    kind: str
    name: str
    arrivals: list[float] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)

    def longest_wait(self, begin: float, end: float, *, beyond: bool = True) -> tuple[float, float]:
        """Return start and end of the longest wait for a token that overlaps the time from `begin` to `end`.

        With `beyond`, a wait that is not over at `end` lasts until the next token, if there is one.
        """
        before = [one for one in self.arrivals if one <= begin][-1:] or [begin]
        within = [one for one in self.arrivals if begin < one < end]
        after = ([one for one in self.arrivals if one >= end][:1] if beyond else []) or [end]
        return max(pairwise([*before, *within, *after]), key=lambda wait: wait[1] - wait[0])

    async def run(self, http: aiohttp.ClientSession, model: str) -> None:
        """Send requests until cancelled."""
        number = 0
        while True:
            number += 1
            prompt = f"{self.name}-{number}"  # a prompt on which two engines ended would be refused
            headers = {"x-conversation-id": self.name}
            if self.kind == NEW:
                headers = {"x-conversation-id": prompt, "x-conversation-final": "true"}
            try:
                async for _ in _tokens(http, model, headers, prompt, TOKENS[self.kind]):
                    self.arrivals.append(time.monotonic())
            except (aiohttp.ClientError, OSError, TimeoutError, Cut) as wrong:
                self.failures.append((time.monotonic(), f"{type(wrong).__name__} {wrong}"[:200]))
                await asyncio.sleep(AGAIN_S)
            else:
                await asyncio.sleep(PAUSE_S)


class SteadyClients:
    """Clients that begin conversations, take turns in a bound one, or read long streams."""

    def __init__(self, url: str, model: str, key: str = "steady") -> None:
        self._url, self._model, self._key = url, model, key
        self.clients = [SteadyClient(kind, f"steady-{kind}-{n}") for kind in KINDS for n in range(CLIENTS)]

    async def run(self) -> None:
        """Send requests until cancelled."""
        limits = aiohttp.ClientTimeout(total=None, connect=LIMIT_S, sock_read=LIMIT_S)
        headers = {"authorization": f"Bearer {self._key}"}
        async with (
            aiohttp.ClientSession(self._url, headers=headers, timeout=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for client in self.clients:
                group.create_task(client.run(http, self._model))

    async def all_answered(self) -> bool:
        """Wait until each client has got a new token; return False if that takes too long."""
        since = time.monotonic()
        while time.monotonic() < since + ANSWERED_WITHIN_S:
            if all(one.arrivals and one.arrivals[-1] > since for one in self.clients):
                return True
            await asyncio.sleep(0.1)
        return False

    def longest_waits(
        self, begin: float, end: float, *, beyond: bool = True
    ) -> dict[str, tuple[float, float]]:
        """Return by kind of client the begin and end of the longest wait that overlaps the given time."""
        waits: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for one in self.clients:
            waits[one.kind].append(one.longest_wait(begin, end, beyond=beyond))
        return {kind: max(found, key=lambda wait: wait[1] - wait[0]) for kind, found in waits.items()}

    def failures(self, begin: float, end: float, *kinds: str) -> Counter[str]:
        """Return how many requests failed within the given time, by kind of client and reason."""
        return Counter(
            f"{one.kind}: {reason}"
            for one in self.clients
            for at, reason in one.failures
            if begin < at < end and one.kind in (kinds or KINDS)
        )


async def _tokens(
    http: aiohttp.ClientSession, model: str, headers: Mapping[str, str], prompt: str, tokens: int
) -> AsyncIterator[None]:
    """Yield once for each token of an answer; raise an error if the request is refused or cut off."""
    body: dict[str, Any] = {"model": model, "temperature": 0.0, "stream": True}
    body |= {"messages": [{"role": "user", "content": text(prompt, PROMPT)}]}
    body |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise Cut(f"{answer.status} {(await answer.text())[:160]}")
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise Cut(event["error"].get("message"))
                yield
    raise Cut("the stream ended without its last event")
