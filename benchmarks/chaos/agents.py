"""Agents that hold conversations whose answers are known, and try again as any client does.

Each plays one of a few scripts, greedily, under a conversation id of its own: the answers have to be those of
the undisturbed fleet, and what a stream showed before it was cut has to be the beginning of one.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

SCRIPTS, TURNS = 6, 4
REQUEST_LIMIT_S = 180.0  # beyond it a request hangs: the fleet's own limits are shorter
LOST_AFTER_S = 300.0  # a turn that was not answered for so long is lost
AGAIN_S = (0.2, 3.0)


@dataclass(frozen=True, slots=True)
class Script:
    """What a user and the tools say, and how long the answers are."""

    system: str
    said: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgentLengths:
    """Of what agents say and hear."""

    words: tuple[int, ...] = (60, 300, 900)
    tokens: tuple[int, ...] = (8, 24, 96)
    waits_s: tuple[float, ...] = (0.0, 0.2, 1.0, 8.0)  # of tools; the longest: until after KV is parked
    hang_ups: float = 0.0  # share of streams that their client leaves, to ask again
    busy_s: float = math.inf  # then all rest for a while, so that what overload changed is changed back
    rest_s: float = 0.0
    apart: bool = False
    """Each conversation has a key of its own. Else those of one script are one request to a gateway that sets
    requests aside under which two engines ended."""


def scripts(seed: int, lengths: AgentLengths) -> list[Script]:
    """No two share a long prefix."""
    found = []
    for number in range(SCRIPTS):
        random = Random(f"{seed} {number}")
        words = [f"{number}-{random.randrange(10_000)}" for _ in range(random.choice(lengths.words))]
        said = [f"Read this and act: {' '.join(words)}"]
        said += [f"The tool says {random.randrange(10_000)}. Go on." for _ in range(TURNS - 1)]
        tokens = tuple(random.choice(lengths.tokens) for _ in said)
        found.append(Script(f"You are agent {number} of {seed}.", tuple(said), tokens))
    return found


@dataclass
class AgentResults:
    """What agents saw."""

    conversations: int = 0
    turns: int = 0
    tries: Counter[str] = field(default_factory=Counter)  # by what came of them
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    longest_turn_s: float = 0.0


class Agents:
    def __init__(self, url: str, model: str, seed: int, lengths: AgentLengths | None = None) -> None:
        self._http = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="chaos", max_retries=0, timeout=REQUEST_LIMIT_S + 30
        )
        self._model, self._seed = model, seed
        self._lengths = lengths or AgentLengths()
        self._scripts = scripts(seed, self._lengths)
        self._answers: list[list[str]] = []
        self._number = 0
        self.seen = AgentResults()

    async def learn(self) -> None:
        """The answers of a fleet that nothing disturbs, twice: they have to be the same."""
        for _ in range(2):
            before, self._answers = self._answers, []
            for script in self._scripts:
                self._answers.append(await self._known(script))
            if before and before != self._answers:
                raise SystemExit("the undisturbed fleet does not give the same answers twice")

    async def run(self, agents: int, until: float, conversations: float = math.inf) -> None:
        """Until then, or until so many conversations have begun."""
        most = self._number + conversations
        await asyncio.gather(*(self._agent(number, until, most) for number in range(agents)))

    async def _agent(self, number: int, until: float, most: float) -> None:
        random = Random(f"agent {self._seed} {number}")
        while time.monotonic() < until and self._number < most:
            self._number += 1
            await self._conversation(f"chaos-{self._number}", random)
            self.seen.conversations += 1
            if self.seen.conversations % 100 == 0:
                lost, wrong = len(self.seen.lost), len(self.seen.wrong)
                print(f"  {self.seen.conversations} conversations, {lost} lost, {wrong} wrong", flush=True)

    async def _known(self, script: Script) -> list[str]:
        messages, answers = _opening(script), list[str]()
        self._number += 1
        for turn, tokens in enumerate(script.tokens):
            messages.append({"role": "user", "content": script.said[turn]})
            key = {"x-conversation-id": f"chaos-{self._number}"}
            text = "".join([part async for part in self._try(messages, tokens, key, stream=False)])
            answers.append(text)
            messages.append({"role": "assistant", "content": text})
        return answers

    async def _conversation(self, name: str, random: Random) -> None:
        which = random.randrange(len(self._scripts))
        script, answers = self._scripts[which], self._answers[which]
        messages = _opening(script)
        for turn, (tokens, expected) in enumerate(zip(script.tokens, answers, strict=True)):
            messages.append({"role": "user", "content": script.said[turn]})
            headers = {"x-conversation-id": name}
            if self._lengths.apart:
                headers["Authorization"] = f"Bearer {name}"
            await asyncio.sleep(self._rest_left_s())
            if turn == len(answers) - 1:
                headers["x-conversation-final"] = "true"
            if not await self._turn(f"{name}, turn {turn}", messages, tokens, headers, expected, random):
                return
            messages.append({"role": "assistant", "content": expected})
            await asyncio.sleep(random.choice(self._lengths.waits_s))

    def _rest_left_s(self) -> float:
        lengths = self._lengths
        if not lengths.rest_s:
            return 0.0
        into_s = time.monotonic() % (lengths.busy_s + lengths.rest_s)
        return max(0.0, lengths.busy_s + lengths.rest_s - into_s) if into_s >= lengths.busy_s else 0.0

    async def _turn(
        self,
        name: str,
        messages: Sequence[dict[str, str]],
        tokens: int,
        headers: dict[str, str],
        expected: str,
        random: Random,
    ) -> bool:
        """Whether it was answered in the end, rightly."""
        began = time.monotonic()
        while time.monotonic() < began + LOST_AFTER_S:
            text = ""
            failed: str | None = None
            leaves = random.random() < self._lengths.hang_ups
            stays = random.uniform(0, len(expected)) if leaves else math.inf
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    asked = self._try(messages, tokens, headers, stream=leaves or random.random() < 0.7)
                    async with aclosing(asked):
                        async for part in asked:
                            text += part
                            if len(text) > stays:
                                failed = "left"
                                break
            except TimeoutError:
                failed = "hung"
                self.seen.hung.append(f"{name}: {time.monotonic() - began:.0f} s")
            except openai.APIStatusError as refused:
                failed = f"{refused.status_code} {refused.code or ''}".strip()
            except (openai.APIError, httpx.HTTPError) as broken:  # a connection, or an error within a stream
                failed = f"{type(broken).__name__}{', in a stream' if text else ''}"
            self.seen.tries[failed or "answered"] += 1
            if not expected.startswith(text) or (failed is None and text != expected):
                self.seen.wrong.append(f"{name} ({failed or 'answered'}): {text!r} is not {expected!r}")
                return False
            if failed is None:
                self.seen.turns += 1
                self.seen.longest_turn_s = max(self.seen.longest_turn_s, time.monotonic() - began)
                return True
            await asyncio.sleep(random.uniform(*AGAIN_S))
        self.seen.lost.append(name)
        return False

    async def _try(
        self, messages: Sequence[dict[str, str]], tokens: int, headers: dict[str, str], stream: bool
    ) -> AsyncGenerator[str, None]:
        body: dict[str, Any] = {
            "model": self._model, "messages": list(messages), "max_tokens": tokens, "temperature": 0.0,
            "extra_body": {"min_tokens": tokens, "ignore_eos": True}, "extra_headers": headers,
        }  # fmt: skip
        if not stream:
            answer = await self._http.chat.completions.create(**body)
            yield answer.choices[0].message.content or ""
            return
        async with await self._http.chat.completions.create(**body, stream=True) as chunks:
            ended = False
            async for chunk in chunks:
                for choice in chunk.choices:
                    yield choice.delta.content or ""
                    ended = ended or choice.finish_reason is not None
        if not ended:
            raise openai.APIConnectionError(message="cut", request=chunks.response.request)


def _opening(script: Script) -> list[dict[str, str]]:
    return [{"role": "system", "content": script.system}]
