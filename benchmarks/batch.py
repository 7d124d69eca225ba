"""Measures what offline work costs a fleet's interactive users, and how much of it is done beside them.

    python -m benchmarks.batch --url http://127.0.0.1:8000 [--quick] [--json FILE] [--requests 2000]

Three kinds of phases alternate: agents alone, agents beside a batch, a batch alone. An agent holds one
conversation after another, with waits for tools. Batches are submitted with the OpenAI SDK; their requests
have mixed lengths, and half of them share a prefix.
"""

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from benchmarks.harness.chats import BATCH_ENDED, batch_file, converse
from benchmarks.harness.output import command, named_rows, print_rows, quantile, report
from benchmarks.harness.rounds import rotated
from traces import ReplayError
from traces.replay.client import (
    Calibration,
    ChatClient,
    ReplayOptions,
    ToolStyle,
    calibrate,
    first_model,
    text,
)

ALONE, BESIDE, BATCH = "agents", "agents_and_batch", "batch"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_SHARE = 0.75  # share of offline requests that are chats
OFFLINE_PROMPTS = (60, 240, 480)  # lengths in tokens


@dataclass(frozen=True)
class BatchLoad:
    """Sizes of the load: agents with their turns, batches, and the durations of phases."""

    agents: int
    turns: int
    first_prompt: int  # tokens
    append: int
    output: int
    tool_s: float  # mean wait between turns
    offline_output: int
    requests: int  # requests of each phase with a batch
    agents_s: float  # duration of a phase with agents alone
    most_s: float  # a batch that takes longer is cancelled
    rounds: int


QUICK = BatchLoad(3, 3, 200, 60, 12, 0.2, 16, 60, 4.0, 6.0, 2)


@dataclass
class Phase:
    """Measurements from all phases of one kind: agents alone, agents beside a batch, or a batch alone."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    refused: int = 0
    offline_tokens: int = 0
    offline_done: int = 0
    offline_failed: int = 0
    offline_s: float = 0.0

    @property
    def harvest(self) -> float:
        """Return how many offline tokens per second these phases computed."""
        return self.offline_tokens / self.offline_s if self.offline_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "turns": len(self.ttft_s),
            "refused": self.refused,
            **{f"ttft_p{q}_s": quantile(self.ttft_s, q / 100) for q in (50, 90, 99)},
            **{f"tbt_p{q}_s": quantile(self.tbt_s, q / 100) for q in (50, 90, 99)},
            "offline_done": self.offline_done,
            "offline_failed": self.offline_failed,
            "offline_tokens_per_s": self.harvest,
        }


class BatchBench:
    """Plays the phases: agents, batches, or both on one fleet."""

    def __init__(
        self, chat: ChatClient, api: AsyncOpenAI, sizes: Calibration, load: BatchLoad, seed: int
    ) -> None:
        self._chat, self._api, self._sizes, self._load = chat, api, sizes, load
        self._random = random.Random(seed)

    async def play(self, kind: str, phase: Phase) -> None:
        """Play one phase. Batch files are made before it begins, so that making them delays no agent."""
        files = {endpoint: self._file(endpoint) for endpoint in (CHAT, COMPLETIONS)} if kind != ALONE else {}
        if kind == BATCH:
            await self._offline(phase, files)
            return
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.agents):
                group.create_task(self._agent(phase, over))
            await (self._offline(phase, files) if files else asyncio.sleep(self._load.agents_s))
            over.set()

    async def warm_up(self) -> None:
        over = asyncio.Event()
        over.set()
        await self._conversation(Phase(), over)

    async def _agent(self, phase: Phase, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                await self._conversation(phase, over)
            except ReplayError:
                phase.refused += 1

    async def _conversation(self, phase: Phase, over: asyncio.Event) -> None:
        """Hold one conversation of an agent; stop early when the phase is over."""
        name, load = f"bench-{self._random.getrandbits(60):x}", self._load
        sizes = (load.first_prompt, *[load.append] * (load.turns - 1))
        contents = (self._text(f"{name}/{turn}", tokens) for turn, tokens in enumerate(sizes))
        async for asked, answer in converse(self._chat, contents, load.output, name):
            phase.ttft_s.append(answer.first_at - asked)
            phase.tbt_s += [later - earlier for earlier, later in pairwise(answer.arrivals)]
            if over.is_set():
                return
            await asyncio.sleep(self._random.expovariate(1 / load.tool_s))

    def _text(self, stream: str, tokens: int) -> str:
        return text(stream, self._sizes.characters(tokens))

    async def _offline(self, phase: Phase, files: dict[str, bytes]) -> None:
        """Submit a batch for chats and one for completions, and wait for both, at most `most_s` seconds."""
        batches = []
        for endpoint, data in files.items():
            file = await self._api.files.create(file=("benchmark.jsonl", data), purpose="batch")
            wanted: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
            batches.append(await self._api.batches.create(**wanted))
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._load.most_s):
                while not all(batch.status in BATCH_ENDED for batch in batches):
                    await asyncio.sleep(0.25)
                    batches = [await self._api.batches.retrieve(batch.id) for batch in batches]
        phase.offline_s += time.monotonic() - began
        for batch in batches:
            if batch.usage is not None:
                phase.offline_tokens += batch.usage.total_tokens
            if batch.request_counts is not None:
                phase.offline_done += batch.request_counts.completed
                phase.offline_failed += batch.request_counts.failed
            if batch.status not in BATCH_ENDED:
                await self._api.batches.cancel(batch.id)

    def _file(self, endpoint: str) -> bytes:
        chats = int(self._load.requests * CHAT_SHARE)
        lines = chats if endpoint == CHAT else self._load.requests - chats
        salt = f"{self._random.getrandbits(48):x}"
        return batch_file(endpoint, (self._body(endpoint, salt, number) for number in range(lines)))

    def _body(self, endpoint: str, salt: str, number: int) -> dict[str, Any]:
        tokens = self._random.choice(OFFLINE_PROMPTS)
        shared = tokens // 2 if number % 2 else 0
        prompt = self._text(f"shared {salt}", shared) if shared else ""
        prompt += self._text(f"{salt} {number}", tokens - shared)
        chat = {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": self._chat.model, "max_tokens": self._load.offline_output, "temperature": 0.0}
        return body | (chat if endpoint == CHAT else {"prompt": prompt})


async def measure(url: str, key: str, load: BatchLoad, seed: int) -> dict[str, Phase]:
    phases = {ALONE: Phase(), BESIDE: Phase(), BATCH: Phase()}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, timeout=600) as api,
    ):
        chat = ChatClient(session, ReplayOptions(url), await first_model(session, url))
        bench = BatchBench(chat, api, await calibrate(session, url, chat, ToolStyle.TEXT), load, seed)
        await bench.warm_up()
        for number in range(load.rounds):
            for kind in rotated(list(phases), number):
                print(f"round {number + 1} of {load.rounds}: {kind}", flush=True)
                await bench.play(kind, phases[kind])
    return phases


def ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def main() -> None:
    parser = command(__doc__, quick="within 45 seconds", seed=1)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="benchmark")
    parser.add_argument("--requests", type=int, default=2_000, help="offline requests beside agents")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    load, each = QUICK, options.requests // options.rounds
    if not options.quick:
        load = BatchLoad(6, 6, 800, 150, 32, 1.0, 32, each, 30.0, 900.0, options.rounds)
    phases = asyncio.run(measure(options.url, options.api_key, load, options.seed))
    alone, beside, batch = phases[ALONE], phases[BESIDE], phases[BATCH]
    figures = {
        "ttft_p99_vs_no_batch": ratio(quantile(beside.ttft_s, 0.99), quantile(alone.ttft_s, 0.99)),
        "tbt_p99_vs_no_batch": ratio(quantile(beside.tbt_s, 0.99), quantile(alone.tbt_s, 0.99)),
        "harvest_vs_batch_only": ratio(beside.harvest, batch.harvest),
    }
    tables = {name: phase.to_json() for name, phase in phases.items()}
    print_rows("phases", named_rows("phase", tables))
    report(options.json, figures, phases=tables)


if __name__ == "__main__":
    main()
