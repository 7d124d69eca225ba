"""Parked conversations that come back: their KV brought back ahead, against on arrival.

    python -m benchmarks.returns [--turns 10] [--quick] [--json FILE] [--fleet FILE]

Agents hold more KV than their decoder, so that those away with a tool are parked on the host and their
blocks overwritten. Both times the agents do the same; `ahead` they announce how long their tools take. What
is compared, in one run on the same engines, forwards and back after a warm-up: the time to the first token
of turns that come back, and the time between tokens of a turn that runs beside them all along.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.live_policies import brought_up
from benchmarks.output import command, write_json
from benchmarks.prefixes import words, words_of
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving

ROOT = Path(__file__).parents[1]
AGENTS, TURNS, QUICK_TURNS = 6, 10, 4
TOKENS, ANSWER, AWAY_S = 6_000, 8, 8.0
KV_TOKENS, BLOCK = 24_576, 32  # less than the agents' 36,000
LIMIT_S = 300.0
VARIANTS = ("on_arrival", "ahead")


@dataclass
class Returned:
    """What one variant saw."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)  # share of a prompt that was not computed
    failed: int = 0

    def add(self, other: "Returned") -> None:
        self.ttft_s += other.ttft_s
        self.gaps_s += other.gaps_s
        self.cached += other.cached
        self.failed += other.failed


class AwayAgents:
    def __init__(
        self, http: httpx.AsyncClient, model: str, variant: str, number: int, size: int, turns: int
    ) -> None:
        self._http, self._model, self._variant, self._name = http, model, variant, f"{variant}-{number}"
        self._size, self._turns = size, turns
        self.seen = Returned()

    async def run(self) -> None:
        running = asyncio.create_task(self._beside())
        await asyncio.gather(*(self._agent(number) for number in range(AGENTS)))
        self.seen.failed += running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def _agent(self, number: int) -> None:
        random = Random(f"{self._name} {number}")
        messages = [{"role": "user", "content": words(random, self._size)}]
        await asyncio.sleep(number * AWAY_S / AGENTS)
        for turn in range(self._turns):
            began, first, text, usage = time.monotonic(), 0.0, "", None
            try:
                async for chunk in self._stream(f"{self._name}-{number}", messages, ANSWER):
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        first = first or time.monotonic() - began
                        text += choice["delta"].get("content") or ""
            except httpx.HTTPError as wrong:
                print(f"  {self._variant} {number}: {wrong!r}", flush=True)
                self.seen.failed += 1
                return
            if turn and usage:
                self.seen.ttft_s.append(first)
                details = usage.get("prompt_tokens_details") or {}
                self.seen.cached.append((details.get("cached_tokens") or 0) / usage["prompt_tokens"])
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": words(random, 20)},
            ]
            await asyncio.sleep(AWAY_S)

    async def _beside(self) -> None:
        """A turn that runs all along, one answer after another."""
        while True:
            last = 0.0
            async for chunk in self._stream(
                f"{self._name}-beside", [{"role": "user", "content": "on"}], 2_000
            ):
                if not chunk["choices"]:
                    continue
                now = time.monotonic()
                if last:
                    self.seen.gaps_s.append(now - last)
                last = now

    async def _stream(self, name: str, messages: list[dict[str, str]], tokens: int) -> AsyncIterator[Any]:
        headers = {"x-conversation-id": name}
        if self._variant == "ahead" and tokens == ANSWER:
            headers["x-conversation-away"] = f"{AWAY_S:.0f}"
        body = {
            "model": self._model, "messages": messages, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
            "max_tokens": tokens, "min_tokens": tokens,
        }  # fmt: skip
        path = "/v1/chat/completions"
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


def prepared(file: Path) -> FleetSpec:
    fleet = load_fleet(file)
    tiers = [tier.model_copy(update={"replicas": 1}) for tier in fleet.tiers]
    talks = fleet.conversation.model_copy(update={"park_after": AWAY_S / 4})
    args = {**fleet.engine.args, "num-gpu-blocks-override": KV_TOKENS // BLOCK, "block-size": BLOCK}
    engine = fleet.engine.model_copy(update={"start_together": 2, "args": args})
    model = fleet.model.model_copy(update={"max_context": KV_TOKENS // 2})
    changes = {"name": "returns", "model": model, "tiers": tiers, "conversation": talks, "engine": engine}
    return fleet.model_copy(update=changes)


async def play(url: str, model: str, size: int, turns: int) -> dict[str, Returned]:
    seen: dict[str, Returned] = {}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for number, variant in enumerate((VARIANTS[0], *VARIANTS, *reversed(VARIANTS))):
            agents = AwayAgents(http, model, variant, number, size, turns if number else 1)
            await agents.run()
            if number:  # the first is a warm-up
                seen.setdefault(variant, Returned()).add(agents.seen)
            for name in (*range(AGENTS), "beside"):
                await http.delete(f"/v1/conversations/{variant}-{number}-{name}")
    return seen


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_TURNS} turns")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    options = parser.parse_args()
    fleet = prepared(options.fleet)
    with brought_up(fleet) as home:
        url, model = serving(home).endpoint, fleet.model.name
        size = words_of(url, model, TOKENS)
        seen = asyncio.run(play(url, model, size, QUICK_TURNS if options.quick else options.turns))
        page = httpx.get(f"{url}/metrics", timeout=30).text
    for line in page.splitlines():
        if line.startswith("conserve_restores_ahead_total"):
            print(line)
    for variant, one in seen.items():
        print(
            f"{variant}: TTFT p50 {median(one.ttft_s):.3f} s of {len(one.ttft_s)} turns, cached "
            f"{median(one.cached):.3f}; TBT p50 {1e3 * median(one.gaps_s):.1f} ms; {one.failed} failed"
        )
    ahead, arrival = seen["ahead"], seen["on_arrival"]
    figures = {
        "ttft_p50_vs_on_arrival": median(ahead.ttft_s) / median(arrival.ttft_s),
        "tbt_vs_on_arrival": median(ahead.gaps_s) / median(arrival.gaps_s),
        "failed": ahead.failed + arrival.failed,
    }
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(options.json, figures | {"table": {name: asdict(one) for name, one in seen.items()}})


if __name__ == "__main__":
    main()
