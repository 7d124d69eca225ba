"""Agents that hold conversations with known answers, and retry as any client does.

Each conversation plays one of a few scripts under an id of its own, with greedy sampling. Its answers must be
those of the undisturbed fleet. The text of a stream that was cut must be the beginning of the right answer.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

SCRIPTS, TURNS = 6, 4
REQUEST_LIMIT_S = 180.0  # a longer request counts as hung
LOST_AFTER_S = 300.0  # a turn without an answer for this long counts as lost
RETRY_S = (0.2, 3.0)
STREAMED = 0.7  # share of requests that are streamed
# Conversations repeat a few prompts, and a prompt that ran on two killed engines is refused for minutes. An
# agent then uses another API key, because the gateway knows a request by its key and prompt.
SET_ASIDE = "request_set_aside"


@dataclass(frozen=True, slots=True)
class AgentLengths:
    """Lengths that a script draws for its messages and answers, and the pauses of its agent."""

    words: tuple[int, ...] = (60, 300, 900)
    tokens: tuple[int, ...] = (8, 24, 96)
    waits_s: tuple[float, ...] = (0.0, 0.2, 1.0, 8.0)  # waits for tools; KV is parked in the longest
    hang_ups: float = 0.0  # share of streams that an agent leaves and then asks for again
    busy_s: float = math.inf  # after this time all agents rest, so that the fleet restores dropped layers
    rest_s: float = 0.0
    # Each conversation has an API key of its own. Otherwise, a gateway that refuses a request because two
    # engines ended while they ran it would refuse all conversations of the script.
    apart: bool = False


@dataclass(slots=True)
class Script:
    """Script of one conversation: the messages of its agent, and the answers that it should get."""

    system: str
    turns: list[tuple[str, int]]  # message, and tokens of its answer
    answers: list[str] = field(default_factory=list)  # answers of the undisturbed fleet


def scripts(seed: int, lengths: AgentLengths) -> list[Script]:
    """Return the scripts of a seed. Their prompts share no long prefix."""
    found = []
    for number in range(SCRIPTS):
        random = Random(f"{seed} {number}")
        words = [f"{number}-{random.randrange(10_000)}" for _ in range(random.choice(lengths.words))]
        messages = [f"Read this and act: {' '.join(words)}"]
        messages += [f"The tool says {random.randrange(10_000)}. Go on." for _ in range(TURNS - 1)]
        turns = [(message, random.choice(lengths.tokens)) for message in messages]
        found.append(Script(f"You are agent {number} of {seed}.", turns))
    return found


@dataclass
class AgentResults:
    """Counts of turns and conversations, and what agents found wrong, lost or hung."""

    conversations: int = 0
    turns: int = 0
    tries: Counter[str] = field(default_factory=Counter)  # number of requests by outcome
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    longest_turn_s: float = 0.0


class Agents:
    """Agents that hold scripted conversations with one fleet and check its answers."""

    def __init__(self, url: str, model: str, seed: int, lengths: AgentLengths | None = None) -> None:
        limit_s = REQUEST_LIMIT_S + 30
        self._http = AsyncOpenAI(base_url=f"{url}/v1", api_key="chaos", max_retries=0, timeout=limit_s)
        self._model, self._seed = model, seed
        self._lengths = lengths or AgentLengths()
        self._scripts = scripts(seed, self._lengths)
        self._number = 0
        self.seen = AgentResults()

    async def learn(self) -> None:
        """Play each script on the undisturbed fleet, twice, and record the answers, which must be equal."""
        for script in self._scripts * 2:
            before, script.answers = script.answers, []
            self._number += 1
            headers, messages = {"x-conversation-id": f"chaos-{self._number}"}, _begin(script)
            for number, (message, tokens) in enumerate(script.turns, 1):
                messages.append({"role": "user", "content": message})
                if number == len(script.turns):
                    headers["x-conversation-final"] = "true"
                parts = [part async for part in self._ask(messages, tokens, headers, stream=False)]
                script.answers.append("".join(parts))
                messages.append({"role": "assistant", "content": script.answers[-1]})
            if before and before != script.answers:
                raise SystemExit("the undisturbed fleet does not give the same answers twice")

    async def run(self, agents: int, until: float, conversations: float = math.inf) -> None:
        """Let agents hold conversations until the given time, or until `conversations` have begun."""
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

    async def _conversation(self, name: str, random: Random) -> None:
        script = random.choice(self._scripts)
        messages, headers = _begin(script), {"x-conversation-id": name}
        if self._lengths.apart:
            headers["Authorization"] = f"Bearer {headers['x-conversation-id']}"
        turns = zip(script.turns, script.answers, strict=True)
        for number, ((message, tokens), expected) in enumerate(turns, 1):
            messages.append({"role": "user", "content": message})
            if number == len(script.turns):
                headers["x-conversation-final"] = "true"
            await asyncio.sleep(self._rest_left_s())
            if not await self._take(f"{name}, turn {number}", messages, tokens, headers, expected, random):
                return
            messages.append({"role": "assistant", "content": expected})
            await asyncio.sleep(random.choice(self._lengths.waits_s))

    def _rest_left_s(self) -> float:
        lengths = self._lengths
        if not lengths.rest_s:
            return 0.0
        into_s = time.monotonic() % (lengths.busy_s + lengths.rest_s)
        return max(0.0, lengths.busy_s + lengths.rest_s - into_s) if into_s >= lengths.busy_s else 0.0

    async def _take(
        self,
        name: str,
        messages: list[dict[str, str]],
        tokens: int,
        headers: dict[str, str],
        expected: str,
        random: Random,
    ) -> bool:
        """Repeat a request until it is answered or counts as lost; return whether its answer is right."""
        began = time.monotonic()
        while time.monotonic() < began + LOST_AFTER_S:
            text, outcome = "", "answered"
            leaves = random.random() < self._lengths.hang_ups
            stays = random.uniform(0, len(expected)) if leaves else math.inf
            stream = leaves or random.random() < STREAMED
            try:
                async with (
                    asyncio.timeout(REQUEST_LIMIT_S),
                    aclosing(self._ask(messages, tokens, headers, stream)) as parts,
                ):
                    async for part in parts:
                        text += part
                        if len(text) > stays:
                            outcome = "left"
                            break
            except TimeoutError:
                outcome = "hung"
                self.seen.hung.append(
                    f"{name}: {time.monotonic() - began:.0f} s, until {datetime.now():%H:%M:%S}"
                )
            except openai.APIStatusError as refused:
                outcome = f"{refused.status_code} {refused.code or ''}".strip()
                if refused.code == SET_ASIDE:
                    headers["Authorization"] = f"Bearer {headers['x-conversation-id']}"
            except (openai.APIError, httpx.HTTPError) as broken:  # a connection, or an error within a stream
                outcome = f"{type(broken).__name__}{', in a stream' if text else ''}"
            self.seen.tries[outcome] += 1
            answered = outcome == "answered"
            if not expected.startswith(text) or (answered and text != expected):
                self.seen.wrong.append(f"{name} ({outcome}): {text!r} is not {expected!r}")
                return False
            if answered:
                self.seen.turns += 1
                self.seen.longest_turn_s = max(self.seen.longest_turn_s, time.monotonic() - began)
                return True
            await asyncio.sleep(random.uniform(*RETRY_S))
        self.seen.lost.append(name)
        return False

    async def _ask(
        self, messages: list[dict[str, str]], tokens: int, headers: dict[str, str], stream: bool
    ) -> AsyncGenerator[str, None]:
        body: dict[str, Any] = {"model": self._model, "messages": messages, "temperature": 0.0}
        body |= {"max_tokens": tokens, "extra_headers": headers}
        body |= {"extra_body": {"min_tokens": tokens, "ignore_eos": True}}
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


def _begin(script: Script) -> list[dict[str, str]]:
    return [{"role": "system", "content": script.system}]
