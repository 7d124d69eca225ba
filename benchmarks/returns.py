"""Parked conversations that come back: their KV brought back ahead, against on arrival.

    python -m benchmarks.returns [--turns 6] [--quick] [--json FILE] [--fleet FILE]

Agents hold more KV than their decoder, so that those away with a tool are parked on the host and their
blocks overwritten. Each time the agents do the same; `ahead` they announce how long their tools take, `early`
they announce more, so that they are back when their KV has been on its way for a quarter of a second. What is
compared, in one run on the same engines, forwards and back after a warm-up: the time to the first token of
turns that come back, and the time between tokens of a turn that runs beside them all along.

What a return costs is bytes over the host's bandwidth, and then a little compute. Llama-3.3-70B has 80
layers of 8 KV heads of 128, 328 KB a token in bfloat16: of 100,000 tokens 33 GB, 8.2 GB for each of four
H100s. At 50 GB/s over each GPU's own bus they take 0.16 s, at 50 GB/s for all four 0.65 s. A turn that
appends 40 tokens computes for 15 ms: 35 GB of weights and 8.2 GB of KV from each GPU's memory at 3.35 TB/s
are 13 ms, 2 x 70.6e9 x 40 operations at 4 x 600 TFLOPS 1 ms more. So the bytes take 11 to 43 times what the
compute does, and as much as it with some 1,000 appended tokens. The small model has 8 KB a token, and its
returns are all compute. `HEAVY` has 131 KB a token, in as many KV heads as it has of queries, and next to no
weights: 260 MB for 2,000 tokens.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import httpx

from benchmarks.live_policies import brought_up
from benchmarks.output import command, write_json
from benchmarks.prefixes import words
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from deploy.small_model import ModelShape, make_model
from placement.fleet.policies import ReturnRules

ROOT = Path(__file__).parents[1]
AGENTS, TURNS, QUICK_TURNS = 5, 6, 4
TOKENS, ANSWER, QUESTION_WORDS, AWAY_S = 2_000, 2, 1, 8.0
BESIDE_TOKENS, WORD_TOKENS = 500, 5  # a token a byte
HEAVY = ModelShape(hidden=64, heads=16, kv_heads=16, head_dim=128, intermediate=64, max_context=4_096)
KV_TOKENS, PREFILLER_TOKENS, BLOCK = 6_144, 4_608, 32  # less than the agents' 10,000
HOST_GIB, HEADROOM = 2.0, 128
LIMIT_S = 300.0
BEGUN_S = 0.25
ANNOUNCED_S = {"on_arrival": 0.0, "ahead": AWAY_S, "early": AWAY_S + ReturnRules().lead_s - BEGUN_S}
VARIANTS = tuple(ANNOUNCED_S)


@dataclass
class Returned:
    """What one variant saw."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens of their prompts that were not cached
    failed: int = 0

    def add(self, other: "Returned") -> None:
        self.ttft_s += other.ttft_s
        self.gaps_s += other.gaps_s
        self.computed += other.computed
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
                self.seen.computed.append(usage["prompt_tokens"] - (details.get("cached_tokens") or 0))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": words(random, QUESTION_WORDS)},
            ]
            await asyncio.sleep(AWAY_S)

    async def _beside(self) -> None:
        """A turn that runs all along, one answer after another."""
        while True:
            last = 0.0
            async for chunk in self._stream(
                f"{self._name}-beside", [{"role": "user", "content": "on"}], BESIDE_TOKENS
            ):
                if not chunk["choices"]:
                    continue
                now = time.monotonic()
                if last:
                    self.seen.gaps_s.append(now - last)
                last = now

    async def _stream(self, name: str, messages: list[dict[str, str]], tokens: int) -> AsyncIterator[Any]:
        headers = {"x-conversation-id": name}
        if (announced_s := ANNOUNCED_S[self._variant]) and tokens == ANSWER:
            headers["x-conversation-away"] = f"{announced_s:g}"
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


def prepared(file: Path, model: Path) -> FleetSpec:
    fleet = load_fleet(file)
    blocks = {"prefill": PREFILLER_TOKENS // BLOCK, "decode": KV_TOKENS // BLOCK}
    tiers = [
        tier.model_copy(update={
            "replicas": 1,
            "args": {**tier.args, "num-gpu-blocks-override": blocks[tier.role], "block-size": BLOCK},
        })
        for tier in fleet.tiers
    ]  # fmt: skip
    talks = fleet.conversation.model_copy(update={"park_after": AWAY_S / 4, "headroom_tokens": HEADROOM})
    named = {"path": str(model), "served_name": "heavy", "max_context": HEAVY.max_context}
    changes = {
        "name": "returns",
        "model": fleet.model.model_copy(update=named),
        "tiers": tiers,
        "conversation": talks,
        "engine": fleet.engine.model_copy(update={"start_together": 2}),
        "kv": fleet.kv.model_copy(update={"host_kv_gib": HOST_GIB}),
    }
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
    turns = QUICK_TURNS if options.quick else options.turns
    with tempfile.TemporaryDirectory(prefix="heavy-") as directory:
        path = Path(directory) / "heavy"
        make_model(path, HEAVY)
        fleet = prepared(options.fleet, path)
        with brought_up(fleet) as home:
            url, model = serving(home).endpoint, fleet.model.name
            seen = asyncio.run(play(url, model, TOKENS // WORD_TOKENS, turns))
            page = httpx.get(f"{url}/metrics", timeout=30).text
    for line in page.splitlines():
        if line.startswith("conserve_restores_ahead_total"):
            print(line)
    for variant, one in seen.items():
        print(
            f"{variant}: TTFT p50 {median(one.ttft_s):.3f} s ({min(one.ttft_s):.3f} to "
            f"{max(one.ttft_s):.3f}) of {len(one.ttft_s)} turns, {median(one.computed):.0f} tokens not "
            f"cached; TBT p50 {1e3 * median(one.gaps_s):.1f}, mean {1e3 * mean(one.gaps_s):.1f} ms; "
            f"{one.failed} failed"
        )
    arrival, ahead, early = (seen[variant] for variant in VARIANTS)
    figures = {
        "ttft_p50_vs_on_arrival": median(ahead.ttft_s) / median(arrival.ttft_s),
        "early_ttft_p50_vs_on_arrival": median(early.ttft_s) / median(arrival.ttft_s),
        "tbt_vs_on_arrival": median(ahead.gaps_s) / median(arrival.gaps_s),
        "tbt_mean_vs_on_arrival": mean(ahead.gaps_s) / mean(arrival.gaps_s),
        "failed": sum(one.failed for one in seen.values()),
    }
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(options.json, figures | {"table": {name: asdict(one) for name, one in seen.items()}})


if __name__ == "__main__":
    main()
