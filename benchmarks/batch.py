"""What offline work costs the interactive users of a running fleet, and what it gets done beside them.

python -m benchmarks.batch --url http://127.0.0.1:8000 [--quick] [--json FILE] [--requests 2000]
python -m benchmarks.batch --validation [--quick] [--json FILE]   what validation costs: batch_validation.py

Three kinds of phases take turns in one run: agents alone, agents beside a batch, a batch alone. Agents are
closed loops of conversations with tool waits. Batches are handed in with the OpenAI SDK, mixed in length,
half of the requests with a common beginning.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from openai.types import Batch

from benchmarks import batch_validation
from benchmarks.output import quantile
from traces import ReplayError
from traces.replay.client import (
    Calibration,
    ChatClient,
    Message,
    ReplayOptions,
    ToolStyle,
    calibrate,
    first_model,
    text,
)

_ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class BatchLoad:
    agents: int
    turns: int
    first_prompt: int  # tokens
    append: int
    output: int
    tool_s: float  # mean wait between turns
    offline_prompts: tuple[int, ...]  # tokens
    offline_output: int
    requests: int  # of one batch phase
    agents_s: float  # how long a phase of agents alone lasts
    most_s: float  # a batch is cancelled after this long
    rounds: int


QUICK = BatchLoad(3, 3, 200, 60, 12, 0.2, (60, 240, 480), 16, 60, 4.0, 6.0, 2)


@dataclass
class Phase:
    """What was seen in all phases of one kind."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    refused: int = 0
    offline_tokens: int = 0
    offline_done: int = 0
    offline_failed: int = 0
    offline_s: float = 0.0

    @property
    def harvest(self) -> float:
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


class ChatAgents:
    def __init__(self, chat: ChatClient, sizes: Calibration, load: BatchLoad, seed: int) -> None:
        self._chat = chat
        self._sizes = sizes
        self._load = load
        self._random = random.Random(seed)
        self._numbers = iter(range(1 << 30))

    async def talk(self, phase: Phase, until: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.agents):
                group.create_task(self._agent(phase, until))

    async def _agent(self, phase: Phase, until: asyncio.Event) -> None:
        while not until.is_set():
            name = f"bench-{self._random.getrandbits(48):x}-{next(self._numbers)}"
            messages = [self.says(name, self._load.first_prompt)]
            for turn in range(self._load.turns):
                asked = time.monotonic()
                try:
                    answer = await self._chat.ask(messages, self._load.output, name)
                except ReplayError:
                    phase.refused += 1
                    break
                phase.ttft_s.append(answer.first_at - asked)
                phase.tbt_s += [later - earlier for earlier, later in pairwise(answer.arrivals)]
                messages += [{"role": "assistant", "content": answer.text}]
                messages += [self.says(f"{name}/{turn}", self._load.append)]
                if until.is_set():
                    return
                await asyncio.sleep(self._random.expovariate(1 / self._load.tool_s))

    def says(self, stream: str, tokens: int) -> Message:
        return {"role": "user", "content": text(stream, self._sizes.characters(tokens))}


class Offline:
    """Two batches at a time: chat and completions."""

    def __init__(self, api: AsyncOpenAI, model: str, sizes: Calibration, load: BatchLoad, seed: int) -> None:
        self._api = api
        self._sizes = sizes
        self._model = model
        self._load = load
        self._random = random.Random(seed)

    def files(self) -> dict[str, bytes]:
        """What is to be handed in, by endpoint. Made before a phase: it would hold up the agents' clocks."""
        chat = self._load.requests * 3 // 4
        return {
            "/v1/chat/completions": self._file("/v1/chat/completions", chat),
            "/v1/completions": self._file("/v1/completions", self._load.requests - chat),
        }

    async def run(self, phase: Phase, files: dict[str, bytes]) -> None:
        batches = [await self._submit(endpoint, data) for endpoint, data in files.items()]
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._load.most_s):
                while not all(batch.status in _ENDED for batch in batches):
                    await asyncio.sleep(0.25)
                    batches = [await self._api.batches.retrieve(batch.id) for batch in batches]
        except TimeoutError:
            pass
        phase.offline_s += time.monotonic() - started
        for batch in batches:
            self._note(phase, batch)
            if batch.status not in _ENDED:
                await self._api.batches.cancel(batch.id)

    async def _submit(self, endpoint: Any, data: bytes) -> Batch:
        file = await self._api.files.create(file=("benchmark.jsonl", data), purpose="batch")
        return await self._api.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"by": "benchmark"}
        )

    def _file(self, endpoint: str, count: int) -> bytes:
        salt = f"{self._random.getrandbits(48):x}"
        lines = (json.dumps(self._line(endpoint, salt, number)) for number in range(count))
        return "\n".join(lines).encode()

    def _line(self, endpoint: str, salt: str, number: int) -> dict[str, Any]:
        tokens = self._random.choice(self._load.offline_prompts)
        shared = tokens // 2 if number % 2 else 0  # half of the requests begin alike
        prompt = text(f"shared {salt}", self._sizes.characters(shared))
        prompt += text(f"{salt} {number}", self._sizes.characters(tokens - shared))
        asked = (
            {"messages": [{"role": "user", "content": prompt}]} if "chat" in endpoint else {"prompt": prompt}
        )
        body = {"model": self._model, "max_tokens": self._load.offline_output, "temperature": 0.0, **asked}
        return {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}

    @staticmethod
    def _note(phase: Phase, batch: Batch) -> None:
        if batch.usage is not None:
            phase.offline_tokens += batch.usage.total_tokens
        if batch.request_counts is not None:
            phase.offline_done += batch.request_counts.completed
            phase.offline_failed += batch.request_counts.failed


async def measure(url: str, key: str, load: BatchLoad, seed: int) -> dict[str, Phase]:
    phases = {"agents": Phase(), "agents_and_batch": Phase(), "batch": Phase()}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, timeout=600) as api,
    ):
        model = await first_model(session, url)
        chat = ChatClient(session, ReplayOptions(url), model)
        sizes = await calibrate(session, url, chat, ToolStyle.TEXT)
        agents, offline = ChatAgents(chat, sizes, load, seed), Offline(api, model, sizes, load, seed)
        await chat.ask([agents.says("warm up", load.first_prompt)], load.output, f"bench-warm-{seed}")
        order = list(phases)
        for number in range(load.rounds):
            for kind in order[number % 3 :] + order[: number % 3]:  # so that drift meets each kind alike
                print(f"round {number + 1} of {load.rounds}: {kind}", flush=True)
                await _one(kind, phases[kind], agents, offline, load)
    return phases


async def _one(kind: str, phase: Phase, agents: ChatAgents, offline: Offline, load: BatchLoad) -> None:
    over = asyncio.Event()
    files = offline.files() if kind != "agents" else {}
    if kind == "batch":
        await offline.run(phase, files)
        return
    talking = asyncio.create_task(agents.talk(phase, over))
    if kind == "agents":
        await asyncio.sleep(load.agents_s)
    else:
        await offline.run(phase, files)
    over.set()
    await talking


def figures(phases: dict[str, Phase]) -> dict[str, Any]:
    alone, both, batch = phases["agents"], phases["agents_and_batch"], phases["batch"]

    def ratio(above: float, below: float) -> float | None:
        return above / below if below else None

    return {
        "ttft_p99_vs_no_batch": ratio(quantile(both.ttft_s, 0.99), quantile(alone.ttft_s, 0.99)),
        "tbt_p99_vs_no_batch": ratio(quantile(both.tbt_s, 0.99), quantile(alone.tbt_s, 0.99)),
        "harvest_vs_batch_only": ratio(both.harvest, batch.harvest),
        "phases": {name: phase.to_json() for name, phase in phases.items()},
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--validation", action="store_true", help="without a fleet: see batch_validation.py")
    options.add_argument("--lines", type=int, default=1_000_000, help="of the batch that is validated")
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--api-key", default="benchmark")
    options.add_argument("--quick", action="store_true", help="within 45 seconds")
    options.add_argument("--json", type=Path)
    options.add_argument("--requests", type=int, default=2_000, help="of all phases beside agents together")
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--agents", type=int, default=6)
    options.add_argument("--agents-seconds", type=float, default=30.0, help="of a phase of agents alone")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    if given.validation:
        write(batch_validation.main(given), given.json)
        return
    load = QUICK
    if not given.quick:
        each = given.requests // given.rounds
        load = BatchLoad(
            given.agents, 6, 800, 150, 32, 1.0, (60, 240, 480), 32, each, given.agents_seconds, 900.0,
            given.rounds,
        )  # fmt: skip
    found = figures(asyncio.run(measure(given.url, given.api_key, load, given.seed)))
    for name, phase in found["phases"].items():
        print(name, " ".join(f"{key} {value:.4g}" for key, value in phase.items()))
    for name in ("ttft_p99_vs_no_batch", "tbt_p99_vs_no_batch", "harvest_vs_batch_only"):
        print(f"{name} {found[name]:.3f}" if found[name] is not None else f"{name} not measured")
    write(found, given.json)


def write(found: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
